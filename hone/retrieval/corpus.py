"""Reads the passages of a corpus from its file one at a time.

A corpus is JSON lines, plain or gzipped: `{"id", "contents"}`, where the first line of `contents` is the
quoted title, or `{"id", "title", "text"}`. Only the line offsets are kept in memory.
"""

from __future__ import annotations

import gzip
import json
import mmap
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hone.tracking.atomic import atomic_path


class CorpusError(ValueError):
    """A corpus or an index cannot be used."""


class Passage(NamedTuple):
    """One passage, in Search-R1's format."""

    id: str
    contents: str


class Corpus:
    """The passages of a file, indexed by number."""

    def __init__(self, file: Path, offsets: NDArray[np.int64]) -> None:
        self.file, self._offsets = file, offsets
        with file.open("rb") as stream:
            self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Passage:
        start, end = int(self._offsets[number]), int(self._offsets[number + 1])
        return _parse_passage(self._bytes[start:end], self.file, number + 1)

    def __iter__(self) -> Iterator[Passage]:
        return (self[number] for number in range(len(self)))


def open_corpus(path: Path, folder: Path) -> Corpus:
    """Opens the corpus at `path`; line offsets and the decompressed .gz file are cached in `folder`."""
    if not path.is_file():
        raise CorpusError(f"{path} is not a file; give a corpus of JSON lines, plain or .gz")
    folder.mkdir(parents=True, exist_ok=True)
    plain = _decompress(path, folder) if path.suffix == ".gz" else path
    if plain.stat().st_size == 0:
        raise CorpusError(f"{path} has no passages")
    return Corpus(plain, _line_offsets(plain, folder))


def _decompress(path: Path, folder: Path) -> Path:
    """Returns the decompressed file, which is written again if `path` is newer."""
    plain = folder / path.name.removesuffix(".gz")
    if not plain.exists() or plain.stat().st_mtime < path.stat().st_mtime:
        with (
            gzip.open(path, "rb") as source,
            atomic_path(plain) as temporary,
            temporary.open("wb") as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)
    return plain


def _line_offsets(plain: Path, folder: Path) -> NDArray[np.int64]:
    """Returns the start of every line, and the end of the last one."""
    cache, size = folder / f"{plain.name}.starts.npy", plain.stat().st_size
    if cache.exists() and cache.stat().st_mtime >= plain.stat().st_mtime:
        cached: NDArray[np.int64] = np.load(cache, mmap_mode="r")
        if cached[-1] == size:
            return cached
    offsets = [0]
    with plain.open("rb") as stream:
        for line in stream:
            if not line.strip():
                raise CorpusError(f"{plain} line {len(offsets)} is empty; remove it")
            offsets.append(offsets[-1] + len(line))
    array = np.asarray(offsets, dtype=np.int64)
    with atomic_path(cache) as temporary, temporary.open("wb") as out:
        np.save(out, array)
    return array


def _parse_passage(line: bytes, file: Path, number: int) -> Passage:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise CorpusError(f"{file} line {number} is not JSON ({error})") from None
    if isinstance(record, dict) and isinstance(contents := record.get("contents"), str):
        return Passage(str(record.get("id", number - 1)), contents)
    if isinstance(record, dict) and isinstance(text := record.get("text"), str):
        title = str(record.get("title", "")).strip('"')
        return Passage(str(record.get("id", number - 1)), f'"{title}"\n{text}')
    raise CorpusError(f'{file} line {number} needs "contents", or "title" and "text"')
