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
from hone.types import JsonValue

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
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"it has no {MANIFEST}, which is written last: it is not whole"
    except (OSError, ValueError) as error:
        return f"its manifest cannot be read: {error}"
    except RecursionError:
        return f"its manifest cannot be read: {MANIFEST} is nested too deeply"
    if not _is_manifest(manifest):
        return f"its manifest cannot be read: {MANIFEST} is no table of files"
    inside = _parts_within(folder, within)
    names = [name for name in manifest if Path(name).parts[: len(inside)] == inside]
    if not names:
        return f"its manifest names no file in {'/'.join(inside)}"
    for name in names:
        if (problem := _damage_of(folder / name, manifest[name])) is not None:
            return f"{name} {problem}"
    return None


def _parts_within(folder: Path, within: Path | None) -> tuple[str, ...]:
    try:
        return (within or folder).resolve().relative_to(folder.resolve()).parts
    except ValueError:  # a link that leads out of the checkpoint: all of it is looked at
        return ()


def _is_manifest(value: JsonValue) -> bool:
    """File names inside the folder, each with a size and a checksum."""
    return (
        isinstance(value, dict)
        and len(value) > 0
        and all(
            isinstance(entry, list)
            and len(entry) == 2
            and all(isinstance(number, int) for number in entry)
            and not Path(name).is_absolute()
            and ".." not in Path(name).parts
            for name, entry in value.items()
        )
    )


def _damage_of(file: Path, expected: list[int]) -> str | None:
    try:
        if not file.is_file():
            return "is missing"
        size, time = file.stat().st_size, file.stat().st_mtime_ns
        whole = size == expected[0] and _remembered(file, size, time) == expected[1]
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        return f"cannot be read: {error}"
    return None if whole else "is not what was written"


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
