"""File operations on local paths and HDFS (`hdfs://…`, by the `hdfs` command), under verl's names."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

HDFS = "hdfs://"
StrPath = str | os.PathLike[str]


def is_non_local(path: StrPath) -> bool:
    """Whether a path is on HDFS."""
    return str(path).startswith(HDFS)


def md5_encode(path: StrPath) -> str:
    """Returns the cache name of a remote path."""
    return hashlib.md5(str(path).encode(), usedforsecurity=False).hexdigest()


def get_local_temp_path(hdfs_path: StrPath, cache_dir: StrPath) -> str:
    """Returns the path of the local copy of a remote path."""
    return os.path.join(cache_dir, md5_encode(hdfs_path), os.path.basename(str(hdfs_path)))


def copy_to_local(
    src: StrPath,
    cache_dir: StrPath | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
    use_shm: bool = False,
) -> str:
    """Returns a local path; copies a remote file or folder once. Model names are returned unchanged."""
    if not is_non_local(src):
        return str(src)
    target = get_local_temp_path(src, cache_dir or tempfile.gettempdir())
    if always_recopy and os.path.isdir(target):
        shutil.rmtree(target)
    elif always_recopy:
        Path(target).unlink(missing_ok=True)
    if not os.path.exists(target):
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        copy(str(src), target)
    return target


copy_local_path_from_hdfs = copy_to_local


def copy(src: StrPath, dst: StrPath) -> bool:
    """Copies a file or folder between local paths and HDFS; existing files are replaced."""
    if is_non_local(src):
        _hdfs("-cp" if is_non_local(dst) else "-get", "-f", src, dst)
    elif is_non_local(dst):
        _hdfs("-put", "-f", src, dst)
    elif os.path.isdir(src):
        shutil.copytree(src, dst, dirs_exist_ok=True)
    else:
        shutil.copy(src, dst)
    return True


def makedirs(name: StrPath, mode: int = 0o777, exist_ok: bool = False) -> None:
    """Creates a folder and its parents."""
    if is_non_local(name):
        _hdfs("-mkdir", "-p", name)
    else:
        os.makedirs(name, mode, exist_ok)


def exists(path: StrPath) -> bool:
    """Whether a file or folder exists."""
    if is_non_local(path):
        return _run_hdfs("-test", "-e", path).returncode == 0
    return os.path.exists(path)


def local_mkdir_safe(path: StrPath) -> str:
    """Creates a local folder unless it exists."""
    os.makedirs(path, exist_ok=True)
    return str(path)


def resolve_config_path(config_path: str) -> str:
    """Resolves a relative path against the working directory, then against the package's parent folder."""
    if os.path.isabs(config_path):
        return config_path
    places = (Path.cwd(), Path(__file__).resolve().parents[2])
    for place in places:
        if (place / config_path).exists():
            return str(place / config_path)
    raise FileNotFoundError(
        f"{config_path!r} is neither in {places[0]} nor in {places[1]}; give an absolute path"
    )


def _hdfs(*arguments: StrPath) -> None:
    process = _run_hdfs(*arguments)
    if process.returncode:
        raise OSError(f"hdfs dfs {' '.join(map(str, arguments))} failed: {process.stderr.strip()}")


def _run_hdfs(*arguments: StrPath) -> subprocess.CompletedProcess[str]:
    command = shutil.which("hdfs")
    if command is None:
        raise OSError("the path is on HDFS, but there is no `hdfs` command on PATH; install Hadoop")
    line = [command, "dfs", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)
