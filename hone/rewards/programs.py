"""Tests model-written programs: extracts the code, reads the tests, runs each test in a box.

The program cannot tamper with the result: its output is compared here, and a second box runs assertions.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from hone.config.reward import SandboxFusionConfig
from hone.data.values import decode_json, to_python
from hone.rewards.failures import SetupError
from hone.rewards.ground_truth import GroundTruthError
from hone.types import JsonObject, JsonValue, Settings

if TYPE_CHECKING:
    from hone.sandbox.service import SandboxService

T = TypeVar("T")
_FENCE = re.compile(r"```[ \t]*(?:([A-Za-z0-9_+-]+)[ \t]*)?\r?\n")
_PYTHON_FENCE_NAMES = ("", "python", "py", "python3")
_TOLERANCE = 1e-6  # relative to the expected value; absolute for expected values below 1
CODE_PLACEHOLDER = "__CODE__"
"""The lines of a test above this line are the preamble: it runs before the program and before the tests."""


@dataclass(frozen=True)
class Limits:
    """The resource limits of one run of a program, and the sandbox service that runs it."""

    timeout_s: float
    memory_mb: int | None = None
    """None means the default of `reward_model.sandbox_fusion.memory_limit_mb`."""
    url: str | None = None
    """The URL of a sandbox service; None runs the program in a local box."""

    @property
    def memory_limit_mb(self) -> int:
        """`memory_mb`, or the default."""
        return self.memory_mb or SandboxFusionConfig().memory_limit_mb


@dataclass(frozen=True)
class StdinTest:
    """The program gets `stdin` and must print `expected`."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """The function (or method of `Solution`) must return `expected` for `arguments`."""

    function: str
    arguments: list[JsonValue]
    expected: JsonValue


@dataclass(frozen=True)
class SourceTest:
    """Python source with assertions about the program."""

    source: str

    def split(self) -> tuple[str, str]:
        """Returns the preamble and the tests."""
        preamble, placeholder, tests = self.source.partition(CODE_PLACEHOLDER)
        if not placeholder:
            return "", self.source
        if preamble.rpartition("\n")[2].strip() or tests.partition("\n")[0].strip():
            raise GroundTruthError(f"{CODE_PLACEHOLDER} must be on a line of its own")
        return preamble, tests


Test = StdinTest | CallTest | SourceTest


def extract_code(text: str) -> str:
    """Returns the last fenced Python block, which may be unclosed, or the whole text if it has no block."""
    code = None
    position = 0
    while (fence := _FENCE.search(text, position)) is not None:
        end = text.find("```", fence.end())
        if end < 0:
            end = len(text)
        if (fence.group(1) or "").lower() in _PYTHON_FENCE_NAMES:
            code = text[fence.end() : end]
        position = end + 3
    return text if code is None else code


def read_tests(ground_truth: JsonValue, extra_info: Settings | None) -> list[Test]:
    """Returns the tests of a row: its ground truth, or `extra_info["test_cases"]`."""
    content = decode_json(to_python(ground_truth))
    if not content and extra_info:
        content = decode_json(to_python(extra_info.get("test_cases")))
    tests = _parse_tests(content)
    if not tests:
        raise GroundTruthError(
            "no tests: reward_model.ground_truth and extra_info.test_cases are empty. Give "
            '{"inputs": [...], "outputs": [...]}, {"functional": source}, or a list of tests.'
        )
    return tests


def _parse_tests(content: JsonValue) -> list[Test]:
    if isinstance(content, str):
        lines = [line.strip() for line in content.splitlines()]
        is_empty = all(not line or line[0] == "#" or line == CODE_PLACEHOLDER for line in lines)
        return [] if is_empty else [SourceTest(content)]
    if isinstance(content, dict):
        return _parse_test_mapping(content)
    tests: list[Test] = []
    for item in content if isinstance(content, list) else []:
        if isinstance(item, str):
            tests += _parse_tests(item)
        elif isinstance(item, dict):
            tests.append(StdinTest(_join_lines(item["input"]), _join_lines(item["output"])))
        elif isinstance(item, list) and len(item) == 2:
            tests.append(StdinTest(_join_lines(item[0]), _join_lines(item[1])))
        else:
            raise GroundTruthError(
                f"a test must be source, [input, output] or a mapping; got {item!r:.80}"
            )
    return tests


def _parse_test_mapping(content: JsonObject) -> list[Test]:
    for key in ("functional", "assert_case"):
        if content.get(key):
            return _parse_tests(content[key])
    inputs, outputs = content.get("inputs"), content.get("outputs")
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)):
        raise GroundTruthError(
            "tests need 'functional', or 'inputs' and 'outputs' of equal length; got "
            f"{sorted(content)}"
        )
    name = content.get("fn_name")
    pairs = zip(inputs, outputs, strict=True)
    if name:
        # APPS puts every return value into a list of its own.
        lists = [value for value in outputs if not isinstance(value, str)]
        is_wrapped = all(isinstance(value, list) and len(value) == 1 for value in lists)
        return [
            CallTest(str(name), _parse_arguments(item), _return_value(value, is_wrapped))
            for item, value in pairs
        ]
    return [StdinTest(_join_lines(item), _join_lines(value)) for item, value in pairs]


def _parse_arguments(item: JsonValue) -> list[JsonValue]:
    """Returns the arguments of a call, from a list or from lines with one JSON value each."""
    if isinstance(item, str):
        return [json.loads(line) for line in item.splitlines() if line.strip()]
    return item if isinstance(item, list) else [item]


def _return_value(value: JsonValue, is_wrapped: bool) -> JsonValue:
    """Returns the right return value of a call, which a row writes as JSON text or as a value."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value[0] if is_wrapped and isinstance(value, list) else value


