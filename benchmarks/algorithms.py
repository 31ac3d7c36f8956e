"""Advantage estimators against a plain loop over rows, and sequence balancing against the ideal.

Both sides of a ratio run in the same process on one thread, best of several runs, in processor time:
a busy machine does not change the ratio.
"""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.algorithms.advantages import get_adv_estimator_fn
from hone.ops.balancing import get_seqlen_balanced_partitions

ROWS, WIDTH, GROUP = 4096, 1024, 8
OUTCOME = (
    "grpo",
    "dr_grpo",
    "grpo_passk",
    "rloo",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
    "maxrl",
    "lite_ppo",
    "gdpo",
)
OVER_TIME = (
    "gae",
    "reinforce_plus_plus",
    "remax",
    "rloo_token",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)


def batch() -> dict[str, Any]:
    """4,096 responses of random length to 512 prompts, scored 0 or 1 at the last token."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=random)
    mask = torch.arange(WIDTH) < lengths[:, None]
    scores = torch.randint(0, 2, (ROWS,), generator=random).float()
    rewards = torch.zeros(ROWS, WIDTH)
    rewards[torch.arange(ROWS), lengths - 1] = scores
    logp = -torch.rand(ROWS, WIDTH, generator=random)
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": np.array([f"prompt-{i // GROUP}" for i in range(ROWS)], dtype=object),
        "config": {
            "gamma": 1.0,
            "lam": 1.0,
            "norm_adv_by_std_in_grpo": True,
            "gdpo_reward_keys": ["rule"],
            "gdpo_reward_weights": None,
        },
        "values": torch.rand(ROWS, WIDTH, generator=random),
        "reward_baselines": torch.rand(ROWS, generator=random),
        "old_log_probs": logp,
        "sum_pi_squared": torch.exp(2 * logp),
        "reward/rule": rewards,
    }


def row_loop(name: str, b: dict[str, Any]) -> Tensor:
    """The obvious implementation: one row at a time, groups in a dict."""
    rewards, mask, index = b["token_level_rewards"], b["response_mask"].float(), b["index"]
    scores = [(rewards[i] * mask[i]).sum() for i in range(len(rewards))]
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, label in enumerate(index):
        groups[label].append(i)
    stacked = {label: torch.stack([scores[i] for i in rows]) for label, rows in groups.items()}
    everything = torch.stack(scores)
    lengths = {g: torch.stack([mask[i].sum() for i in rows]) for g, rows in groups.items()}
    out = torch.zeros_like(rewards)
    for i, label in enumerate(index):
        group = stacked[label]
        out[i] = _row_advantage(name, scores[i], group, everything, lengths[label]) * mask[i]
    if name in ("reinforce_plus_plus_baseline", "gdpo"):
        kept = out[mask.bool()]
        out = (out - kept.mean()) / (kept.var() + 1e-8).sqrt() * mask
    return out


def _row_advantage(
    name: str, score: Tensor, group: Tensor, everything: Tensor, lengths: Tensor
) -> Tensor:
    centred = score - group.mean()
    if name in ("grpo", "gdpo"):
        return centred / (group.std() + 1e-6)
    if name in ("dr_grpo", "reinforce_plus_plus_baseline"):
        return centred
    if name == "grpo_passk":
        top = group.topk(2).values
        first = score == top[0]  # ties get a margin of 0, so which of them is best does not matter
        return torch.where(first, (top[0] - top[1]) / (group.std() + 1e-6), 0.0)
    if name == "rloo":
        return centred * len(group) / (len(group) - 1)
    if name == "opo":
        return score - (lengths * group).sum() / lengths.sum()
    if name == "gpg":
        return centred * len(everything) / everything.count_nonzero()
    if name == "maxrl":
        return centred / (group.mean() + 1e-6)
    return centred / (everything.std() + 1e-6)


def best_of(runs: int, work: Callable[[], Any]) -> float:
    """Processor seconds of the fastest run."""
    times = []
    for _ in range(runs):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def estimators() -> dict[str, dict[str, float]]:
    """Milliseconds of each estimator; for outcome estimators also the loop's and the ratio."""
    b = batch()
    out: dict[str, dict[str, float]] = {}
    for name in OUTCOME + OVER_TIME:
        fn = get_adv_estimator_fn(name)
        ours = best_of(30, partial(fn, **b))
        out[name] = {"ms": ours * 1e3}
        if name in OUTCOME:
            error = (fn(**b)[0] - row_loop(name, b)).abs().max().item()
            if error > 1e-3:
                raise RuntimeError(f"{name} and the row loop differ by {error}")
            loop = best_of(3, partial(row_loop, name, b))
            out[name] |= {"loop_ms": loop * 1e3, "ratio": loop / ours}
    return out


def balancing() -> dict[str, float]:
    """Largest load over the ideal one for 512 random lengths on 8 ranks, and the time it takes."""
    excess, seconds = [], []
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 8192, 512)
        for equal_size in (False, True):
            work = partial(get_seqlen_balanced_partitions, lengths, 8, equal_size)
            seconds.append(best_of(3, work))
            parts = work()
            ideal = lengths.sum() / 8
            excess.append(max(lengths[part].sum() for part in parts) / ideal - 1)
    return {"worst_excess_percent": 100 * max(excess), "slowest_ms": 1e3 * max(seconds)}


def keep_freed_memory() -> None:
    """Ask glibc not to hand large blocks back, so that neither side times the kernel's page faults."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim_threshold, mmap_threshold, gigabytes = -1, -3, 2**31 - 1
        libc.mallopt(mmap_threshold, gigabytes)
        libc.mallopt(trim_threshold, gigabytes)


def main() -> dict[str, Any]:
    """Print both tables and return the numbers."""
    keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results = estimators()
    print(f"Advantages of {ROWS} × {WIDTH} tokens, one thread, processor time")
    print(f"{'estimator':32} {'ours ms':>9} {'row loop ms':>12} {'ratio':>8}")
    for name, row in results.items():
        loop = f"{row['loop_ms']:12.1f} {row['ratio']:7.1f}×" if "ratio" in row else ""
        print(f"{name:32} {row['ms']:9.2f} {loop}")
    balance = balancing()
    torch.set_num_threads(threads)
    print(
        f"Balancing 512 lengths over 8 ranks: at most {balance['worst_excess_percent']:.3f} % over "
        f"the ideal load (allowed 2 %), at most {balance['slowest_ms']:.1f} ms (allowed 50 ms)"
    )
    worst = min(row["ratio"] for row in results.values() if "ratio" in row)
    print(f"Slowest outcome estimator: {worst:.1f}× the row loop (wanted 20×)")
    return {"estimators": results, "balancing": balance, "worst_ratio": worst}


if __name__ == "__main__":
    main()
