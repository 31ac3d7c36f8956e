"""A corpus file, which is read passage by passage, and the interface of its indexes.

A corpus is JSON lines, plain or gzipped: `{"id", "contents"}`, where the first line of `contents` is the
quoted title, or `{"id", "title", "text"}`. Only the line offsets are kept in memory.
"""

from __future__ import annotations

import gzip
import json
import mmap
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hone.errors import UserError
from hone.tracking.atomic import atomic_path


class CorpusError(UserError, ValueError):
    """A corpus or an index cannot be used."""


class Passage(NamedTuple):
    """One passage, in Search-R1's format."""

    id: str
    contents: str


class Hit(NamedTuple):
    """The number of a passage in the corpus, from 0, and its score for the query."""

    number: int
    score: float


class Index(Protocol):
    """Ranks the passages of one corpus by their relevance to a query."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Returns up to `topk` hits per query, best first; called by one thread at a time."""


class Corpus:
    """The passages of a file, by line index from 0."""

    def __init__(self, file: Path, offsets: NDArray[np.int64]) -> None:
        self.file, self._offsets = file, offsets
        with file.open("rb") as stream:
            self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Passage:
        if not 0 <= index < len(self):
            raise IndexError(f"passage {index} of {len(self)}")
        start, end = int(self._offsets[index]), int(self._offsets[index + 1])
        try:
            record = json.loads(self._bytes[start:end])
        except ValueError as error:
            raise CorpusError(f"{self.file} line {index + 1} is not JSON ({error})") from None
        if isinstance(record, dict):
            passage_id = str(record.get("id", index))
            contents, text = record.get("contents"), record.get("text")
            if isinstance(contents, str):
                return Passage(passage_id, contents)
            if isinstance(text, str):
                title = str(record.get("title") or "").strip('"')
                return Passage(passage_id, f'"{title}"\n{text}')
        raise CorpusError(f'{self.file} line {index + 1} needs "contents", or "title" and "text"')

    def __iter__(self) -> Iterator[Passage]:
        return (self[index] for index in range(len(self)))


def open_corpus(path: Path, folder: Path) -> Corpus:
    """Opens the corpus at `path`; line offsets and the decompressed .gz file are cached in `folder`."""
    if not path.is_file():
        raise CorpusError(f"{path} is not a file; give a corpus of JSON lines, plain or .gz")
    folder.mkdir(parents=True, exist_ok=True)
    plain_file = path
    if path.suffix == ".gz":
        plain_file = folder / path.name.removesuffix(".gz")
        if not plain_file.exists() or plain_file.stat().st_mtime < path.stat().st_mtime:
            with (
                gzip.open(path, "rb") as source,
                atomic_path(plain_file) as temporary,
                temporary.open("wb") as stream,
            ):
                shutil.copyfileobj(source, stream, 1 << 20)
    if plain_file.stat().st_size == 0:
        raise CorpusError(f"{path} has no passages")
    return Corpus(plain_file, _line_offsets(plain_file, folder))


def _line_offsets(plain_file: Path, folder: Path) -> NDArray[np.int64]:
    """Returns the byte offset of every line, and the end of the last line."""
    cache_file, size = folder / f"{plain_file.name}.starts.npy", plain_file.stat().st_size
    if cache_file.exists() and cache_file.stat().st_mtime >= plain_file.stat().st_mtime:
        cached_offsets: NDArray[np.int64] = np.load(cache_file, mmap_mode="r")
        if cached_offsets[-1] == size:
            return cached_offsets
    offsets = [0]
    with plain_file.open("rb") as stream:
        for line in stream:
            if not line.strip():
                raise CorpusError(f"{plain_file} line {len(offsets)} is empty; remove it")
            offsets.append(offsets[-1] + len(line))
    array = np.asarray(offsets, dtype=np.int64)
    with atomic_path(cache_file) as temporary, temporary.open("wb") as stream:
        np.save(stream, array)
    return array
