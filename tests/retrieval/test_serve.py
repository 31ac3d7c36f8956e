"""Indexes are built once and reused; the command line accepts Search-R1's flags."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, replace

import pytest

from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.retrieval import serve as serve_module
from hone.retrieval.corpus import CorpusError
from hone.retrieval.dense import Encoder, encoder_style
from hone.retrieval.serve import IndexOptions, open_index
from hone.retrieval.serve import main as serve
from hone.tracking import lock
from hone.tracking.lock import FolderLocked, Holder
from tests.retrieval.passages import TEXTS, write_corpus


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    tokenizer = character_tokenizer()
    model = tiny_lm(len(tokenizer), hidden=32, layers=1, heads=2)
    return str(save_pretrained(model, tokenizer, tmp_path_factory.mktemp("encoder")))


@pytest.mark.parametrize("index", ["bm25", "dense"])
def test_an_index_is_built_again_only_for_a_changed_corpus(
    tmp_path, encoder, index, caplog
) -> None:
    caplog.set_level("INFO", "hone.retrieval")
    file = write_corpus(tmp_path)
    options = IndexOptions(file, index, encoder=encoder)
    _, first = open_index(options)
    assert caplog.records
    caplog.clear()
    _, second = open_index(options)
    assert not caplog.records
    assert first.search(["capital"], 2) == second.search(["capital"], 2)
    with file.open("a") as stream:
        stream.write('{"contents": "one more"}\n')
    corpus, _ = open_index(options)
    assert caplog.records
    assert len(corpus) == 5


def test_a_corpus_of_the_same_size_with_other_words_is_indexed_again(tmp_path, caplog) -> None:
    caplog.set_level("INFO", "hone.retrieval")
    file = tmp_path / "corpus.jsonl"
    texts = ['{"contents": "owl"}\n', '{"contents": "cat"}\n']
    for turn, lines in enumerate((texts, texts[::-1], texts[::-1])):
        file.write_text("".join(lines))
        os.utime(file, (time.time() + 60 * turn,) * 2)  # newer than the index
        corpus, index = open_index(IndexOptions(file))
        [hits] = index.search(["owl"], 1)
        assert corpus[hits[0].number].contents == "owl"
        assert bool(caplog.records) == (turn < 2)  # only newer, the file keeps its index
        caplog.clear()


def test_an_interrupted_build_is_not_used_for_the_earlier_corpus(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "index"
    first = IndexOptions(write_corpus(tmp_path), folder=folder)
    open_index(first)
    (tmp_path / "b.jsonl").write_text('{"contents": "an otter"}\n' * 2)
    second = IndexOptions(tmp_path / "b.jsonl", folder=folder)
    with monkeypatch.context() as patch:
        patch.setattr(serve_module, "atomic_write_text", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            open_index(second)
    _, index = open_index(first)
    assert [len(hits) for hits in index.search(["owl", "otter"], 1)] == [1, 0]


def test_two_servers_do_not_build_an_index_at_once(tmp_path) -> None:
    folder, parent = tmp_path / "index", os.getppid()
    folder.mkdir()
    other = replace(Holder.of_this_process(), pid=parent, started=lock._start_time(parent))
    (folder / lock.LOCK_NAME).write_text(json.dumps(asdict(other)))
    options = IndexOptions(write_corpus(tmp_path), folder=folder)
    with pytest.raises(FolderLocked, match=f"in use by .*process {parent}"):
        open_index(options)
    (folder / lock.LOCK_NAME).unlink()
    open_index(options)
    (folder / lock.LOCK_NAME).write_text(json.dumps(asdict(other)))
    open_index(options)  # a finished index needs no lock


def test_the_dense_index_ranks_a_passage_first_for_its_own_text(tmp_path, encoder) -> None:
    options = IndexOptions(write_corpus(tmp_path), "dense", encoder=encoder, kind="HNSW16")
    corpus, index = open_index(options)
    texts = [passage.contents for passage in corpus]
    assert [hits[0].number for hits in index.search(texts, 1)] == [0, 1, 2, 3]
    [hits] = index.search(["owl"], 10)
    assert len(hits) == len(TEXTS)
    assert all(len(hits) == len(TEXTS) for hits in index.search(["", "owl"], 10))


def test_an_existing_faiss_file_must_match_the_corpus(tmp_path, encoder) -> None:
    options = IndexOptions(write_corpus(tmp_path), "dense", encoder=encoder)
    open_index(options)
    existing = tmp_path / "corpus.jsonl.index" / "dense.faiss"
    with (tmp_path / "corpus.jsonl").open("a") as stream:
        stream.write('{"contents": "one more"}\n')
    with pytest.raises(CorpusError, match="4 vectors but the corpus has 5 passages"):
        open_index(IndexOptions(options.corpus, "dense", file=existing, encoder=encoder))
    with pytest.raises(CorpusError, match="does not exist"):
        open_index(
            IndexOptions(options.corpus, "dense", file=tmp_path / "none", encoder=encoder),
        )


def test_vectors_are_normalized_and_independent_of_padding(encoder) -> None:
    encode = Encoder(encoder)
    batch = encode(["owl", "a much longer text about rivers"])
    assert ((batch**2).sum(1)).tolist() == pytest.approx([1, 1], abs=1e-5)
    assert batch[0].tolist() == pytest.approx(encode(["owl"])[0].tolist(), abs=1e-4)


def test_prefixes_and_pooling_depend_on_the_encoder_name() -> None:
    assert encoder_style("intfloat/e5-base-v2").passage_prefix == "passage: "
    assert encoder_style("BAAI/bge-base-en-v1.5").pooling == "cls"
    assert encoder_style("all-MiniLM-L6-v2").query_prefix == ""


def test_the_retriever_name_selects_the_prefixes_of_a_renamed_encoder(
    tmp_path, encoder, monkeypatch
) -> None:
    hub_folder = "/cache/models--intfloat--e5-base-v2/snapshots/5b1f"
    assert encoder_style(hub_folder).query_prefix == "query: "
    options = []
    monkeypatch.setattr(serve_module, "open_index", lambda o: (options.append(o), [None] * 2)[1])
    monkeypatch.setattr(serve_module, "answer_requests", lambda *_, **__: None)
    flags = ["--corpus_path", str(write_corpus(tmp_path)), "--retriever_model", encoder]
    serve([*flags, "--retriever_name", "e5"])
    serve([*flags, "--index", "dense"])
    monkeypatch.undo()
    (_, e5), (_, plain) = map(open_index, options)
    assert e5._encoder.style.query_prefix == "query: "
    assert plain._encoder.style.query_prefix == ""
    assert e5.search(["owl"], 1) != plain.search(["owl"], 1)


def test_an_index_of_another_encoder_is_refused(tmp_path, encoder) -> None:
    options = IndexOptions(write_corpus(tmp_path), "dense", encoder=encoder)
    open_index(options)
    tokenizer = character_tokenizer()
    model = tiny_lm(len(tokenizer), hidden=16, layers=1, heads=2)
    other = str(save_pretrained(model, tokenizer, tmp_path / "other"))
    file = tmp_path / "corpus.jsonl.index" / "dense.faiss"
    with pytest.raises(CorpusError, match=r"have 32 dimensions and those of the encoder 16"):
        open_index(IndexOptions(options.corpus, "dense", file=file, encoder=other))


def test_a_missing_corpus_prints_one_sentence(tmp_path, capsys) -> None:
    from hone.cli import main

    assert main(["serve-retriever", "--corpus", str(tmp_path / "none.jsonl")]) == 2
    assert "is not a file; give a corpus of JSON lines" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["serve-retriever", "--help"])
    assert "--retriever_name" in capsys.readouterr().out


def test_a_port_in_use_raises(tmp_path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        flags = ["--corpus_path", str(write_corpus(tmp_path)), "--retriever_name", "bm25"]
        with pytest.raises(CorpusError, match=f"cannot listen at 127.0.0.1:{port}.*use --port"):
            serve([*flags, "--port", str(port)])
