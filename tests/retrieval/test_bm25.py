"""BM25 ranks the passages that share a word by score, then by number."""

from __future__ import annotations

import math

import pytest

from hone.retrieval.bm25 import build_bm25, open_bm25
from hone.retrieval.corpus import CorpusError, open_corpus
from tests.retrieval.passages import write_corpus


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bm25")
    build_bm25(open_corpus(write_corpus(folder), folder), folder / "index")
    return open_bm25(folder / "index")


def test_hits_share_a_word_and_are_ordered_by_score(index) -> None:
    rome, owl, nothing = index.search(["capital of Italy", "owl", "zebra"], 3)
    assert [hit.number for hit in rome] == [1, 2]  # Paris is a capital too
    assert rome[0].score > rome[1].score > 0
    assert [hit.number for hit in owl] == [0]
    assert nothing == []


def test_equal_scores_are_ordered_by_number_before_topk(index) -> None:
    [hits] = index.search(["river"], 4)
    assert [hit.number for hit in hits] == [1, 2]
    assert hits[0].score == pytest.approx(hits[1].score)
    assert [hit.number for hit in index.search(["river"], 1)[0]] == [1]


def test_a_batch_returns_the_hits_of_single_queries(index) -> None:
    queries = ["river", "", "salt water", "the of", "capital"]
    assert index.search(queries, 2) == [index.search([query], 2)[0] for query in queries]


def test_scores_follow_lucenes_formula(index) -> None:
    """idf · tf / (tf + k1 (1 − b + b · length / mean length))."""
    [[hit]] = index.search(["tiber"], 1)
    lengths = [8, 6, 6, 7]  # words of two letters or more, without stop words, with the title
    idf = math.log(1 + (4 - 1 + 0.5) / (1 + 0.5))
    norm = 1.5 * (1 - 0.75 + 0.75 * lengths[1] / (sum(lengths) / 4))
    assert hit.score == pytest.approx(idf * 1 / (1 + norm), rel=0.02)


def test_a_corpus_without_words_is_an_error_of_the_corpus(tmp_path) -> None:
    (tmp_path / "c.jsonl").write_text('{"contents": "the the"}\n{"contents": ""}\n')
    corpus = open_corpus(tmp_path / "c.jsonl", tmp_path / "index")
    with pytest.raises(CorpusError, match=r"no passage of .*c.jsonl has a word"):
        build_bm25(corpus, tmp_path / "index" / "bm25")