def _join_lines(value: JsonValue) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def passes(code: str, test: Test, limits: Limits) -> bool:
    """Returns whether the program passes one test; raises SandboxError if the box failed."""
    if isinstance(test, StdinTest):
        output = _stdout_of(code, test.stdin, limits)
        return output is not None and same_output(output, test.expected)
    if isinstance(test, SourceTest):
        return _assertions_hold(code, test, limits)
    secret = secrets.token_hex(16)
    message = json.dumps({"function": test.function, "arguments": test.arguments})
    output = _stdout_of(code + _CALL_SOURCE.replace("SECRET", secret), message, limits)
    # Only the end of `_hone_call` can print the secret on the last line.
    *_, last_line = ["", *(output or "").rstrip().splitlines()]
    answer = last_line.removeprefix(secret)
    return answer != last_line and is_equal_json(answer, test.expected)


_CALL_SOURCE = """

def _hone_call():
    import json, sys
    job = json.loads(sys.stdin.read())
    scope = globals()
    solution = scope["Solution"]() if "Solution" in scope else None
    name = job["function"]
    function = getattr(solution, name) if hasattr(solution, name) else scope[name]
    result = function(*job["arguments"])
    sys.stdout.write("\\nSECRET" + json.dumps(result) + "\\n")

_hone_call()
"""


def _assertions_hold(code: str, test: SourceTest, limits: Limits) -> bool:
    """Returns whether the assertions hold; a judge in a second box decides this."""
    from hone.sandbox.judging import judge

    preamble, tests = test.split()
    service = _sandbox_service(limits.url, limits.memory_limit_mb)
    run = judge if service is None else service.judge
    judgement = _run_in_sandbox(run, limits, program=code, tests=tests, preamble=preamble)
    if not judgement.usable:
        raise GroundTruthError(f"the tests of this row cannot run: {judgement.reason}")
    num_values_from_program = judgement.answers
    if judgement.passed and num_values_from_program == 0:
        raise GroundTruthError(
            "the tests of this row call nothing of the program: any program would pass them"
        )
    return judgement.passed


def _stdout_of(code: str, stdin: str, limits: Limits) -> str | None:
    """Returns the standard output of the program, or None if the run failed."""
    from hone.sandbox import run_python

    service = _sandbox_service(limits.url, limits.memory_limit_mb)
    run = run_python if service is None else service.run_python
    result = _run_in_sandbox(run, limits, code=code, stdin=stdin)
    return result.stdout if result.ok else None


def _run_in_sandbox(run: Callable[..., T], limits: Limits, **sources: str) -> T:
    from hone.sandbox import SandboxUnavailable

    try:
        return run(**sources, timeout_s=limits.timeout_s, memory_mb=limits.memory_limit_mb)
    except SandboxUnavailable as error:
        raise SetupError(f"model-written code cannot be run here: {error}") from error


@lru_cache(maxsize=8)
def _sandbox_service(url: str | None, memory_mb: int) -> SandboxService | None:
    """Returns the sandbox service with one slot (tests run one by one), or None for a local box."""
    if url is None:
        return None
    from hone.sandbox.service import SandboxService

    return SandboxService(url, max_concurrent=1, memory_limit_mb=memory_mb)


def count_passed(
    code: str, tests: Sequence[Test], limits: Limits, num_always_run: int
) -> tuple[bool, int]:
    """Returns whether all tests pass, and how many of the first `num_always_run` tests pass.

    The first `num_always_run` tests run even after a failed test; later tests do not.
    """
    num_passed, has_failed = 0, False
    for index, test in enumerate(tests):
        if has_failed and index >= num_always_run:
            break
        is_passed = passes(code, test, limits)
        has_failed |= not is_passed
        num_passed += is_passed and index < num_always_run
    return not has_failed, num_passed


def same_output(output: str, expected: str) -> bool:
    """Returns whether two outputs have equal lines, or equal words with a tolerance for decimals."""
    lines, expected_lines = (
        [line.strip() for line in text.strip().splitlines()] for text in (output, expected)
    )
    if lines == expected_lines:
        return True
    words, expected_words = " ".join(lines).split(), " ".join(expected_lines).split()
    return len(words) == len(expected_words) and all(map(_is_same_word, words, expected_words))


def _is_same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if ("." not in expected and "e" not in expected.lower()) or "_" in word:
        return False  # integers must be equal, and float() would accept 1_000
    try:
        return _is_close(float(word), float(expected))
    except ValueError:
        return False


def is_equal_json(text: str, expected: JsonValue) -> bool:
    """Returns whether the text is JSON that decodes to the expected value."""
    try:
        return _is_same_value(json.loads(text), expected)
    except (ValueError, RecursionError):
        return False


def _is_same_value(value: JsonValue, expected: JsonValue) -> bool:
    if isinstance(value, bool) != isinstance(expected, bool):
        return False
    if isinstance(value, (int, float)) and isinstance(expected, float):
        return _is_close(value, expected)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_is_same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            _is_same_value(value[key], expected[key]) for key in expected
        )
    return bool(value == expected)


def _is_close(value: float, target: float) -> bool:
    """Returns whether two numbers are equal within the tolerance; infinity and NaN equal only themselves."""
    try:
        value = float(value)
    except OverflowError:
        return False
    if not (math.isfinite(value) and math.isfinite(target)):
        return value == target or (math.isnan(value) and math.isnan(target))
    return abs(value - target) <= _TOLERANCE * max(1.0, abs(target))
