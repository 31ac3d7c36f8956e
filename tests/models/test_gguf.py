"""The GGUF reader on a small file, and the conversion of weights to Hugging Face."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from hone.models.fetch import _hf_name, _read_weight
from hone.models.gguf import GGUF, UnsupportedGGUF


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
    with pytest.raises(UnsupportedGGUF, match="letters GGUF"):
        GGUF(tmp_path / "no.gguf")
    file = GGUF(write(tmp_path / "m.gguf", {"x": ((32,), 12, b"\0" * 64)}))
    with pytest.raises(UnsupportedGGUF, match="ggml type 12"):
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
