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


class CorpusError(ValueError):
    """Raised for a corpus or index that cannot be used."""


class Passage(NamedTuple):
    """One passage, in Search-R1's form."""

    id: str
    contents: str


class Corpus:
    """The passages of a file, indexed by number."""

    def __init__(self, file: Path, starts: NDArray[np.int64]) -> None:
        self.file, self._starts = file, starts
        with file.open("rb") as stream:
            self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Passage:
        start, end = int(self._starts[number]), int(self._starts[number + 1])
        return _passage(self._bytes[start:end], self.file, number + 1)

    def __iter__(self) -> Iterator[Passage]:
        return (self[number] for number in range(len(self)))


def open_corpus(path: Path, folder: Path) -> Corpus:
    """Opens the corpus at `path`; line offsets and the unpacked file of a .gz are cached in `folder`."""
    if not path.is_file():
        raise CorpusError(f"{path} is no file; give a corpus of JSON lines, plain or .gz")
    folder.mkdir(parents=True, exist_ok=True)
    plain = _unpacked(path, folder) if path.suffix == ".gz" else path
    if plain.stat().st_size == 0:
        raise CorpusError(f"{path} holds no passages")
    return Corpus(plain, _line_starts(plain, folder))


def _unpacked(path: Path, folder: Path) -> Path:
    plain = folder / path.name.removesuffix(".gz")
    if not plain.exists() or plain.stat().st_mtime < path.stat().st_mtime:
        part = plain.with_name(f"{plain.name}.part")
        with gzip.open(path, "rb") as packed, part.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
        part.replace(plain)
    return plain


def _line_starts(plain: Path, folder: Path) -> NDArray[np.int64]:
    """Returns the start of every line, and the end of the last one."""
    cache, size = folder / f"{plain.name}.starts.npy", plain.stat().st_size
    if cache.exists() and cache.stat().st_mtime >= plain.stat().st_mtime:
        offsets: NDArray[np.int64] = np.load(cache, mmap_mode="r")
        if offsets[-1] == size:
            return offsets
    starts, offset = [0], 0
    with plain.open("rb") as stream:
        for line in stream:
            offset += len(line)
            if not line.strip():
                raise CorpusError(f"{plain} line {len(starts)} is empty; remove it")
            starts.append(offset)
    array = np.asarray(starts, dtype=np.int64)
    part = cache.with_name(f"{cache.name}.part")
    with part.open("wb") as out:
        np.save(out, array)
    part.replace(cache)
    return array


def _passage(line: bytes, file: Path, number: int) -> Passage:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise CorpusError(f"{file} line {number} is no JSON ({error})") from None
    if isinstance(record, dict) and isinstance(contents := record.get("contents"), str):
        return Passage(str(record.get("id", number - 1)), contents)
    if isinstance(record, dict) and isinstance(text := record.get("text"), str):
        title = str(record.get("title", "")).strip('"')
        return Passage(str(record.get("id", number - 1)), f'"{title}"\n{text}')
    raise CorpusError(f'{file} line {number} needs "contents", or "title" and "text"')
