"""Programs written by a model: finding the code, reading the tests, running one test in the box.

Every test is its own run in `hone.sandbox`, and the verdict is formed outside: a program that
prints a fake report or exits early passes nothing. Nothing is scored here.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hone.rewards import ground_truth as truth
from hone.rewards.failures import SetupError

if TYPE_CHECKING:
    from hone.sandbox import SandboxResult

_FENCE = re.compile(r"```[ \t]*(?:([A-Za-z0-9_+-]+)[ \t]*)?\r?\n")
_PYTHON = ("", "python", "py", "python3")
CODE_MARK = "__CODE__"
"""In a test's source, the place where the program goes (otherwise it goes in front)."""


@dataclass(frozen=True)
class Limits:
    """What one run of a program may use, and where it runs."""

    timeout_s: float
    memory_mb: int
    url: str | None = None
    """A sandbox service; None runs in the local box."""


@dataclass(frozen=True)
class StdinTest:
    """Feed `given` to standard input; standard output must be `expected`."""

    given: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """Call `function` (or the method of `Solution`) with `arguments`; it must return `expected`."""

    function: str
    arguments: list[Any]
    expected: Any


@dataclass(frozen=True)
class SourceTest:
    """Python source with assertions about the program."""

    source: str


Test = StdinTest | CallTest | SourceTest


def extract_code(text: str) -> str:
    """The last Python block in fences (closed or not); without fences the whole text."""
    code = None
    position = 0
    while (opening := _FENCE.search(text, position)) is not None:
        end = text.find("```", opening.end())
        end = len(text) if end < 0 else end
        if (opening.group(1) or "").lower() in _PYTHON:
            code = text[opening.end() : end]
        position = end + 3
    return text if code is None else code


def read_tests(ground_truth: Any, extra_info: Mapping[str, Any] | None) -> list[Test]:
    """The tests of a row, from its ground truth or from `extra_info["test_cases"]`."""
    given = truth.decode(truth.plain(ground_truth))
    if not given and extra_info:
        given = truth.decode(truth.plain(extra_info.get("test_cases")))
    tests = _tests(given)
    if not tests:
        raise truth.GroundTruthError(
            "no tests: reward_model.ground_truth and extra_info.test_cases are empty. Give "
            '{"inputs": [...], "outputs": [...]}, {"functional": source}, or a list of tests.'
        )
    return tests


def _tests(given: Any) -> list[Test]:
    if isinstance(given, str):
        return [SourceTest(given)] if given.strip() else []
    if isinstance(given, Mapping):
        return _tests_of_mapping(given)
    return [test for item in given or () for test in _one_test(item)]


def _tests_of_mapping(given: Mapping[str, Any]) -> list[Test]:
    for key in ("functional", "assert_case"):
        if given.get(key):
            return _tests(given[key])
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if inputs is None or outputs is None or len(inputs) != len(outputs):
        raise truth.GroundTruthError(
            f"tests need 'functional', or 'inputs' and 'outputs' of equal length; got {sorted(given)}"
        )
    name = given.get("fn_name")
    pairs = zip(inputs, outputs, strict=True)
    if name:
        return [CallTest(name, _arguments(item), _returned(value)) for item, value in pairs]
    return [StdinTest(_text(item), _text(value)) for item, value in pairs]


def _one_test(item: Any) -> list[Test]:
    if isinstance(item, Mapping):
        return [StdinTest(_text(item["input"]), _text(item["output"]))]
    if isinstance(item, str):
        return [SourceTest(item)]
    given, expected = item
    return [StdinTest(_text(given), _text(expected))]


def _arguments(item: Any) -> list[Any]:
    """Arguments of a call: a list, or lines of JSON, one an argument."""
    if isinstance(item, str):
        return [json.loads(line) for line in item.splitlines() if line.strip()]
    return list(item)


