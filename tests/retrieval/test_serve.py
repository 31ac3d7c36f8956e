"""Indexes are built once and reused; the dense one finds a passage by itself; Search-R1's flags."""

from __future__ import annotations

import socket

import pytest

from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.retrieval.corpus import CorpusError
from hone.retrieval.dense import Encoder, style_of
from hone.retrieval.serve import IndexOptions, open_index
from hone.retrieval.serve import main as serve
from tests.retrieval.passages import TEXTS, silent, write_corpus


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    tokenizer = character_tokenizer()
    model = tiny_lm(len(tokenizer), hidden=32, layers=1, heads=2)
    return str(save_pretrained(model, tokenizer, tmp_path_factory.mktemp("encoder")))


@pytest.mark.parametrize("kind", ["bm25", "dense"])
def test_an_index_is_built_once_and_anew_for_another_corpus(tmp_path, encoder, kind) -> None:
    file, told = write_corpus(tmp_path), []
    options = IndexOptions(file, kind, encoder=encoder)

    def progress(what, done, of):
        told.append(what)

    _, first = open_index(options, progress)
    assert told
    told.clear()
    _, second = open_index(options, progress)
    assert told == []
    assert first.search(["capital"], 2) == second.search(["capital"], 2)
    with file.open("a") as more:
        more.write('{"contents": "one more"}\n')
    corpus, _ = open_index(options, progress)
    assert told
    assert len(corpus) == 5


def test_the_dense_index_finds_a_passage_by_its_own_words(tmp_path, encoder) -> None:
    options = IndexOptions(write_corpus(tmp_path), "dense", encoder=encoder, kind="HNSW16")
    corpus, index = open_index(options, silent)
    asked = [passage.contents for passage in corpus]
    assert [hits[0].number for hits in index.search(asked, 1)] == [0, 1, 2, 3]
    [all_of_them] = index.search(["owl"], 10)
    assert len(all_of_them) == len(TEXTS)  # no hit is made up to reach ten
    assert all(len(hits) == len(TEXTS) for hits in index.search(["", "owl"], 10))


def test_a_ready_faiss_file_must_fit_the_corpus(tmp_path, encoder) -> None:
    options = IndexOptions(write_corpus(tmp_path), "dense", encoder=encoder)
    open_index(options, silent)
    ready = tmp_path / "corpus.jsonl.index" / "dense.faiss"
    with (tmp_path / "corpus.jsonl").open("a") as more:
        more.write('{"contents": "one more"}\n')
    with pytest.raises(CorpusError, match="4 vectors and the corpus 5 passages"):
        open_index(IndexOptions(options.corpus, "dense", file=ready, encoder=encoder), silent)
    with pytest.raises(CorpusError, match="does not exist"):
        open_index(
            IndexOptions(options.corpus, "dense", file=tmp_path / "none", encoder=encoder), silent
        )


def test_vectors_are_of_length_one_and_padding_changes_nothing(encoder) -> None:
    encode = Encoder(encoder)
    together = encode(["owl", "a much longer text about rivers"])
    assert ((together**2).sum(1)).tolist() == pytest.approx([1, 1], abs=1e-5)
    assert together[0].tolist() == pytest.approx(encode(["owl"])[0].tolist(), abs=1e-4)


def test_prefixes_go_by_the_encoders_name() -> None:
    assert style_of("intfloat/e5-base-v2").passage == "passage: "
    assert style_of("BAAI/bge-base-en-v1.5").pooling == "cls"
    assert style_of("all-MiniLM-L6-v2").query == ""


def test_a_mistake_on_the_command_line_is_one_sentence(tmp_path, capsys) -> None:
    from hone.cli import main

    assert main(["serve-retriever", "--corpus", str(tmp_path / "none.jsonl")]) == 2
    assert "is no file; give a corpus of JSON lines" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["serve-retriever", "--help"])
    assert "--retriever_name" in capsys.readouterr().out


def test_a_port_in_use_is_one_sentence(tmp_path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = ["--corpus_path", str(write_corpus(tmp_path)), "--retriever_name", "bm25"]
        with pytest.raises(CorpusError, match=f"cannot listen at 127.0.0.1:{port}.*use --port"):
            serve([*flags, "--port", str(port)])
