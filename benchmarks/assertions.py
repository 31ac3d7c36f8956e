"""Assertion tests in one box (program and tests in one process) and in two (the judge apart).

`python -m benchmarks.assertions` prints seconds per program, in alternating pairs; with `--references`
it runs every reference solution of the shared sets both ways, prints how many hold, and keeps the counts
in `benchmarks/results/reference_solutions.json`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import secrets
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sandbox import CHECKS
from hone.data.preprocess.programs import humaneval_tests
from hone.rewards.ground_truth import GroundTruthError
from hone.rewards.programs import CODE_PLACEHOLDER, Limits, SourceTest, passes
from hone.sandbox import run_python

WANTED_RATIO = 1.5
ROUNDS, PROGRAMS_PER_ROUND = 9, 40
LIMITS = Limits(timeout_s=60.0, memory_mb=1024)
RESULTS = Path(__file__).parent / "results" / "reference_solutions.json"
DATA = Path(os.environ.get("HONE_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))


@dataclass(frozen=True)
class Reference:
    """A program and the assertions it is known to satisfy."""

    data_set: str
    task: str
    program: str
    tests: str


def one_box(program: str, tests: str) -> bool:
    """The simplest way, which a program can fool: assertions behind the program, then a secret."""
    secret = secrets.token_hex(16)
    whole = (
        tests.replace(CODE_PLACEHOLDER, program)
        if CODE_PLACEHOLDER in tests
        else f"{program}\n\n{tests}"
    )
    code = f"{whole}\n\nprint('{secret}', flush=True)\n"
    result = run_python(code, timeout_s=LIMITS.timeout_s, memory_mb=LIMITS.memory_mb)
    return result.ok and result.stdout.rstrip().endswith(secret)


def two_boxes(program: str, tests: str) -> bool:
    try:
        return passes(program, SourceTest(tests), LIMITS)
    except GroundTruthError:  # tests that need a package which is not in the box
        return False


# ---- reference solutions ----


def _records(name: str) -> Iterator[dict[str, Any]]:
    path = DATA / name
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as lines:
        for line in lines:
            yield json.loads(line)


def references() -> Iterator[Reference]:
    """Every reference solution of HumanEval, MBPP and LeetCode with its tests."""
    for row in _records("humaneval/test.jsonl"):
        tests = humaneval_tests(row)
        program = row["prompt"] + row["canonical_solution"]
        yield Reference("humaneval", row["task_id"], program, tests)
    for name in ("mbpp", "sanitized_mbpp"):
        for row in _records(f"mbpp/{name}.jsonl"):
            setup = [*row.get("test_imports", ()), row.get("test_setup_code") or ""]
            tests = "\n".join([*setup, *row["test_list"]])
            yield Reference(name, str(row["task_id"]), row["code"], tests)
    for name in ("train_v0.2.0", "test_v0.3.1"):
        for row in _records(f"leetcode/{name}.jsonl.gz"):
            tests = (
                f"{row['prompt']}\n{CODE_PLACEHOLDER}\n{row['test']}\ncheck({row['entry_point']})\n"
            )
            yield Reference(f"leetcode_{name}", row["task_id"], row["completion"], tests)


def count_references(names: list[str]) -> dict[str, Any]:
    """Per set: solutions, those that hold in one box and in two, and the tasks that differ."""
    rows = [row for row in references() if not names or row.data_set in names]

    def hold(judge: Callable[[str, str], bool]) -> list[bool]:
        with ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
            return list(pool.map(lambda row: judge(row.program, row.tests), rows))

    verdicts = zip(hold(one_box), hold(two_boxes), strict=True)
    counts: dict[str, Counter[str]] = {}
    lost: list[str] = []
    for row, (before, after) in zip(rows, verdicts, strict=True):
        count = counts.setdefault(row.data_set, Counter())
        count.update(solutions=1, one_box=before, two_boxes=after, lost=before and not after)
        if before and not after:
            lost.append(f"{row.data_set}/{row.task}")
    total = sum(counts.values(), Counter())
    return {
        "sets": {name: dict(count) for name, count in counts.items()},
        "total": dict(total),
        "lost_share": len(lost) / max(1, total["one_box"]),
        "lost": lost,
    }


# ---- time ----


def _split(check: str) -> tuple[str, str]:
    """The program and the assertions of one of the sandbox benchmark's checks."""
    program, _, tests = check.partition("\n\nassert")
    return program, f"assert{tests}"


PAIRS = tuple(map(_split, CHECKS))


def seconds(judge: Callable[[str, str], bool], concurrent: int) -> tuple[float, float]:
    """Wall and processor seconds per program."""

    def one(number: int) -> None:
        program, tests = PAIRS[number % len(PAIRS)]
        assert judge(program, tests)

    with ThreadPoolExecutor(concurrent) as pool:
        started, cpu_started = time.perf_counter(), processor_s()
        list(pool.map(one, range(PROGRAMS_PER_ROUND)))
        wall, cpu = time.perf_counter() - started, processor_s() - cpu_started
        return wall / PROGRAMS_PER_ROUND, cpu / PROGRAMS_PER_ROUND


def processor_s() -> float:
    """Processor seconds of this process, the warden, and all its boxes, living and reaped."""
    total, queue = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]), [os.getpid()]
    while queue:
        pid = queue.pop()
        try:
            if pid != os.getpid():
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            for task in os.listdir(f"/proc/{pid}/task"):
                queue += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        except OSError:  # it has just ended: its parent counts it
            continue
    return total


def compare(concurrent: int) -> dict[str, float]:
    """Milliseconds per program either way, and the medians over rounds of their ratios."""
    rounds = []
    for i in range(ROUNDS + 1):
        before = seconds(one_box, concurrent)
        after = seconds(two_boxes, concurrent)
        if i:  # the first round starts the warden and the judge
            rounds.append((*before, *after))

    def median(of: Callable[[float, float, float, float], float]) -> float:
        return round(statistics.median(of(*numbers) for numbers in rounds), 3)

    return {
        "one_box_ms": median(lambda wall, _, __, ___: 1000 * wall),
        "two_boxes_ms": median(lambda _, __, wall, ___: 1000 * wall),
        "ratio": median(lambda before, _, after, __: after / before),
        "processor_ratio": median(lambda _, before, __, after: after / before),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Print times, or with --references counts; return the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--references", action="store_true", help="run the reference solutions")
    parser.add_argument("--sets", nargs="*", default=[], help="only these sets")
    options = parser.parse_args([] if arguments is None else arguments)
    if options.references:
        result = count_references(options.sets)
        for name, count in {**result["sets"], "total": result["total"]}.items():
            print(f"{name:24} {count}")
        print(f"lost {100 * result['lost_share']:.2f} %: {', '.join(result['lost']) or 'none'}")
        if not options.sets:
            RESULTS.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
        return result
    many = 2 * (os.cpu_count() or 1)
    result = {"one_at_a_time": compare(1), "all_cores_busy": compare(many)}
    for name, row in result.items():
        print(
            f"{name.replace('_', ' '):15} one box {row['one_box_ms']:.1f} ms, two boxes"
            f" {row['two_boxes_ms']:.1f} ms, ratio {row['ratio']:.2f} (wanted ≤ {WANTED_RATIO}),"
            f" of processor time {row['processor_ratio']:.2f}"
        )
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
