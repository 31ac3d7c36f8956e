"""The manifest of a checkpoint folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.tracking import manifest
from hone.tracking.manifest import (
    MANIFEST,
    FolderNotShared,
    enclosing_checkpoint,
    find_damage,
    write_manifest,
    write_shard_checksums,
)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = tmp_path / "global_step_3"
    (folder / "actor" / "huggingface").mkdir(parents=True)
    (folder / "actor" / "huggingface" / "weights").write_bytes(b"weights")
    (folder / "actor" / "shard").write_bytes(b"shard")
    write_manifest(folder)
    return folder


def test_a_folder_with_a_manifest_is_undamaged_and_can_get_a_new_one(step: Path) -> None:
    assert find_damage(step) is None
    write_manifest(step)
    assert find_damage(step) is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"weight", "actor/huggingface/weights is not what was written: it has 6 of 7 bytes"),
        (b"weighty", "actor/huggingface/weights is not what was written: its checksum differs"),
        (None, "actor/huggingface/weights is missing"),
    ],
)
def test_a_changed_or_missing_file_is_named(
    step: Path, content: bytes | None, problem: str
) -> None:
    file = step / "actor" / "huggingface" / "weights"
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    assert find_damage(step) == problem
    assert find_damage(step, step / "actor" / "huggingface") == problem


def test_ranks_compute_the_checksums_of_their_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "global_step_1" / "actor"
    folder.mkdir(parents=True)
    for rank in (0, 1, 11):
        (folder / f"__{rank}_0.distcp").write_bytes(b"shard" * (rank + 1))
        write_shard_checksums(folder, rank)
    (folder / ".metadata").write_bytes(b"table")
    read: list[str] = []
    checksum = manifest._checksum
    monkeypatch.setattr(manifest, "_checksum", lambda f: (read.append(f.name), checksum(f))[1])
    write_manifest(folder.parent)
    assert read == [".metadata"]
    assert sorted(p.name for p in folder.iterdir()) == [
        ".metadata",
        *sorted(f"__{rank}_0.distcp" for rank in (0, 1, 11)),
    ]
    assert find_damage(folder.parent) is None
    shard = folder / "__11_0.distcp"
    shard.write_bytes(b"shard")
    assert find_damage(folder.parent) == (
        "actor/__11_0.distcp (the shard of rank 11) is not what was written: it has 5 of 60 bytes"
    )
    shard.unlink()
    assert find_damage(folder.parent) == "actor/__11_0.distcp (the shard of rank 11) is missing"


def test_a_shard_that_the_writer_of_the_manifest_does_not_see_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "__3_0.distcp").write_bytes(b"shard")
    write_shard_checksums(tmp_path, 3)
    (tmp_path / "__3_0.distcp").unlink()  # as if written to another machine's disk
    with pytest.raises(FolderNotShared, match=r"rank 3.* every node must see the same folder"):
        write_manifest(tmp_path)
    assert not (tmp_path / MANIFEST).exists()


@pytest.mark.parametrize("content", [b"", b"shar", b"shard and more"])
def test_a_shard_of_another_size_than_its_rank_wrote_is_an_error(
    tmp_path: Path, content: bytes
) -> None:
    shard = tmp_path / "__2_0.distcp"
    shard.write_bytes(b"shard")
    write_shard_checksums(tmp_path, 2)
    shard.write_bytes(content)
    with pytest.raises(
        FolderNotShared, match=rf"rank 2\) was written with 5 bytes and has {len(content)} "
    ):
        write_manifest(tmp_path)
    assert not (tmp_path / MANIFEST).exists()


def test_a_manifest_that_is_nested_too_deeply_is_damage(step: Path) -> None:
    (step / MANIFEST).write_text("[" * 100_000)
    assert find_damage(step) == f"its manifest cannot be read: {MANIFEST} is nested too deeply"


def test_only_the_given_subfolder_is_checked(step: Path) -> None:
    (step / "actor" / "shard").unlink()
    assert find_damage(step, step / "actor" / "huggingface") is None
    assert find_damage(step, step / "actor") == "actor/shard is missing"


INVALID_MANIFESTS: dict[str, bytes | None] = {
    "absent": None,
    "empty": b"",
    "incomplete": b"{",
    "list": b"[]",
    "no file": b"{}",
    "number": b"5",
    "binary": b"\x80\x04\xff\x00",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "size alone": b'{"actor/shard": 5}',
    "text for a size": b'{"actor/shard": ["5", 1]}',
    "three numbers": b'{"actor/shard": [5, 1, 1]}',
    "null": b'{"actor/shard": null}',
    "elsewhere": b'{"../../etc/hostname": [1, 1]}',
    "absolute": b'{"/etc/hostname": [1, 1]}',
    "another folder's": b'{"critic/shard": [5, 1]}',
}


@pytest.mark.parametrize("kind", INVALID_MANIFESTS)
def test_without_a_valid_manifest_the_checkpoint_is_damaged(step: Path, kind: str) -> None:
    content = INVALID_MANIFESTS[kind]
    if content is None:
        (step / MANIFEST).unlink()
    else:
        (step / MANIFEST).write_bytes(content)
    assert find_damage(step) is not None
    assert "manifest" in str(find_damage(step, step / "actor" / "huggingface"))


def test_an_impossible_file_name_is_damage(step: Path) -> None:
    (step / MANIFEST).write_text('{"a\\u0000b": [1, 1]}')
    assert "cannot be read" in str(find_damage(step)) or "is missing" in str(find_damage(step))


def test_the_checkpoint_is_found_from_its_subfolders(
    step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for inside in ("", "actor", "actor/huggingface"):
        assert enclosing_checkpoint(step / inside) == step
    monkeypatch.chdir(step / "actor")
    assert enclosing_checkpoint(Path()) == step
    assert enclosing_checkpoint(step.parent) is None
    assert enclosing_checkpoint(step.parent / "global_step_3.earlier") is None
