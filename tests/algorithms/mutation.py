"""Mutation testing: changes one sign, constant or comparison at a time and runs the matching tests.

    python tests/algorithms/mutation.py [--jobs N] [--only TEXT] [--report FILE] [--known FILE] [--list]

It works on a temporary copy. Each mutant runs in a forked process; a mutant that no test detects is a
survivor. Equivalent mutants, which no test can detect, are listed in `EQUIVALENT`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECONDS_A_MUTANT = 300
NO_TESTS = 5  # pytest's exit status

ADVANTAGES = ["tests/algorithms/advantages"]
LOSSES = ["tests/algorithms/policy_losses"]
CORRECTION = [
    f"tests/algorithms/test_{name}.py" for name in ("correction", "correction_metrics", "rejection")
] + ["tests/verl/test_rollout_correction.py"]
TESTS: dict[str, list[str]] = {
    "hone/ops/rows.py": ["tests/ops/test_rows.py"],
    "hone/algorithms/value_loss.py": ["tests/algorithms/test_value_loss.py"],
    "hone/algorithms/kl.py": ["tests/algorithms/test_kl.py"],
    "hone/algorithms/row_selection.py": ["tests/algorithms/test_row_selection.py"],
    "hone/algorithms/credit.py": [
        "tests/algorithms/test_credit.py",
        "tests/algorithms/test_implicit_reward.py",
        "tests/algorithms/advantages/test_rloo.py",
    ],
    "hone/algorithms/correction.py": [*CORRECTION, *LOSSES],
}
for folder, tests in (("advantages", ADVANTAGES), ("policy_losses", LOSSES)):
    for path in sorted((ROOT / "hone/algorithms" / folder).glob("*.py")):
        if path.name != "__init__.py":
            TESTS[path.relative_to(ROOT).as_posix()] = tests

# The tests of a folder that belong to a file, by the algorithm names in the tests' ids.
KEYWORDS = {
    "advantages/group_baseline.py": "opo or gpg or passk or maxrl or lite_ppo or gdpo",
    "advantages/optimal_token_baseline.py": "optimal",
    "advantages/rloo.py": "rloo",
    "policy_losses/bypass.py": "bypass",
    "policy_losses/covariance.py": "cov",
    "policy_losses/ratio.py": (
        "cispo or dppo or dro or reinforce or gpg or sapo or gspo or luspo or geo_mean"
    ),
}

SWAPS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
OTHER_NAMES = {
    "maximum": "minimum",
    "minimum": "maximum",
    "max": "min",
    "min": "max",
    "amax": "amin",
    "cummin": "cummax",
}

EQUIVALENT: dict[str, str] = {
    "hone/ops/rows.py::mean: self.max(x)  →  self.min(x)": "any member may be the anchor",
    "hone/algorithms/kl.py::module: 20.0  →  20.5": (
        "only keeps exp finite: the value is bounded at 10 long before"
    ),
    "hone/algorithms/credit.py::outcome_losses: (logit - contrast_logits) * "
    "torch.where(outcome > 0, 1.0, -1.0)  →  (logit - contrast_logits) / "
    "torch.where(outcome > 0, 1.0, -1.0)": "the factor is 1 or −1",
    "hone/algorithms/advantages/optimal_token_baseline.py::__call__: "
    "int(position.max()) + 1  →  int(position.max()) + 2": "any sufficient number of positions",
    "hone/algorithms/advantages/optimal_token_baseline.py::__call__: "
    "int(cell.max()) + 1  →  int(cell.max()) + 2": "any sufficient number of cells",
}


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    function: str
    change: str  # "old  →  new"
    node: ast.expr
    number: int  # index among the changes of that node
    occurrence: int  # the same change may occur several times in a function

    @property
    def key(self) -> str:
        again = f"  #{self.occurrence}" if self.occurrence > 1 else ""
        return f"{self.path}::{self.function}: {self.change}{again}"


def mutants_of(path: str) -> Iterator[Mutant]:
    """Yields every single change of one file."""
    seen: Counter[tuple[str, str]] = Counter()
    for function, node in _nodes(ast.parse((ROOT / path).read_text())):
        for number, apply in enumerate(_changes(node)):
            changed = copy.deepcopy(node)
            apply(changed)
            change = f"{ast.unparse(node)}  →  {ast.unparse(changed)}"
            seen[function, change] += 1
            occurrence = seen[function, change]
            yield Mutant(path, node.lineno, function, change, node, number, occurrence)


def mutated_source(mutant: Mutant, original: str) -> str:
    tree = ast.parse(original)
    node = _same_node(tree, mutant.node)
    list(_changes(node))[mutant.number](node)
    return ast.unparse(tree)


def _nodes(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yields expressions of function bodies and module constants, without annotations and messages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for statement in node.body:
                if not isinstance(statement, ast.FunctionDef):
                    for expression in _computing(statement):
                        yield node.name, expression
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            yield "module", node.value


def _computing(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.FunctionDef):
        return
    if isinstance(
        node, ast.BinOp | ast.UnaryOp | ast.Compare | ast.BoolOp | ast.Constant | ast.Call
    ):
        yield node
    for name, child in ast.iter_fields(node):
        if name in ("annotation", "slice"):
            continue
        for item in child if isinstance(child, list) else [child]:
            if isinstance(item, ast.AST):
                yield from _computing(item)


def _same_node(tree: ast.Module, like: ast.expr) -> ast.expr:
    position = (like.lineno, like.col_offset, like.end_lineno, like.end_col_offset)
    for node in ast.walk(tree):
        if type(node) is type(like) and isinstance(node, ast.expr):
            here = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
            if here == position:
                return node
    raise LookupError(ast.unparse(like))


def _increment(side: str, node: ast.BinOp) -> None:
    getattr(node, side).value += 1


def _changes(node: ast.expr) -> Iterator[Callable[[Any], None]]:
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield lambda n: setattr(n, "op", SWAPS[type(n.op)]())
    if isinstance(node, ast.BinOp):
        for side in ("left", "right"):
            operand = getattr(node, side)
            if isinstance(operand, ast.Constant) and type(operand.value) is int:
                yield partial(_increment, side)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield lambda n: n.ops.__setitem__(0, SWAPS[type(n.ops[0])]())
    if isinstance(node, ast.BoolOp):
        yield lambda n: setattr(n, "op", SWAPS[type(n.op)]())
    if (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and not isinstance(node.operand, ast.Constant)
    ):
        yield lambda n: setattr(n, "op", ast.UAdd())
    if isinstance(node, ast.Constant) and type(node.value) is float:
        tiny = 0 < node.value < 1e-3
        yield lambda n: setattr(n, "value", n.value * 1000 if tiny else n.value + 0.5)
    if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in OTHER_NAMES:
        yield lambda n: setattr(n.func, "attr", OTHER_NAMES[n.func.attr])


def run_mutant(mutant: Mutant, workspace: Path) -> bool:
    """Returns whether a test detected the mutant."""
    target = workspace / mutant.path
    original = target.read_text()
    for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
        compiled.unlink()  # its time stamp has a resolution of seconds, so it could be used for the mutant
    target.write_text(mutated_source(mutant, original))
    try:
        status = run_tests(selection(mutant.path), workspace)
        if status == NO_TESTS:
            raise RuntimeError(f"no test was selected for {mutant.path}; see KEYWORDS")
        return status != 0
    finally:
        target.write_text(original)


def selection(path: str) -> tuple[str, ...]:
    """Returns pytest's arguments that select the tests of this file."""
    keywords = KEYWORDS.get(path.removeprefix("hone/algorithms/"))
    return (*TESTS[path], *(("-k", keywords) if keywords else ()))


