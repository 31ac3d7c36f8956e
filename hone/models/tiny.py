"""Small models and tokenizers made on the spot: for the quickstart, tests and benchmarks.

Nothing is downloaded. The tokenizer has one token a character, so its round trip is exact.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hone.models import attention
from hone.models.writing import without_progress_bar

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
TURN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
"""One line a turn, the role by its first letter: short, because every character is a token."""


def character_tokenizer(
    characters: str = string.printable[:95] + "\n", words: Sequence[str] = ()
) -> Any:
    """A fast tokenizer over `words` and single characters, with a one-line-a-turn chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [PAD, BOS, EOS, *words, *dict.fromkeys(characters)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join([*map(re.escape, words), r"[\s\S]"])), "isolated"
    )
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, bos_token=BOS, eos_token=EOS
    )
    tokenizer.chat_template = TURN_TEMPLATE
    return tokenizer


def tiny_lm(
    vocabulary: int,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    mlp: int = 128,
    max_positions: int = 1024,
    family: str = "qwen2",
    tie_embeddings: bool = True,
    seed: int = 0,
    eos_token_id: int | None = 2,
) -> Any:
    """A freshly initialised decoder of a named family (llama, qwen2, qwen3, mistral, gemma …)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    attention.register()
    config = AutoConfig.for_model(
        family,
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=mlp,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie_embeddings,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)


def save_pretrained(lm: Any, tokenizer: Any, folder: str | Path) -> Path:
    """Write model and tokenizer as an ordinary Hugging Face folder."""
    folder = Path(folder)
    with without_progress_bar():
        lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
