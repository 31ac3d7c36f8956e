"""Shapes measured on a GPU, with random weights: nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hone.models.policy import register_attention
from hone.models.tiny import character_tokenizer


@dataclass(frozen=True)
class Shape:
    """A decoder of the Qwen2 family."""

    name: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    tied: bool = True

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * (self.hidden // self.heads) * 2

    def attention_flops(self, lengths: list[int]) -> float:
        """Forward and backward of causal attention: 2 products of 2·d, half of the square, 3 passes."""
        return sum(3 * 2 * 2 * self.hidden * self.layers * n * n / 2 for n in lengths)


SMALL = Shape("qwen2.5-0.5b", 151_936, 896, 24, 14, 2, 4864)
LARGE = Shape("qwen2.5-1.5b", 151_936, 1536, 28, 12, 2, 8960)
SEVEN = Shape("qwen2.5-7b", 152_064, 3584, 28, 28, 4, 18_944, tied=False)
TINY = Shape("tiny", 400, 64, 2, 4, 2, 128)


def build(shape: Shape, device: torch.device, implementation: str | None = None) -> Any:
    """A freshly initialised model in the dtype its device computes in."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.mlp,
        max_position_embeddings=4096,
        tie_word_embeddings=shape.tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=implementation or register_attention()
        )
    return lm.eval()


def save(shape: Shape, folder: Path, device: torch.device) -> Path:
    """A model folder for `main_ppo`: this shape, and a tokenizer of one token a character."""
    build(shape, device).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def parameters(lm: Any) -> int:
    return sum(p.numel() for p in lm.parameters())
