"""Scores a second on one core, and the prime manager's processes beside a plain loop.

`gsm8k_strict_per_s` must stay above 100,000: scoring is never what a step waits for.
`hostile_symbolic_512_s` must stay below 60: so long may a batch of 512 answers that are made to be
slow hold up a step.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hone.rewards.scores import countdown, default_compute_score, gsm8k, qa_em
from hone.rewards.scores.math_reward import compute_score as math_score

RESPONSES = 20_000
GSM8K_LIMIT_PER_S = 100_000
SCORER = """
import time

def compute_score(solution_str):
    time.sleep(0.01)
    return 1.0
"""


def best_rate(
    function: Callable[[], Any],
    count: int,
    rounds: int = 5,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Calls a second, best of `rounds`; by CPU time unless told, so that others do not count."""
    best = 0.0
    for _ in range(rounds):
        started = clock()
        function()
        best = max(best, count / (clock() - started))
    return best


def gsm8k_rows() -> list[tuple[str, str]]:
    """Responses of usual length (about 800 characters), half of them right."""
    pick = random.Random(0)
    words = ["so", "each", "apple", "costs", "12", "dollars", "and", "7", "*", "3", "=", "21", "."]
    rows = []
    for _ in range(RESPONSES):
        text = " ".join(pick.choices(words, k=200))
        truth = pick.randint(1, 9999)
        given = truth if pick.random() < 0.5 else truth + 1
        rows.append((f"{text}\n#### {given:,}", str(truth)))
    return rows


def score_rates() -> dict[str, float]:
    """Scores a second of the rules that need no process."""
    rows = gsm8k_rows()
    right = sum(gsm8k.compute_score(text, truth) for text, truth in rows)
    assert 0.4 < right / RESPONSES < 0.6
    truth = {"target": 24, "numbers": [2, 3, 4]}
    thought = "let me think " * 60
    answer = f"{thought}<answer> (2 * 3) * 4 </answer>"
    return {
        "gsm8k_strict_per_s": best_rate(
            lambda: [gsm8k.compute_score(t, g) for t, g in rows], RESPONSES
        ),
        "gsm8k_by_source_per_s": best_rate(
            lambda: [default_compute_score("openai/gsm8k", t, g) for t, g in rows], RESPONSES
        ),
        "countdown_per_s": best_rate(
            lambda: [countdown.compute_score(answer, truth) for _ in range(5000)], 5000
        ),
        "math_text_per_s": best_rate(
            lambda: [math_score(r"so \boxed{\dfrac12}", "0.5") for _ in range(5000)], 5000
        ),
        "qa_em_per_s": best_rate(
            lambda: [
                qa_em.compute_score(f"{thought}<answer>Paris</answer>", {"target": ["Paris"]})
                for _ in range(5000)
            ],
            5000,
        ),
    }


def prime_speedup(processes: int = 8, rows: int = 400) -> float:
    """How many times faster `processes` processes score a scorer that waits 10 ms than a loop."""
    from hone.plugins import load_extern_object
    from hone.rewards.pool import DeadlinePool
    from hone.rewards.scorer import ScorerInput
    from hone.rewards.transport import row_scorer_keywords

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "waiting_scorer.py"
        path.write_text(SCORER)
        scorer = load_extern_object(str(path), "compute_score")
        pool = DeadlinePool(
            "hone.rewards.transport:make_row_scorer", row_scorer_keywords(scorer, {}), processes
        )
        jobs = [{"row": ScorerInput("x", "text", None, {}), "comparisons": {}} for _ in range(rows)]
        pool.run(jobs[: 10 * processes], 60.0)
        wall = time.perf_counter
        fast = best_rate(lambda: pool.run(jobs, 60.0), rows, rounds=3, clock=wall)
        slow = best_rate(lambda: [scorer("text") for _ in jobs[:50]], 50, rounds=3, clock=wall)
        pool.close()
    return fast / slow


HOSTILE: tuple[Callable[[int], str], ...] = (
    lambda i: f"9^{{9^{{9^{{{i}}}}}}}",
    lambda i: f"{100_000 + i}!",
    lambda i: rf"\sum_{{k=1}}^{{{10**7 + i}}} \frac{{1}}{{k^2}}",
    lambda i: f"(x+{i})^{{999}}(x+2)^{{999}}",
    lambda i: f"(1+x+y+z+w)^{{55}}+{i}",
    lambda i: rf"\int_0^1 \sin(x^{{{i}}}) e^{{x^3}} \cos(x^5) dx",
    lambda i: "+".join(rf"\sin(x^{{{j}}}+{i})\cos(y^{{{j}}})" for j in range(2, 14)),
    lambda i: rf"\tan(\tan(\tan({i}^{{60}})))",
)
"""Kinds of hostile expressions: three are refused for their size, the others use up their time."""


def hostile_seconds(count: int = 512) -> float:
    """Wall seconds for `count` hostile answers, all different, in one batch."""
    from hone.rewards.managers.rule import NaiveRewardManager
    from hone.rewards.scorer import ScorerInput

    texts = [HOSTILE[i % len(HOSTILE)](i + 2) for i in range(count)]
    rows = [ScorerInput("lighteval/MATH", rf"\boxed{{{t}}}", r"\sqrt{2}+x", {}) for t in texts]
    manager = NaiveRewardManager(None, 0)
    manager.precompute_comparisons(rows[:8])  # the processes start
    started = time.perf_counter()
    manager.precompute_comparisons(rows)
    return time.perf_counter() - started


def main() -> dict[str, Any]:
    """Print the rates, and the promised one beside its limit; return the numbers."""
    result: dict[str, Any] = {name: round(value) for name, value in score_rates().items()}
    ratio = result["gsm8k_strict_per_s"] / GSM8K_LIMIT_PER_S
    result["gsm8k_strict_over_limit"] = round(ratio, 2)
    result["prime_8_processes_speedup"] = round(prime_speedup(), 2)
    result["hostile_symbolic_512_s"] = round(hostile_seconds(), 1)
    for name, value in result.items():
        print(f"{name:28} {value:>10,}")
    print(
        f"gsm8k strict: {ratio:.1f}× the {GSM8K_LIMIT_PER_S:,} scores a second wanted on one core"
    )
    return result


if __name__ == "__main__":
    main()
