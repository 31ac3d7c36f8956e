"""How fast the native engine decodes on a CPU, beside `transformers.generate` in the same run.

Each ratio is the median of interleaved pairs: the machine may drift, both sides drift with it. The
peer's fixed-length runs decode the same prompts greedily; its stream of requests is cut into batches
of as many rows as our slots, each as long as its longest request (it has no continuous batching). Ours
starts the longest allowed requests first, as the engine always does; lengths are allowed lengths here.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from hone.agents.loop_thread import run_with_engine
from hone.models.policy import PolicyModel
from hone.models.tiny import tiny_lm
from hone.rollout.contract import Sampling
from hone.rollout.native.core import NativeCore
from hone.rollout.native.engine import NativeRollout

THREADS = 2
PAIRS = 5
PROMPT, NEW_TOKENS = 16, 128
REQUESTS, SLOTS, SHORTEST, LONGEST = 512, 64, 8, 128
VOCABULARY = 704
TARGETS = {"stream_over_hf": 2.5, "batch_1_over_hf": 1.8, "batch_64_over_hf": 1.2}


def build_models() -> tuple[Any, Any]:
    """The same 8M-parameter decoder twice: ours, and with the attention transformers would choose."""
    shape: dict[str, Any] = {
        "hidden": 256, "layers": 8, "heads": 8, "kv_heads": 4, "mlp": 1024, "eos_token_id": None,
    }  # fmt: skip
    ours, theirs = tiny_lm(VOCABULARY, **shape), tiny_lm(VOCABULARY, **shape)
    theirs.load_state_dict(ours.state_dict())
    theirs.set_attn_implementation("sdpa")
    return ours.eval(), theirs.eval()


def prompts(count: int) -> list[list[int]]:
    chooser = random.Random(0)
    return [[chooser.randrange(3, VOCABULARY) for _ in range(PROMPT)] for _ in range(count)]


def native(engine: NativeRollout, rows: list[list[int]], lengths: list[int]) -> int:
    """Generate every row through the engine; returns the tokens made."""

    async def play() -> int:
        jobs = [
            engine.generate(row, Sampling(n, 0.0, 0, ignore_eos=True), str(i))
            for i, (row, n) in enumerate(zip(rows, lengths, strict=True))
        ]
        return sum(len(out.token_ids) for out in await asyncio.gather(*jobs))

    return run_with_engine(engine, play())


def peer(lm: Any, rows: list[list[int]], lengths: list[int]) -> int:
    """`transformers.generate`, batch after batch; returns the tokens asked for."""
    for start in range(0, len(rows), SLOTS):
        ids = torch.tensor(rows[start : start + SLOTS])
        longest = max(lengths[start : start + SLOTS])
        lm.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
        )
    return sum(lengths)


def compare(ours: Callable[[], int], theirs: Callable[[], int]) -> tuple[float, float, float]:
    """Median ratio of rates over interleaved pairs, and each side's median tokens a second."""
    ours(), theirs()
    pairs = [(rate(ours), rate(theirs)) for _ in range(PAIRS)]
    ratio = statistics.median(a / b for a, b in pairs)
    return ratio, statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def rate(generate: Callable[[], int]) -> float:
    start = time.perf_counter()
    tokens = generate()
    return tokens / (time.perf_counter() - start)


def main() -> dict[str, Any]:
    """Ratios over the peer, their targets, and the tokens a second behind them."""
    torch.set_num_threads(THREADS)
    ours, theirs = build_models()
    core = NativeCore(
        PolicyModel(ours), eos_ids=(), max_num_seqs=SLOTS, max_num_batched_tokens=8192
    )
    engine = NativeRollout(core)
    chooser = random.Random(1)
    stream = [chooser.randint(SHORTEST, LONGEST) for _ in range(REQUESTS)]
    cases = {
        "stream_over_hf": (prompts(REQUESTS), stream),
        "batch_1_over_hf": (prompts(1), [NEW_TOKENS]),
        "batch_64_over_hf": (prompts(SLOTS), [NEW_TOKENS] * SLOTS),
    }
    result: dict[str, Any] = {}
    for name, (rows, lengths) in cases.items():
        ratio, mine, others = compare(
            lambda r=rows, n=lengths: native(engine, r, n),  # type: ignore[misc]
            lambda r=rows, n=lengths: peer(theirs, r, n),  # type: ignore[misc]
        )
        result[name] = round(ratio, 2)
        result[f"{name}_target"] = TARGETS[name]
        result[f"{name}_tokens_per_s"] = [round(mine), round(others)]
        print(
            f"{name}: {ratio:.2f}x (target {TARGETS[name]}x), {mine:.0f} and {others:.0f} tokens/s"
        )
    asyncio.run(engine.close())
    return result


if __name__ == "__main__":
    main()
