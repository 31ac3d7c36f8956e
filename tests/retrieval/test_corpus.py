"""A corpus is read in both formats, plain and gzipped; errors name the line."""

from __future__ import annotations

import gzip

import pytest

from hone.retrieval.corpus import CorpusError, Passage, open_corpus
from tests.retrieval.passages import TEXTS, write_corpus


@pytest.mark.parametrize("layout", ["contents", "title"])
@pytest.mark.parametrize("gzipped", [False, True])
def test_both_layouts_are_read_plain_and_gzipped(tmp_path, layout, gzipped) -> None:
    file = write_corpus(tmp_path, layout=layout)
    if gzipped:
        file = file.with_name("corpus.jsonl.gz")
        file.write_bytes(gzip.compress((tmp_path / "corpus.jsonl").read_bytes()))
    corpus = open_corpus(file, tmp_path / "index")
    assert len(corpus) == 4
    assert corpus[1] == Passage("11", f'"Rome"\n{TEXTS["Rome"]}')
    assert [passage.id for passage in corpus] == ["10", "11", "12", "13"]


def test_a_passage_without_a_title_has_none(tmp_path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"text": "a", "title": null}\n{"text": "b"}\n')
    assert [passage.contents for passage in open_corpus(file, tmp_path)] == ['""\na', '""\nb']


def test_a_corpus_that_grew_is_read_again(tmp_path) -> None:
    file = write_corpus(tmp_path)
    assert len(open_corpus(file, tmp_path / "index")) == 4
    with file.open("a") as stream:
        stream.write('{"contents": "new"}\n')
    corpus = open_corpus(file, tmp_path / "index")
    assert len(corpus) == 5
    assert corpus[4] == Passage("4", "new")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no passages"),
        ('{"contents": "a"}\n\n', "line 2 is empty"),
        ('{"contents": "a"}\n[1]\n', 'line 2 needs "contents"'),
        ('{"contents": "a"}\n{"conte', "line 2 is not JSON"),
    ],
)
def test_an_invalid_line_raises_with_its_number(tmp_path, text, message) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text(text)
    with pytest.raises(CorpusError, match=message):
        list(open_corpus(file, tmp_path / "index"))


def test_a_missing_file_raises(tmp_path) -> None:
    with pytest.raises(CorpusError, match="is not a file"):
        open_corpus(tmp_path / "none.jsonl", tmp_path)


def test_a_passage_outside_the_corpus_is_an_index_error(tmp_path) -> None:
    corpus = open_corpus(write_corpus(tmp_path), tmp_path / "index")
    for number in (-1, -4, 4):
        with pytest.raises(IndexError, match=f"passage {number} of 4"):
            corpus[number]
