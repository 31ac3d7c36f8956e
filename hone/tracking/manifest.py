"""The manifest of a checkpoint folder, written last: size and checksum of every file.

Each rank computes the checksums of its own shards, in parallel.
"""

from __future__ import annotations

import functools
import json
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

from hone.errors import UserError
from hone.tracking.atomic import atomic_write_text
from hone.types import JsonValue

MANIFEST = "manifest.json"
_STEP_FOLDER = re.compile(r"global_step_\d+")
_SHARD_FILE = re.compile(r"__(\d+)_\d+\.distcp")
"""A file of torch.distributed.checkpoint; the number is the rank that wrote it."""
_RANK_FILE_PREFIX = "shards_of_rank_"

Entry = tuple[int, int]
"""Size and checksum of a file."""


class FolderNotShared(UserError, FileNotFoundError):
    """The processes of a run do not see the same files in its folder."""


def write_shard_checksums(folder: Path, rank: int) -> None:
    """Writes the size and checksum of one rank's shards to a file that `write_manifest` reads."""
    shards = [file for file in folder.glob(f"__{rank}_*") if _SHARD_FILE.fullmatch(file.name)]
    if shards:
        entries = {file.name: _entry(file) for file in sorted(shards)}
        atomic_write_text(folder / f"{_RANK_FILE_PREFIX}{rank}.json", json.dumps(entries))


def write_manifest(folder: Path) -> None:
    """Writes the manifest of all files in the folder."""
    shard_entries: dict[Path, Entry] = {}
    for file in folder.rglob(f"{_RANK_FILE_PREFIX}*.json"):
        for name, (size, checksum) in json.loads(file.read_text(encoding="utf-8")).items():
            shard_entries[file.with_name(name)] = size, checksum
        file.unlink()
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    require_files(folder, shard_entries)
    for file, (size, _) in shard_entries.items():
        if (current_size := file.stat().st_size) != size:
            raise FolderNotShared(
                f"{_describe(str(file.relative_to(folder)))} was written with {size:,} bytes and "
                f"has {current_size:,} in {folder} here; every node must see the same folder"
            )
    entries = {
        str(file.relative_to(folder)): shard_entries.get(file) or _entry(file) for file in files
    }
    atomic_write_text(folder / MANIFEST, json.dumps(entries, indent=1))


def require_files(folder: Path, files: Iterable[Path]) -> None:
    """Raises FolderNotShared unless this process sees these files that ranks wrote."""
    if missing := sorted(file for file in files if not file.is_file()):
        raise FolderNotShared(
            f"{_describe(str(missing[0].relative_to(folder)))} was written and is not visible in "
            f"{folder} from this process; every node must see the same folder"
        )


def _entry(file: Path) -> Entry:
    return file.stat().st_size, _checksum(file)


def _describe(name: str) -> str:
    """Returns the name of a file, with the rank that wrote the file if the file is a shard."""
    shard = _SHARD_FILE.fullmatch(Path(name).name)
    return f"{name} (the shard of rank {shard[1]})" if shard else name


def enclosing_checkpoint(folder: Path) -> Path | None:
    """Returns the first `global_step_N` among the folder, its parent and its grandparent, or None."""
    folder = folder.resolve()  # "." has no name
    for candidate in (folder, *folder.parents[:2]):
        if _STEP_FOLDER.fullmatch(candidate.name):
            return candidate
    return None


def find_damage(folder: Path, within: Path | None = None) -> str | None:
    """Describes the first damage, or returns None; `within` limits the check to a subfolder."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"it has no {MANIFEST}, which is written last: it is incomplete"
    except (OSError, ValueError) as error:
        return f"its manifest cannot be read: {error}"
    except RecursionError:
        return f"its manifest cannot be read: {MANIFEST} is nested too deeply"
    if not isinstance(manifest, dict) or not manifest or not all(map(_is_valid, manifest.items())):
        return f"its manifest cannot be read: {MANIFEST} is not a table of files"
    try:
        subfolder = (within or folder).resolve().relative_to(folder.resolve()).parts
    except ValueError:  # `within` is a link out of the checkpoint: check all files
        subfolder = ()
    names = [name for name in manifest if Path(name).parts[: len(subfolder)] == subfolder]
    if not names:
        return f"its manifest names no file in {'/'.join(subfolder)}"
    problems = (_file_damage(folder, name, *manifest[name]) for name in names)
    return next(filter(None, problems), None)


def _is_valid(item: tuple[str, JsonValue]) -> bool:
    """Whether an item of a manifest is a file name inside the folder, with a size and a checksum."""
    path, entry = Path(item[0]), item[1]
    is_inside = not path.is_absolute() and ".." not in path.parts
    is_pair = isinstance(entry, list) and [type(number) for number in entry] == [int, int]
    return is_inside and is_pair


def _file_damage(folder: Path, name: str, size: int, checksum: int) -> str | None:
    file = folder / name
    try:
        if not file.is_file():
            return f"{_describe(name)} is missing"
        stat = file.stat()
        if stat.st_size == size and _cached_checksum(file, size, stat.st_mtime_ns) == checksum:
            return None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        return f"{_describe(name)} cannot be read: {error}"
    difference = "its checksum differs"
    if stat.st_size != size:
        difference = f"it has {stat.st_size:,} of {size:,} bytes"
    return f"{_describe(name)} is not what was written: {difference}"


@functools.lru_cache(maxsize=1024)
def _cached_checksum(file: Path, size: int, mtime_ns: int) -> int:
    """Returns the checksum of a file, cached because a process checks a model before each load (tokenizer,
    config, weights)."""
    return _checksum(file)


def _checksum(file: Path) -> int:
    """Returns the CRC-32, which is cheap and detects truncation and bit rot."""
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum
