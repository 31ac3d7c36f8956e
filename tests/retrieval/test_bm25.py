"""BM25: best first, ties by number, only passages that share a word."""

from __future__ import annotations

import math

import pytest

from hone.retrieval.bm25 import build_bm25, open_bm25
from hone.retrieval.corpus import open_corpus
from tests.retrieval.passages import silent, write_corpus


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bm25")
    build_bm25(open_corpus(write_corpus(folder), folder), folder / "index", silent)
    return open_bm25(folder / "index")


def test_the_best_passage_comes_first_and_no_stranger(index) -> None:
    rome, owl, nothing = index.search(["capital of Italy", "owl", "zebra"], 3)
    assert [hit.number for hit in rome] == [1, 2]  # Paris is a capital too
    assert rome[0].score > rome[1].score > 0
    assert [hit.number for hit in owl] == [0]
    assert nothing == []


def test_equal_scores_go_by_number_and_topk_cuts(index) -> None:
    [found] = index.search(["river"], 4)
    assert [hit.number for hit in found] == [1, 2]
    assert found[0].score == pytest.approx(found[1].score)
    assert [[hit.number for hit in hits] for hits in index.search(["river"], 1)] == [[1]]


def test_together_is_as_alone(index) -> None:
    queries = ["river", "", "salt water", "the of", "capital"]
    assert index.search(queries, 2) == [index.search([query], 2)[0] for query in queries]


def test_a_score_is_the_formulas(index) -> None:
    """Lucene's BM25, by hand: idf · tf / (tf + k1 (1 − b + b · length / mean length))."""
    [[hit]] = index.search(["tiber"], 1)
    lengths = [8, 6, 6, 7]  # words of two letters or more, without stop words, titles counted
    idf = math.log(1 + (4 - 1 + 0.5) / (1 + 0.5))
    norm = 1.5 * (1 - 0.75 + 0.75 * lengths[1] / (sum(lengths) / 4))
    assert hit.score == pytest.approx(idf * 1 / (1 + norm), rel=0.02)
