"""Peak memory of log-probs and entropies, forward and backward, beside the naive way.

Each measurement runs in a process of its own: growth of the resident set's high-water mark over the pass.
The naive way (whole logits, log_softmax, autograd) does not fit at full size: it is measured at sizes that
do, and scaled by the slope between the two largest, since its memory is linear in the tokens.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOKENS, VOCABULARY, HIDDEN = 32_768, 150_000, 64
NAIVE_TOKENS = (512, 1024, 2048)
GIB = 2**30


def measure(way: str, tokens: int) -> dict[str, float]:
    """Bytes and seconds of one pass; called in a fresh process."""
    import torch

    from hone.ops.logprobs import linear_log_probs

    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=random, requires_grad=True)
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=random) / 8).requires_grad_()
    target = torch.randint(VOCABULARY, (tokens,), generator=random)
    before, started = _resident_bytes(), time.perf_counter()
    if way == "ours":
        log_probs, entropy = linear_log_probs(
            hidden, weight, target, temperature=1.0, with_entropy=True
        )
    else:
        log_p = torch.log_softmax(hidden @ weight.t(), -1)
        log_probs = log_p.gather(-1, target[:, None]).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
    (log_probs.mean() + entropy.mean()).backward()
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"bytes": peak - before, "seconds": seconds, "log_prob": float(log_probs.mean())}


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _in_own_process(way: str, tokens: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.logprobs", way, str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> dict[str, Any]:
    """Print the table and return the numbers."""
    naive = {n: _in_own_process("naive", n) for n in NAIVE_TOKENS}
    small = {n: _in_own_process("ours", n) for n in NAIVE_TOKENS}
    full = _in_own_process("ours", TOKENS)
    for n in NAIVE_TOKENS:
        if abs(naive[n]["log_prob"] - small[n]["log_prob"]) > 1e-3:
            raise RuntimeError(f"the two ways differ at {n} tokens: {naive[n]} and {small[n]}")
    low, high = NAIVE_TOKENS[-2:]
    slope = (naive[high]["bytes"] - naive[low]["bytes"]) / (high - low)
    scaled = naive[high]["bytes"] + slope * (TOKENS - high)
    print(f"Log-probs and entropy, forward and backward, vocabulary {VOCABULARY}, width {HIDDEN}")
    print(f"{'tokens':>7} {'ours GiB':>9} {'naive GiB':>10} {'memory':>8} {'time':>7}")
    for n in NAIVE_TOKENS:
        ours, theirs = small[n], naive[n]
        print(
            f"{n:7d} {ours['bytes'] / GIB:9.2f} {theirs['bytes'] / GIB:10.2f} "
            f"{theirs['bytes'] / ours['bytes']:7.1f}× {theirs['seconds'] / ours['seconds']:6.1f}×"
        )
    ratio = scaled / full["bytes"]
    print(
        f"{TOKENS:7d} {full['bytes'] / GIB:9.2f} {scaled / GIB:10.1f} {ratio:7.1f}×   "
        f"(naive scaled from {low} and {high} tokens; ours measured, {full['seconds']:.0f} s)"
    )
    return {
        "tokens": TOKENS,
        "vocabulary": VOCABULARY,
        "ours_gib": full["bytes"] / GIB,
        "ours_seconds": full["seconds"],
        "naive_gib_scaled": scaled / GIB,
        "memory_ratio": ratio,
        "naive_gib": {n: naive[n]["bytes"] / GIB for n in NAIVE_TOKENS},
        "ours_small_gib": {n: small[n]["bytes"] / GIB for n in NAIVE_TOKENS},
        "time_ratio_at_largest_naive": naive[high]["seconds"] / small[high]["seconds"],
    }


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
