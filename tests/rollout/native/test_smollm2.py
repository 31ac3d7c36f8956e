"""A real model: greedy decoding of the native engine equals `transformers.generate`, token for token."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.agents.loop_thread import run_with_engine
from hone.models.fetch import FetchError, fetch_model
from hone.models.load import load_causal_lm, load_tokenizer
from hone.models.policy import PolicyModel
from hone.rollout.contract import RolloutEngine, Sampling
from hone.rollout.native.core import NativeCore
from hone.rollout.native.engine import NativeRollout
from hone.rollout.native.paged_core import PagedCore

NEW_TOKENS = 16
ASKED = ("Say hello.", "What is 3 + 4?", "Name three colours and one animal that you like.", "Why?")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
        ],
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """`HONE_SMOLLM2` names a folder with the model; else the model is downloaded."""
    local_folder = os.environ.get("HONE_SMOLLM2")
    if local_folder and Path(local_folder, "config.json").is_file():
        return local_folder
    try:
        return str(fetch_model("smollm2-135m", tmp_path_factory.mktemp("smollm2")))
    except FetchError as error:
        pytest.skip(str(error))


def mixed_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Chats of 30 to about 200 tokens, all different."""
    prompts = []
    for i in range(count):
        text = " ".join([f"Number {i}."] + [ASKED[(i + j) % 4] for j in range(1 + i % 12)])
        chat = [{"role": "user", "content": text}]
        prompts.append(
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        )
    return prompts


def engine_on(device: str, lm: Any, ends: Sequence[int]) -> RolloutEngine:
    options: dict[str, Any] = {
        "eos_ids": ends, "max_num_seqs": 64, "max_num_batched_tokens": 8192,
    }  # fmt: skip
    if device == "cpu":
        return NativeRollout(NativeCore(PolicyModel(lm), **options))
    core = PagedCore(PolicyModel(lm), max_model_len=512, gpu_memory_utilization=0.2, **options)
    return NativeRollout(core)


def greedy(engine: RolloutEngine, prompts: list[list[int]]) -> list[list[int]]:
    async def play() -> list[list[int]]:
        jobs = [
            engine.generate(p, Sampling(NEW_TOKENS, 0.0, 0), f"r{i}") for i, p in enumerate(prompts)
        ]
        return [out.token_ids for out in await asyncio.gather(*jobs)]

    return run_with_engine(engine, play())


def by_transformers(lm: Any, prompt: list[int], device: str) -> list[int]:
    ids = torch.tensor([prompt], device=device)
    out = lm.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_equals_transformers_alone_and_in_a_batch(device: str, folder: str) -> None:
    tokenizer = load_tokenizer(folder)
    prompts = mixed_prompts(tokenizer, 6 if device == "cpu" else 64)
    lm: Any = load_causal_lm(folder, dtype=torch.float32).to(device)
    engine = engine_on(device, lm, (tokenizer.eos_token_id,))
    batched = greedy(engine, prompts)
    alone = [greedy(engine, [prompt])[0] for prompt in prompts[:3]]
    asyncio.run(engine.close())
    lm.set_attn_implementation("sdpa")
    expected = [by_transformers(lm, prompt, device) for prompt in prompts]
    assert batched == expected
    assert alone == expected[:3]
