"""Small models and tokenizers for the quickstart, tests and benchmarks.

Nothing is downloaded. The tokenizer has one token per character, so its round trip is exact.
"""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hone.errors import UserError
from hone.models.families import check_config_supported, check_family_supported
from hone.models.policy import register_attention
from hone.models.writing import without_progress_bar
from hone.suggestions import suggestion
from hone.tracking.atomic import apply_umask

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
TURN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
"""A chat template of one line per message. Roles are shortened to one letter, because a letter is a token."""


class TinyModelError(UserError, ValueError):
    """The arguments of a tiny model are invalid."""


def character_tokenizer(
    characters: str = string.printable[:95] + "\n", words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Returns a fast tokenizer of `words` and characters, with a chat template of one line per message."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [PAD, BOS, EOS, *words, *dict.fromkeys(characters)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join([*map(re.escape, words), r"[\s\S]"])), "isolated"
    )
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=PAD
    )
    # For some families (qwen2), AutoTokenizer builds a byte-level tokenizer from the vocabulary and the added
    # tokens, without the Split above. It would write white space as other characters and match no words, so
    # both are added tokens. Split takes the first word of `words` that fits, added tokens the longest one;
    # therefore a word that begins with an earlier word is not added.
    added_tokens: list[str] = []
    for index, word in enumerate(words):
        earlier_words = tuple(earlier for earlier in words[:index] if earlier)
        if not word.startswith(earlier_words):
            added_tokens.append(word)
    added_tokens += [character for character in dict.fromkeys(characters) if character.isspace()]
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token in added_tokens]
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
) -> PreTrainedModel:
    """Returns a randomly initialized decoder of a family (llama, qwen2, qwen3, mistral, gemma …)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    _check_family(family)
    _check_shape(hidden, layers, heads, kv_heads)
    settings = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": mlp,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tie_embeddings,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": eos_token_id,
    }
    default = AutoConfig.for_model(family)
    fields = {field.name for field in dataclasses.fields(default)} | set(default.attribute_map)
    known_settings = {name: value for name, value in settings.items() if name in fields}
    config = AutoConfig.for_model(family, **known_settings)
    check_config_supported(config, f"a fresh {family}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation=register_attention())


def _check_family(family: str) -> None:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODER_FAMILIES,
    )

    advice = " Use llama, qwen2, qwen3, mistral or gemma"
    if family not in DECODER_FAMILIES:
        hint = suggestion(family, DECODER_FAMILIES) or advice
        raise TinyModelError(f"transformers has no decoder family {family!r}.{hint}")
    check_family_supported(family, f"a fresh {family}")
    if AutoConfig.for_model(family).sub_configs:
        raise TinyModelError(f"{family} has parts other than its text model.{advice}")


def _check_shape(hidden: int, layers: int, heads: int, kv_heads: int) -> None:
    if min(hidden, layers, heads, kv_heads) < 1:
        raise TinyModelError(
            f"hidden={hidden}, layers={layers}, heads={heads}, kv_heads={kv_heads}: each must be at least 1"
        )
    if hidden % (2 * heads):
        raise TinyModelError(
            f"hidden={hidden} is not divisible by heads={heads} into even parts, which rotary "
            f"positions need; use hidden={-(-hidden // (2 * heads)) * 2 * heads}"
        )
    if heads % kv_heads:
        raise TinyModelError(f"heads={heads} is not divisible by kv_heads={kv_heads}")


def save_pretrained(
    lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path
) -> Path:
    """Writes model and tokenizer as a Hugging Face folder."""
    folder = Path(folder)
    with without_progress_bar():
        lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    apply_umask(folder)
    return folder
