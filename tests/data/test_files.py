"""Local files are used in place; remote files are copied once per version."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hone.data import files
from hone.data.reading import read_rows
from hone.data.rows import BadRowPolicy, SettingError, expand_files
from hone.models.paths import ModelNotFound, resolve_model_path
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder in memory; local copies go to the test's folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return f"memory://{request.node.name}"


def put(url: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(text)
    files.copy(tmp_path / "text", url)


def test_a_local_path_and_a_models_name_are_unchanged(tmp_path: Path) -> None:
    assert files.copy_to_local(str(tmp_path)) == str(tmp_path)
    assert files.copy_to_local("Qwen/Qwen3-0.6B", use_shm=True) == "Qwen/Qwen3-0.6B"
    assert not files.is_non_local("file:///a")
    assert files.is_non_local("s3://a/b")


def test_a_remote_file_is_copied_once_and_again_where_it_changed(
    store: str, tmp_path: Path
) -> None:
    put(f"{store}/a.txt", "one", tmp_path)
    first = files.copy_to_local(f"{store}/a.txt")
    Path(first).write_text("this copy was not made again")
    assert files.copy_to_local(f"{store}/a.txt") == first
    assert Path(first).read_text() == "this copy was not made again"
    put(f"{store}/a.txt", "two and more", tmp_path)
    second = files.copy_to_local(f"{store}/a.txt")
    assert Path(second).read_text() == "two and more"
    Path(second).write_text("x")
    files.copy_to_local(f"{store}/a.txt", always_recopy=True)
    assert Path(second).read_text() == "two and more"


def test_a_copy_that_fails_half_way_leaves_nothing_in_the_cache(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(f"{store}/a.txt", "one", tmp_path)

    def fail_half_way(src: str, dst: Path) -> None:
        dst.write_text("o")
        raise OSError("no route to host")

    with monkeypatch.context() as broken:
        broken.setattr(files, "copy", fail_half_way)
        with pytest.raises(OSError, match="no route"):
            files.copy_to_local(f"{store}/a.txt", cache_dir=tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    local_path = files.copy_to_local(f"{store}/a.txt", cache_dir=tmp_path / "cache")
    assert Path(local_path).read_text() == "one"


def test_folders_are_copied_to_a_store_and_back_with_all_files(store: str, tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "f").write_text("x")
    (tmp_path / "in" / "g").write_text("y")
    files.makedirs(f"{store}/a")
    files.copy(tmp_path / "in", f"{store}/a/b/")
    files.copy(f"{store}/a/b", f"{store}/c")
    assert set(files.remote_files(f"{store}/c")) == {"deep/f", "g"}
    assert files.exists(f"{store}/c/deep")
    assert not files.exists(f"{store}/d")
    local = Path(files.copy_to_local(f"{store}/c"))
    assert (local / "deep" / "f").read_text() == "x"


def test_the_file_that_marks_a_folder_as_complete_is_uploaded_last(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a", "manifest", "z"):
        (folder / name).write_text("1")
    files.upload(folder, store, last="manifest")
    system, _ = files.file_system(store)
    (folder / "manifest").write_text("2")
    put_file = type(system).put_file

    def fails_at_z(self: object, local: str, remote: str, **options: object) -> None:
        if remote.endswith("/z"):
            raise OSError("the connection was lost")
        put_file(self, local, remote, **options)

    monkeypatch.setattr(type(system), "put_file", fails_at_z)
    with pytest.raises(OSError, match="lost"):
        files.upload(folder, store, last="manifest")
    assert "manifest" not in files.remote_files(store)


def test_rows_and_models_are_read_from_a_store(store: str, tmp_path: Path) -> None:
    put(f"{store}/part-1.jsonl", '{"a": 1}\n', tmp_path)
    put(f"{store}/part-2.jsonl", '{"a": 2}\n', tmp_path)
    rows = read_rows(f"{store}/part-*.jsonl", BadRowPolicy("raise"))
    assert [row["a"] for row in rows.scan()] == [1, 2]
    tokenizer = character_tokenizer()
    lm = tiny_lm(len(tokenizer), hidden=8, layers=1, heads=1, kv_heads=1, mlp=8, max_positions=8)
    files.copy(save_pretrained(lm, tokenizer, tmp_path / "model"), f"{store}/model")
    assert (Path(resolve_model_path(f"{store}/model")) / "model.safetensors").is_file()


@pytest.mark.parametrize("url", ["memory://nothing/x.jsonl", "nosuchstore://a/x.jsonl"])
def test_a_missing_remote_path_is_an_error_with_its_config_key(url: str) -> None:
    with pytest.raises(SettingError, match=rf"{url} cannot be read: .*check data.train_files"):
        expand_files(url)
    with pytest.raises(ModelNotFound, match=f"model path {url} cannot be read"):
        resolve_model_path(url)


def test_hdfs_without_java_is_explained_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_java(url: str) -> None:
        raise OSError("Unable to load libjvm: dlopen(a) failed\ndlopen(b) failed")

    monkeypatch.setattr("fsspec.core.url_to_fs", no_java)
    monkeypatch.setitem(sys.modules, "hdfs_native.fsspec", None)
    with pytest.raises(OSError, match=r"pip install hdfs-native\), or .*JAVA_HOME") as caught:
        files.file_system("hdfs://host:9000/run")
    assert "\n" not in str(caught.value)


def test_local_folders_are_made_and_copied_into_each_other(tmp_path: Path) -> None:
    files.makedirs(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "f").write_text("x")
    files.makedirs(tmp_path / "c")
    assert files.copy(tmp_path / "a", tmp_path / "c")
    assert files.copy(tmp_path / "a" / "b" / "f", tmp_path / "g")
    assert files.exists(tmp_path / "c" / "b" / "f")
    assert files.exists(tmp_path / "g")
    with pytest.raises(FileExistsError):
        files.makedirs(tmp_path / "a")


def test_a_config_is_looked_for_here_and_beside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").touch()
    assert files.resolve_config_path("a.yaml") == str(tmp_path / "a.yaml")
    assert files.resolve_config_path("/x/y.yaml") == "/x/y.yaml"
    assert files.resolve_config_path("hone/cli.py").endswith("hone/cli.py")
    with pytest.raises(FileNotFoundError, match="give an absolute path"):
        files.resolve_config_path("b.yaml")


def test_a_name_that_leads_out_of_the_store_is_not_written(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(f"{store}/a", "x", tmp_path)
    monkeypatch.setattr(files, "remote_files", lambda url: {"../../out": f"{store}/a"})
    with pytest.raises(OSError, match="leaves the folder"):
        files.copy(store, tmp_path / "deep" / "in")
    assert not (tmp_path / "out").exists()


def test_a_cache_of_another_user_is_refused(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(f"{store}/a", "x", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"hone-remote-{files.os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="belongs to another user"):
        files.copy_to_local(f"{store}/a")
