"""File operations on local and remote paths (`s3://`, …, with fsspec), under verl's names."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

StrPath = str | os.PathLike[str]
_REMOTE_URL = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_non_local(path: StrPath) -> bool:
    """Returns whether a path is remote, such as `s3://bucket/folder`."""
    return _REMOTE_URL.match(str(path)) is not None


def file_system(url: StrPath) -> tuple[AbstractFileSystem, str]:
    """Returns the file system of a remote path and the path inside it.

    Without the package s3fs, pyarrow reads `s3://` from the server of `AWS_ENDPOINT_URL`. Without
    Java, the package hdfs-native reads `hdfs://`.
    """
    import fsspec

    scheme, _, path = str(url).partition("://")
    try:
        if scheme == "s3":
            try:
                return fsspec.filesystem("s3"), path
            except ImportError:
                return _pyarrow_s3_file_system(), path
        system, path = fsspec.core.url_to_fs(str(url))
        return system, str(path)
    except (ImportError, ValueError) as error:
        raise OSError(f"{url} cannot be opened: {error}") from error
    except OSError as error:
        if "libjvm" not in str(error) and "libhdfs" not in str(error):
            raise
        try:
            from hdfs_native.fsspec import HdfsFileSystem

            hdfs = HdfsFileSystem(**HdfsFileSystem._get_kwargs_from_urls(str(url)))
            return hdfs, str(hdfs._strip_protocol(str(url)))
        except ImportError:
            raise OSError(
                f"{url} cannot be opened: install hdfs-native (pip install hdfs-native), or Java "
                "and Hadoop's libhdfs (JAVA_HOME, HADOOP_HOME, CLASSPATH); webhdfs:// needs neither"
            ) from error


def _pyarrow_s3_file_system() -> AbstractFileSystem:
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow.fs import S3FileSystem

    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    scheme, _, address = (endpoint or "").rpartition("://")
    options = {"endpoint_override": address, "scheme": scheme or "https"} if address else {}
    return ArrowFSWrapper(S3FileSystem(**options))


def md5_encode(path: StrPath) -> str:
    """Returns the cache name of a remote path."""
    return hashlib.md5(str(path).encode(), usedforsecurity=False).hexdigest()


def get_local_temp_path(hdfs_path: StrPath, cache_dir: StrPath) -> str:
    """Returns the path of the local copy of a remote path."""
    return os.path.join(
        cache_dir, md5_encode(hdfs_path), os.path.basename(str(hdfs_path).rstrip("/"))
    )


def copy_to_local(
    src: StrPath,
    cache_dir: StrPath | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
    use_shm: bool = False,
) -> str:
    """Returns a local path; copies a remote file or folder unless its version is already copied."""
    if not is_non_local(src):
        return str(src)
    cache = Path(cache_dir or os.path.join(tempfile.gettempdir(), f"hone-remote-{os.getuid()}"))
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    if cache_dir is None and (cache.is_symlink() or cache.stat().st_uid != os.getuid()):
        raise OSError(f"{cache} belongs to another user; set TMPDIR to a folder of your own")
    system, _ = file_system(src)
    files = sorted(remote_files(src).items())
    if not files:
        raise FileNotFoundError(f"there is no file at {src}")
    version = ",".join(f"{name} {system.ukey(path)}" for name, path in files)
    target = Path(get_local_temp_path(src, cache / md5_encode(version)))
    if always_recopy:
        shutil.rmtree(target.parent, ignore_errors=True)
    if not target.exists():
        target.parent.parent.mkdir(exist_ok=True)
        partial_copy = Path(tempfile.mkdtemp(dir=target.parent.parent))
        try:
            copy(src, partial_copy / target.name)
            partial_copy.rename(target.parent)
        except OSError:
            if not target.exists():  # another process may have made the copy first
                raise
        finally:
            shutil.rmtree(partial_copy, ignore_errors=True)
    return str(target)


copy_local_path_from_hdfs = copy_to_local


def remote_files(url: StrPath) -> dict[str, str]:
    """Returns {relative name: path} of the files under a remote path, or {"": path} of a file."""
    system, root = file_system(url)
    root = root.rstrip("/")
    if system.isfile(root):
        return {"": root}
    prefix = root.lstrip("/") + "/"
    paths = system.find(root) if system.exists(root) else []
    return {path.lstrip("/").removeprefix(prefix): path for path in paths}


def glob_remote(pattern: str) -> list[str]:
    """Returns the remote paths that match a pattern, with their scheme."""
    system, path = file_system(pattern)
    scheme_and_host = pattern.removesuffix(path)
    return sorted(f"{scheme_and_host}{match}" for match in system.glob(path))


def copy(src: StrPath, dst: StrPath) -> bool:
    """Copies a file or folder between local and remote paths; existing files are replaced."""
    if is_non_local(src) and is_non_local(dst):
        with tempfile.TemporaryDirectory() as folder:
            local_path = os.path.join(folder, os.path.basename(str(src).rstrip("/")))
            copy(src, local_path)
            copy(local_path, dst)
    elif is_non_local(src):
        system, _ = file_system(src)
        for name, path in remote_files(src).items():
            if ".." in name.split("/"):
                raise OSError(f"{src} has a file whose name leaves the folder: {name!r}")
            local_path = os.path.join(dst, *name.split("/")) if name else str(dst)
            Path(local_path).parent.mkdir(parents=True, exist_ok=True)
            system.get_file(path, local_path)
    elif is_non_local(dst):
        upload(Path(src), str(dst))
    else:
        local_source = os.path.expanduser(str(src).removeprefix("file://"))
        if os.path.isdir(local_source):
            shutil.copytree(local_source, dst, dirs_exist_ok=True)
        else:
            shutil.copy(local_source, dst)
    return True


def upload(source: Path, url: str, last: str | None = None) -> None:
    """Copies a local file or folder to a remote path.

    Remote stores have no atomic rename, so the file `last` marks a complete folder: an old copy of
    the file is deleted first, and the new copy is written last.
    """
    system, root = file_system(url)
    if source.is_file():
        system.makedirs(root.rpartition("/")[0], exist_ok=True)
        system.put_file(str(source), root)
        return
    names = sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())
    if last is not None:
        if system.exists(f"{root}/{last}"):
            system.rm_file(f"{root}/{last}")
        names.sort(key=lambda name: name == last)  # False sorts before True
    for name in names:
        target = f"{root.rstrip('/')}/{name}"
        system.makedirs(target.rpartition("/")[0], exist_ok=True)
        system.put_file(str(source / name), target)


def makedirs(name: StrPath, mode: int = 0o777, exist_ok: bool = False) -> None:
    """Creates a folder and its parents."""
    if is_non_local(name):
        system, path = file_system(name)
        system.makedirs(path, exist_ok=True)
    else:
        os.makedirs(name, mode, exist_ok)


def exists(path: StrPath) -> bool:
    """Returns whether a file or folder exists."""
    if is_non_local(path):
        system, path_in_system = file_system(path)
        return bool(system.exists(path_in_system))
    return os.path.exists(path)


def local_mkdir_safe(path: StrPath) -> str:
    """Creates a local folder unless it exists."""
    os.makedirs(path, exist_ok=True)
    return str(path)


def resolve_config_path(config_path: str) -> str:
    """Resolves a relative path in the working directory, then in the package's parent folder."""
    if os.path.isabs(config_path):
        return config_path
    roots = (Path.cwd(), Path(__file__).resolve().parents[2])
    for root in roots:
        if (root / config_path).exists():
            return str(root / config_path)
    raise FileNotFoundError(
        f"{config_path!r} is neither in {roots[0]} nor in {roots[1]}; give an absolute path"
    )
