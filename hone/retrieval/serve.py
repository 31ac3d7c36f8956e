"""`hone serve-retriever`: serves a corpus over HTTP; the index is built once and then reused.

`python -m hone.retrieval.serve` also accepts the flags of Search-R1's retrieval_server.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hone.data.rows import file_fingerprint
from hone.retrieval.corpus import Corpus, CorpusError, Index, open_corpus
from hone.retrieval.server import Service
from hone.services.json_server import HOST_NAME_HELP
from hone.tracking.atomic import atomic_write_text
from hone.tracking.lock import lock_folder

log = logging.getLogger(__name__)

DEFAULT_TOPK, DEFAULT_PORT = 3, 8000
_DEFAULT_ENCODER = "all-MiniLM-L6-v2"


@dataclass(frozen=True)
class IndexOptions:
    """The settings of an index."""

    corpus: Path
    index: str = "bm25"
    """bm25 or dense."""
    folder: Path | None = None
    """Folder of the index; None uses a folder next to the corpus."""
    file: Path | None = None
    """An existing faiss file (Search-R1's index_path)."""
    encoder: str = _DEFAULT_ENCODER
    kind: str = "Flat"
    """Type of the faiss index."""
    device: str = "cpu"
    encoder_name: str | None = None
    """Selects the prefixes and the pooling (Search-R1's retriever_name); None uses `encoder`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags; some have Search-R1's name as a second name."""
    add = parser.add_argument
    add("--corpus", "--corpus_path", type=Path, required=True, help="JSON lines, plain or .gz")
    add("--index", default=None, choices=["bm25", "dense"], help="default bm25")
    add("--index-folder", type=Path, default=None, help="default: next to the corpus")
    add("--index_path", type=Path, default=None, help="an existing faiss file")
    add("--encoder", "--retriever_model", default=_DEFAULT_ENCODER, help="folder or name")
    add("--retriever_name", default=None, help="bm25, or any name of a dense encoder (e5, bge)")
    add("--kind", "--faiss_type", default="Flat", help="faiss index: Flat, HNSW64 (default: Flat)")
    add("--device", default="cpu", help="device of the encoder (default: cpu)")
    add("--faiss_gpu", action="store_true", help="the same as --device cuda")
    add("--topk", type=int, default=DEFAULT_TOPK, help="passages per query, if not in the request")
    add("--host", default="127.0.0.1", help="default: loopback only")
    add("--port", type=int, default=DEFAULT_PORT)
    add("--name", action="append", default=[], dest="host_names", help=HOST_NAME_HELP)


def serve(flags: argparse.Namespace) -> int:
    """Builds or opens the index and serves requests until interrupted."""
    is_dense = flags.index == "dense" or flags.retriever_name not in (None, "bm25")
    options = IndexOptions(
        flags.corpus,
        "dense" if is_dense else "bm25",
        flags.index_folder,
        flags.index_path if is_dense else None,
        flags.encoder,
        flags.kind,
        "cuda" if flags.faiss_gpu else flags.device,
        flags.retriever_name if is_dense else None,
    )
    if flags.index_path is not None and not is_dense:
        log.info("--index_path %s is ignored: BM25 builds its own index", flags.index_path)
    corpus, index = open_index(options)
    answer_requests(Service(corpus, index, flags.topk), flags.host, flags.port, flags.host_names)
    return 0


def answer_requests(service: Service, host: str, port: int, host_names: Sequence[str]) -> None:
    """Serves requests over HTTP until interrupted."""
    try:
        server = service.server(host, port, host_names)
    except OSError as error:
        raise CorpusError(
            f"cannot listen at {host}:{port} ({error.strerror}); use --port"
        ) from None
    log.info("%s passages; serving at %s/retrieve", f"{service.num_passages:,}", server.address)
    server.serve_until_interrupted()


def open_index(options: IndexOptions) -> tuple[Corpus, Index]:
    """Opens the corpus and its index.

    The index is built if it is missing or belongs to another corpus or encoder.
    """
    folder = options.folder or options.corpus.with_name(f"{options.corpus.name}.index")
    corpus = open_corpus(options.corpus, folder)
    fingerprint_file = folder / f"{options.index}.json"

    def build_unless_current(build: Callable[[], None], **dense_properties: str) -> None:
        properties = {
            "passages": str(len(corpus)),
            "bytes": str(corpus.file.stat().st_size),
            "index": options.index,
            **dense_properties,
        }
        if _is_current(fingerprint_file, properties, corpus.file):
            return
        with lock_folder(folder):  # two servers must not build at the same time
            fingerprint_file.unlink(missing_ok=True)  # a failed build must leave no fingerprint
            properties["content"] = file_fingerprint(str(corpus.file))
            build()
            atomic_write_text(fingerprint_file, json.dumps(properties, indent=1) + "\n")

    if options.index == "bm25":
        from hone.retrieval.bm25 import build_bm25, open_bm25

        build_unless_current(partial(build_bm25, corpus, folder / "bm25"))
        return corpus, open_bm25(folder / "bm25")
    from hone.retrieval.dense import Encoder, build_dense, encoder_style, open_dense

    encoder = Encoder(options.encoder, device=options.device, name=options.encoder_name)
    file = options.file
    if file is not None and not file.exists():
        raise CorpusError(f"--index_path {file} does not exist; omit the flag to build an index")
    if file is None:
        file = folder / "dense.faiss"
        properties = {"encoder": options.encoder, "kind": options.kind}
        if encoder.style != encoder_style(options.encoder):
            properties["encoder_name"] = str(options.encoder_name)
        build = partial(build_dense, corpus, file, encoder, options.kind)
        build_unless_current(build, **properties)
    return corpus, open_dense(file, encoder, len(corpus))


def _is_current(fingerprint_file: Path, properties: dict[str, str], corpus_file: Path) -> bool:
    """Returns whether the index was built with these properties and from this content of the corpus."""
    if not fingerprint_file.exists():
        return False
    index_properties = json.loads(fingerprint_file.read_text())
    content_hash = index_properties.pop("content", None)
    if index_properties != properties:
        return False
    is_corpus_older = corpus_file.stat().st_mtime <= fingerprint_file.stat().st_mtime
    return is_corpus_older or content_hash == file_fingerprint(str(corpus_file))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="hone serve-retriever",
        description="Serves passages for queries over Search-R1's HTTP API.",
    )
    add_arguments(parser)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return serve(parser.parse_args(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
