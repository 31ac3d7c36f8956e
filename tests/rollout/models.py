"""Tiny policies whose next token depends on the preceding tokens and their positions."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch

from hone.models.policy import PolicyModel
from hone.models.tiny import character_tokenizer, tiny_lm
from hone.ops.attention import SegmentLayout
from hone.ops.rows import pack_rows

TOKENIZER = character_tokenizer("abcdefghijklmnop +-=.")
EOS = TOKENIZER.eos_token_id
VOCABULARY = len(TOKENIZER)
POSITIONS = 1024
SHAPE = {"hidden": 32, "mlp": 64}
"""The sizes of every policy; tests of vLLM replace these, because its CPU kernels need larger heads."""


@cache
def sharp_lm(family: str, seed: int) -> Any:
    lm = tiny_lm(VOCABULARY, max_positions=POSITIONS, family=family, seed=seed, **SHAPE)
    if family == "mistral":
        lm.config.sliding_window = 12
        for layer in lm.model.layers:
            layer.self_attn.sliding_window = 12
    # With the usual initialisation, all next-token distributions are nearly equal.
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6.0)
    return lm.eval()


def policy(family: str = "qwen2", seed: int = 0) -> PolicyModel:
    """Returns a new policy, which a test may change."""
    return PolicyModel(copy.deepcopy(sharp_lm(family, seed)))


def prompts(count: int, shortest: int = 1, longest: int = 24, seed: int = 0) -> list[list[int]]:
    """Random prompts without end tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def hf_greedy(model: PolicyModel, prompt: list[int], new_tokens: int) -> list[int]:
    """Returns the tokens of `transformers.generate`, with transformers' own attention."""
    lm = copy.deepcopy(model.lm)
    lm.set_attn_implementation("sdpa")
    ids = torch.tensor([prompt])
    out = lm.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def trainer_log_probs(
    model: PolicyModel, prompt: list[int], response: list[int], temperature: float
) -> list[float]:
    """Returns the log-probs that the trainer computes with the policy on a packed row."""
    prompts, responses = torch.tensor([prompt]), torch.tensor([response])
    attention = torch.ones(1, len(prompt) + len(response), dtype=torch.int64)
    packed = pack_rows(
        prompts, responses, attention, torch.ones_like(responses), share_prompts=False
    )
    with torch.no_grad():
        return model(packed, temperature=temperature)["log_probs"][0].tolist()


def next_probabilities(model: PolicyModel, prompt: list[int], temperature: float) -> torch.Tensor:
    """Returns the next-token distribution [V] in float64, by a plain forward."""
    ids = torch.tensor(prompt)
    with torch.no_grad():
        hidden = model.decoder(
            input_ids=ids[None],
            position_ids=torch.arange(len(ids))[None],
            use_cache=False,
            layout=SegmentLayout([len(ids)], []),
        ).last_hidden_state[0]
        return torch.softmax(model.logits(hidden[-1:])[0].double() / temperature, -1)