def _returned(value: Any) -> Any:
    """The returned value; the benchmarks wrap it in a list or write it as JSON."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def passes(code: str, test: Test, limits: Limits) -> bool:
    """Run one test in the box. SandboxError (the box, not the program, failed) is passed on."""
    if isinstance(test, StdinTest):
        output = _output(code, test.given, limits)
        return output is not None and same_output(output, test.expected)
    secret = secrets.token_hex(16)
    if isinstance(test, CallTest):
        message = json.dumps({"function": test.function, "arguments": test.arguments})
        output = _output(code + _CALL.replace("SECRET", secret), message, limits)
        found = _after_secret(output, secret)
        return found is not None and _same_value(json.loads(found), test.expected)
    source = test.source
    whole = source.replace(CODE_MARK, code) if CODE_MARK in source else f"{code}\n\n{source}"
    output = _output(f"{whole}\n\nprint('{secret}', flush=True)\n", "", limits)
    return _after_secret(output, secret) is not None


_CALL = """

def _hone_call():
    import json, sys
    job = json.loads(sys.stdin.read())
    scope = globals()
    holder = scope["Solution"]() if "Solution" in scope else None
    name = job["function"]
    function = getattr(holder, name) if hasattr(holder, name) else scope[name]
    result = function(*job["arguments"])
    sys.stdout.write("\\nSECRET" + json.dumps(result) + "\\n")

_hone_call()
"""


def _after_secret(output: str | None, secret: str) -> str | None:
    """What follows the secret on the last line, which only the tests' own end could print."""
    lines = (output or "").rstrip().splitlines()
    return lines[-1].removeprefix(secret) if lines and lines[-1].startswith(secret) else None


def _output(code: str, stdin: str, limits: Limits) -> str | None:
    """Standard output of a run that ended well, else None."""
    run_python = _runner(limits.url, limits.memory_mb)
    from hone.sandbox import SandboxUnavailable

    try:
        result = run_python(
            code, stdin=stdin, timeout_s=limits.timeout_s, memory_mb=limits.memory_mb
        )
    except SandboxUnavailable as error:
        raise SetupError(f"model-written code cannot be run here: {error}") from error
    return result.stdout if result.ok else None


@lru_cache(maxsize=8)
def _runner(url: str | None, memory_mb: int) -> Callable[..., SandboxResult]:
    """The local box, or a service. A process runs one test at a time, so one slot is enough."""
    if url is None:
        from hone.sandbox import run_python

        return run_python
    from hone.sandbox.service import SandboxService

    return SandboxService(url, max_concurrent=1, memory_limit_mb=memory_mb).run_python


def same_output(given: str, expected: str) -> bool:
    """Equal line by line less surrounding space, or word by word with a tolerance for decimals."""
    lines, wanted = _lines(given), _lines(expected)
    if lines == wanted:
        return True
    words, wanted_words = " ".join(lines).split(), " ".join(wanted).split()
    return len(words) == len(wanted_words) and all(map(_same_word, words, wanted_words))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if "." not in wanted and "e" not in wanted.lower():
        return False
    try:
        value, target = float(word), float(wanted)
    except ValueError:
        return False
    return abs(value - target) <= 1e-6 * max(1.0, abs(target))


def _same_value(value: Any, expected: Any) -> bool:
    if isinstance(value, bool) != isinstance(expected, bool):
        return False
    if isinstance(value, float) and isinstance(expected, (int, float)):
        return abs(value - expected) <= 1e-6 * max(1.0, abs(expected))
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same_value, value, expected))
    return bool(value == expected)


def count_passed(code: str, tests: Sequence[Test], limits: Limits, first: int) -> tuple[bool, int]:
    """Whether all tests pass, and how many of the `first` do (counted only when not all pass)."""
    failed_at = next((i for i, t in enumerate(tests) if not passes(code, t, limits)), None)
    if failed_at is None:
        return True, min(first, len(tests))
    if failed_at >= first:
        return False, first
    rest: Iterable[Test] = tests[failed_at + 1 : first]
    return False, failed_at + sum(passes(code, test, limits) for test in rest)
