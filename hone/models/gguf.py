"""A small reader of GGUF files: metadata, and tensors dequantized to float32.

The reader supports the tensor types of the models in fetch.py (F32, Q4_1, Q8_0) and raises for others.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from hone.types import Fields, JsonValue

_SCALAR_FORMATS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_UINT32, _STRING, _ARRAY, _UINT64 = 4, 8, 9, 10
_BLOCK_SIZE = 32
"""Number of weights per block of a quantized type."""


class UnsupportedGGUF(ValueError):
    """The file is not a GGUF file that this reader supports."""


class GGUF:
    """A GGUF file; its metadata is read on opening, its tensors on demand."""

    def __init__(self, path: str | Path) -> None:
        self._data = np.memmap(path, np.uint8, "r")
        if bytes(self._data[:4]) != b"GGUF":
            raise UnsupportedGGUF(f"{path} does not begin with the letters GGUF")
        self._position = 4
        version = self._read_scalar(_UINT32)
        if version not in (2, 3):
            raise UnsupportedGGUF(f"{path} is GGUF version {version}; this reader supports 2 and 3")
        tensor_count, metadata_count = self._read_scalar(_UINT64), self._read_scalar(_UINT64)
        self.metadata: Fields = {
            self._read_string(): self._read_value(self._read_scalar(_UINT32))
            for _ in range(metadata_count)
        }
        self._tensors = {
            self._read_string(): self._read_tensor_header() for _ in range(tensor_count)
        }
        alignment = int(self.metadata.get("general.alignment", 32))
        self._data_start = -(-self._position // alignment) * alignment

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> np.ndarray:
        """Returns a tensor as float32, slowest dimension first."""
        shape, ggml_type, offset = self._tensors[name]
        if ggml_type not in _GGML_TYPES:
            supported_types = ", ".join(label for label, *_ in _GGML_TYPES.values())
            raise UnsupportedGGUF(
                f"tensor {name} has ggml type {ggml_type}; this reader supports {supported_types}"
            )
        _, block_bytes, dequantize = _GGML_TYPES[ggml_type]
        start = self._data_start + offset
        size = int(np.prod(shape)) * block_bytes // _BLOCK_SIZE
        return dequantize(np.asarray(self._data[start : start + size])).reshape(shape)

    def _read_scalar(self, value_type: int) -> Any:
        format_ = _SCALAR_FORMATS[value_type]
        (value,) = struct.unpack_from(format_, self._data.data, self._position)
        self._position += struct.calcsize(format_)
        return value

    def _read_string(self) -> str:
        length = self._read_scalar(_UINT64)
        raw = bytes(self._data[self._position : self._position + length])
        self._position += length
        return raw.decode("utf-8")

    def _read_value(self, value_type: int) -> JsonValue:
        if value_type == _STRING:
            return self._read_string()
        if value_type == _ARRAY:
            element_type, count = self._read_scalar(_UINT32), self._read_scalar(_UINT64)
            return [self._read_value(element_type) for _ in range(count)]
        return self._read_scalar(value_type)

    def _read_tensor_header(self) -> tuple[tuple[int, ...], int, int]:
        """Returns the shape, ggml type and offset of a tensor."""
        dimensions = [self._read_scalar(_UINT64) for _ in range(self._read_scalar(_UINT32))]
        return tuple(reversed(dimensions)), self._read_scalar(_UINT32), self._read_scalar(_UINT64)


def _q8_0(raw: np.ndarray) -> np.ndarray:
    """Dequantizes Q8_0 blocks: a half-precision scale, then 32 signed bytes."""
    blocks = raw.reshape(-1, 34)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    return (scale * blocks[:, 2:].copy().view(np.int8).astype(np.float32)).reshape(-1)


def _q4_1(raw: np.ndarray) -> np.ndarray:
    """Dequantizes Q4_1 blocks: half-precision scale and minimum, then 16 bytes; low nibbles come first."""
    blocks = raw.reshape(-1, 20)
    scale, minimum = (blocks[:, i : i + 2].copy().view("<f2").astype(np.float32) for i in (0, 2))
    packed_bytes = blocks[:, 4:]
    nibbles = np.concatenate([packed_bytes & 15, packed_bytes >> 4], 1).astype(np.float32)
    return (scale * nibbles + minimum).reshape(-1)


_GGML_TYPES = {
    0: ("F32", 4 * _BLOCK_SIZE, lambda raw: raw.view("<f4").astype(np.float32)),
    3: ("Q4_1", 20, _q4_1),
    8: ("Q8_0", 34, _q8_0),
}
"""Maps the ggml type to its name, bytes per block, and the function that dequantizes it."""
