"""Passages: both forms, plain and gzipped, read one at a time, damaged ones named by their line."""

from __future__ import annotations

import gzip

import pytest

from hone.retrieval.corpus import CorpusError, Passage, open_corpus
from tests.retrieval.passages import TEXTS, write_corpus


@pytest.mark.parametrize("form", ["contents", "title"])
@pytest.mark.parametrize("packed", [False, True])
def test_both_forms_read_the_same_plain_and_packed(tmp_path, form, packed) -> None:
    file = write_corpus(tmp_path, form=form)
    if packed:
        file = file.with_name("corpus.jsonl.gz")
        file.write_bytes(gzip.compress((tmp_path / "corpus.jsonl").read_bytes()))
    corpus = open_corpus(file, tmp_path / "made")
    assert len(corpus) == 4
    assert corpus[1] == Passage("11", f'"Rome"\n{TEXTS["Rome"]}')
    assert [passage.id for passage in corpus] == ["10", "11", "12", "13"]


def test_a_corpus_that_grew_is_read_anew(tmp_path) -> None:
    file = write_corpus(tmp_path)
    assert len(open_corpus(file, tmp_path / "made")) == 4
    with file.open("a") as more:
        more.write('{"contents": "new"}\n')
    corpus = open_corpus(file, tmp_path / "made")
    assert len(corpus) == 5
    assert corpus[4] == Passage("4", "new")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no passages"),
        ('{"contents": "a"}\n\n', "line 2 is empty"),
        ('{"contents": "a"}\n[1]\n', 'line 2 needs "contents"'),
        ('{"contents": "a"}\n{"conte', "line 2 is no JSON"),
    ],
)
def test_what_is_no_passage_is_named_by_its_line(tmp_path, text, said) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text(text)
    with pytest.raises(CorpusError, match=said):
        list(open_corpus(file, tmp_path / "made"))


def test_a_missing_file_is_told(tmp_path) -> None:
    with pytest.raises(CorpusError, match="is no file"):
        open_corpus(tmp_path / "none.jsonl", tmp_path)