def run_tests(tests: tuple[str, ...], workspace: Path, keep_compiled: bool = False) -> int:
    """Returns pytest's exit status in a forked process that imports the workspace's package."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            os.chdir(workspace)
            sys.dont_write_bytecode = not keep_compiled
            sys.path.insert(0, str(workspace))
            signal.alarm(SECONDS_A_MUTANT)
            import pytest

            arguments = ["-x", "-q", "-p", "no:cacheprovider", "-c", "pyproject.toml", *tests]
            status = int(pytest.main(arguments))
            if not sys.modules["hone"].__file__.startswith(str(workspace)):
                status = 0  # the tests imported another package and detected nothing
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def make_workspace() -> Path:
    workspace = Path(tempfile.mkdtemp(prefix="mutation-"))
    ignore = shutil.ignore_patterns("__pycache__", ".hypothesis")
    for name in ("hone", "tests/algorithms", "tests/ops"):
        shutil.copytree(ROOT / name, workspace / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", workspace)
    shutil.copy(ROOT / "tests/conftest.py", workspace / "tests")
    for test in (test for test in CORRECTION if not test.startswith("tests/algorithms")):
        (workspace / test).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / test, workspace / test)
    return workspace


def check(mutants: list[Mutant], jobs: int, detected: set[str]) -> list[Mutant]:
    """Returns the survivors; `detected` has keys of an earlier run. Each worker has a workspace."""
    results = dict.fromkeys(detected, True)
    todo = [m for m in mutants if m.key not in detected]
    try:
        with ThreadPoolExecutor(jobs) as pool:
            for done in [pool.submit(_worker, todo[i::jobs], results) for i in range(jobs)]:
                done.result()
    finally:
        detected |= {key for key, seen in results.items() if seen}
    return [m for m in mutants if not results[m.key]]


def _worker(mutants: list[Mutant], results: dict[str, bool]) -> None:
    workspace = make_workspace()
    try:
        tests = tuple(sorted({test for mutant in mutants for test in TESTS[mutant.path]}))
        if tests and run_tests(tests, workspace, keep_compiled=True) != 0:
            raise RuntimeError(f"{tests} fail without any change")
        for done, mutant in enumerate(mutants):
            if done % 20 == 0:
                print(f"{done} of {len(mutants)}", flush=True)
            results[mutant.key] = run_mutant(mutant, workspace)
            if not results[mutant.key]:
                print(f"survived  line {mutant.line}  {mutant.key}", flush=True)
    finally:
        shutil.rmtree(workspace)


def report(mutants: list[Mutant], survivors: list[Mutant], seconds: float) -> str:
    by_file: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_file[mutant.path].append(mutant)
    alive = {m.key for m in survivors}
    equivalent = [m for m in survivors if m.key in EQUIVALENT]
    undetected = [m for m in survivors if m.key not in EQUIVALENT]
    lines = [
        "# Mutation check of the algorithms",
        "",
        f"`python tests/algorithms/mutation.py`: {len(mutants)} single changes of a sign, an operator, "
        f"a constant, a comparison or a min/max; {len(mutants) - len(survivors)} detected by the "
        f"matching tests, {len(equivalent)} equivalent, {len(undetected)} not detected. "
        f"{seconds / 60:.0f} minutes.",
        "",
        "| file | mutants | detected | equivalent | not detected |",
        "|---|---:|---:|---:|---:|",
    ]
    for path, group in by_file.items():
        survived = [m for m in group if m.key in alive]
        same = sum(m.key in EQUIVALENT for m in survived)
        detected = len(group) - len(survived)
        lines.append(f"| {path} | {len(group)} | {detected} | {same} | {len(survived) - same} |")
    if undetected:
        lines += ["", "## Not detected", ""]
        lines += [f"- {m.path}:{m.line} `{m.function}`: `{m.change}`" for m in undetected]
    if equivalent:
        lines += ["", "## Equivalent", ""]
        lines += [
            f"- {m.path}:{m.line} `{m.function}`: `{m.change}`: {EQUIVALENT[m.key]}"
            for m in equivalent
        ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> list[Mutant]:
    """Runs the mutants, prints survivors and writes the report; returns survivors that are not equivalent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="only files whose path contains this")
    parser.add_argument("--every", type=int, default=1, help="only each N-th change: a sample")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--known", type=Path, help="detected mutants of an earlier run; is updated")
    parser.add_argument("--list", action="store_true", help="print the changes, run nothing")
    options = parser.parse_args(arguments)
    mutants = [m for path in TESTS if options.only in path for m in mutants_of(path)]
    mutants = mutants[:: options.every]
    if options.list:
        print("\n".join(m.key for m in mutants))
        return []
    os.environ["OMP_NUM_THREADS"] = "1"
    for heavy in ("hypothesis", "pytest", "hydra", "omegaconf", "numpy.testing", "tensordict"):
        importlib.import_module(heavy)  # once here, not in each fork
    import torch

    torch.set_num_threads(1)
    start = time.monotonic()
    print(f"{len(mutants)} mutants", flush=True)
    detected = set(json.loads(options.known.read_text())) if options.known else set()
    try:
        survivors = check(mutants, options.jobs, detected)
    finally:
        if options.known:
            options.known.write_text(json.dumps(sorted(detected), indent=0))
    if options.report:
        options.report.write_text(report(mutants, survivors, time.monotonic() - start))
    return [m for m in survivors if m.key not in EQUIVALENT]


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
