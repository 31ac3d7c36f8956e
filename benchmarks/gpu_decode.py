"""Decoding through the native engine, beside `transformers.generate` on the same weights."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import torch

from benchmarks.gpu_models import Shape, build, parameters
from benchmarks.gpu_timing import RUNS, median_s
from hone.agents.loop_thread import run_with_engine
from hone.models.policy import PolicyModel
from hone.rollout.contract import Sampling
from hone.rollout.native.engine import NativeRollout
from hone.rollout.native.exact_decoder import ExactDecoder
from hone.rollout.native.paged_core import PagedCore


def prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    chooser = random.Random(0)
    return [[chooser.randrange(3, vocabulary) for _ in range(length)] for _ in range(count)]


def engine_for(lm: Any, *, rows: int, longest: int, exact: bool = False) -> NativeRollout:
    policy = PolicyModel(lm)
    core = PagedCore(
        policy,
        eos_ids=(2,),
        max_num_seqs=rows,
        max_num_batched_tokens=32768,
        max_model_len=longest,
        gpu_memory_utilization=0.5,
        exact=ExactDecoder(policy) if exact else None,
    )
    return NativeRollout(core)


def generate(
    engine: NativeRollout, rows: list[list[int]], lengths: list[int], seed: int = 0
) -> int:
    """Sample every row through the engine, with log-probs; returns the tokens made."""

    async def play() -> int:
        jobs = [
            engine.generate(row, Sampling(n, 1.0, seed + i, ignore_eos=True), str(i))
            for i, (row, n) in enumerate(zip(rows, lengths, strict=True))
        ]
        return sum(len(out.log_probs) for out in await asyncio.gather(*jobs))

    return run_with_engine(engine, play())


def announce(engine: NativeRollout, version: int) -> None:
    """The parameters that the engine shares have this version."""

    async def update() -> None:
        await engine.begin_update()
        await engine.commit(version)

    asyncio.run(update())


def forget(engine: NativeRollout) -> None:
    """What the last run cached must not help the next."""
    announce(engine, engine.version + 1)


def decode(
    lm: Any, shape: Shape, device: torch.device, small: bool, *, exact: bool = False
) -> dict[str, float]:
    """256 prompts of 128 tokens, 128 new tokens each."""
    rows, length, new = (8, 20, 40) if small else (256, 128, 128)
    asked = prompts(rows, length, shape.vocabulary)
    engine = engine_for(lm, rows=rows, longest=length + new, exact=exact)

    def run(tokens: int) -> None:
        forget(engine)
        generate(engine, asked, [tokens] * rows)

    print(f"  decode {rows} x {new}", flush=True)
    whole = median_s(lambda: run(new), device)
    first = median_s(lambda: run(1), device)
    asyncio.run(engine.close())
    moved = 2 * parameters(lm) + rows * (length + new / 2) * shape.kv_bytes_per_token
    step = (whole - first) / (new - 1)
    return {
        "hone_tokens_per_s": rows / step,
        "hone_s": whole,
        "hone_with_prefill_tokens_per_s": rows * new / whole,
        "step_ms": step * 1000,
        "prefill_ms": first * 1000,
        "bytes_per_step": moved,
    }


def peer(shape: Shape, device: torch.device, small: bool) -> dict[str, float]:
    """The same work under `transformers.generate`, which gives no log-probs unless asked for scores."""
    rows, length, new = (8, 20, 40) if small else (256, 128, 128)
    lm = build(shape, device, "sdpa")
    ids = torch.tensor(prompts(rows, length, shape.vocabulary), device=device)
    mask = torch.ones_like(ids)

    def run(tokens: int) -> None:
        lm.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True,
            top_k=0, pad_token_id=0,
        )  # fmt: skip

    print(f"  transformers.generate {rows} x {new}", flush=True)
    whole = median_s(lambda: run(new), device)
    first = median_s(lambda: run(1), device)
    step = (whole - first) / (new - 1)
    return {
        "transformers_tokens_per_s": rows / step,
        "transformers_with_prefill_tokens_per_s": rows * new / whole,
        "transformers_step_ms": step * 1000,
    }


def groups(
    lm: Any, shape: Shape, device: torch.device, small: bool, *, exact: bool = False
) -> dict[str, float]:
    """64 prompts × 8 samples, prompt 131, 256 new tokens, prefill included."""
    count, samples, length, new = (3, 4, 21, 40) if small else (64, 8, 131, 256)
    asked = [row for row in prompts(count, length, shape.vocabulary) for _ in range(samples)]
    engine = engine_for(lm, rows=len(asked), longest=length + new, exact=exact)

    def run() -> None:
        forget(engine)
        generate(engine, asked, [new] * len(asked))

    print(f"  generate {count} x {samples} x {new}", flush=True)
    seconds = median_s(run, device)
    held = engine._core.cache.nbytes / 2**30
    asyncio.run(engine.close())
    return {"hone_s": seconds, "hone_tokens_per_s": len(asked) * new / seconds, "cache_gib": held}


def longtail(lm: Any, shape: Shape, device: torch.device, small: bool) -> dict[str, float]:
    """Lengths drawn from 16 to 1,024 through 256 slots."""
    count, slots, longest = (24, 8, 60) if small else (1024, 256, 1024)
    chooser = random.Random(1)
    lengths = [chooser.randint(16, longest) for _ in range(count)]
    asked = prompts(count, 20 if small else 128, shape.vocabulary)
    engine = engine_for(lm, rows=slots, longest=len(asked[0]) + longest)

    def run() -> None:
        forget(engine)
        generate(engine, asked, lengths)

    print(f"  long tail {count} requests, {sum(lengths)} tokens", flush=True)
    seconds = median_s(run, device, runs=RUNS)
    asyncio.run(engine.close())
    return {"hone_tokens_per_s": sum(lengths) / seconds, "hone_s": seconds}


def sync(lm: Any, device: torch.device) -> dict[str, float]:
    """Publishing new weights to the engine: it decodes with the same parameters.

    `bytes` are those of decoding weights outside the module's memory, and what publishing allocated.
    """
    engine = engine_for(lm, rows=8, longest=64)
    before = [p.data_ptr() for p in lm.parameters()]
    used = _allocated(device)
    seconds = median_s(lambda: announce(engine, 1), device)
    moved = sum(a != p.data_ptr() for a, p in zip(before, lm.parameters(), strict=True))
    taken = max(0, _allocated(device) - used) + _outside(engine, lm)
    asyncio.run(engine.close())
    return {"hone_s": seconds, "bytes": float(taken), "parameters_moved": float(moved)}


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def _outside(engine: NativeRollout, lm: Any) -> int:
    """Bytes of the weights that decoding reads and that are not the module's own memory."""
    own = {p.untyped_storage().data_ptr() for p in lm.parameters()}
    forward: Any = engine._core._forward
    read = [forward._embedding, forward._norm[0]]
    for layer in forward._layers:
        read += [part[0] for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    return sum(t.nbytes for t in read if t.untyped_storage().data_ptr() not in own)
