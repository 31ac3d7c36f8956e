"""The seal of a checkpoint folder: size and checksum of every file in it.

Whoever is about to use a checkpoint asks `damage`; which other one to take then is its own affair.
"""

from __future__ import annotations

import functools
import json
import re
import zlib
from pathlib import Path

from hone.tracking.atomic import atomic_write_text

MANIFEST = "manifest.json"
_STEP = re.compile(r"global_step_\d+")
_BLOCK = 1 << 20


def seal(folder: Path) -> None:
    """Write the manifest of all that lies in the folder."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    sizes_and_checksums = {
        str(p.relative_to(folder)): [p.stat().st_size, _checksum(p)] for p in files
    }
    atomic_write_text(folder / MANIFEST, json.dumps(sizes_and_checksums, indent=1))


def checkpoint_of(folder: Path) -> Path | None:
    """The `global_step_N` that a folder is, or lies in: at most an export of a role deep."""
    folder = folder.resolve()  # "." has no name
    return next((p for p in (folder, *folder.parents[:2]) if _STEP.fullmatch(p.name)), None)


def damage(folder: Path, within: Path | None = None) -> str | None:
    """What is wrong with a checkpoint, or None; `within` looks at the files of one folder in it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        return f"it has no {MANIFEST}, which is written last: it is not whole"
    except (OSError, ValueError) as error:
        return f"its manifest cannot be read: {error}"
    if not isinstance(manifest, dict):
        return f"its manifest cannot be read: {MANIFEST} is no table of files"
    inside = (within or folder).resolve().relative_to(folder.resolve()).parts
    for name, expected in manifest.items():
        file = folder / name
        if Path(name).parts[: len(inside)] != inside:
            continue
        if not file.is_file():
            return f"{name} is missing"
        size, time = file.stat().st_size, file.stat().st_mtime_ns
        if size != expected[0] or _remembered(file, size, time) != expected[1]:
            return f"{name} is not what was written"
    return None


@functools.lru_cache(maxsize=1024)
def _remembered(file: Path, size: int, mtime_ns: int) -> int:
    """One process asks for the same model several times: its tokenizer, its config, its weights."""
    return _checksum(file)


def _checksum(file: Path) -> int:
    """Against truncation and bit rot, cheap to make."""
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum
