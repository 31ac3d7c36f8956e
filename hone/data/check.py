"""`hone data check FILE`: what is in a data file, and what would go wrong with it.

Errors (exit 1): an unreadable or empty file, bad rows, ground truths missing in part, sources that no
scorer knows, rows on which a given scorer fails, agent loops that are not known by name, prompts longer than
a given limit. Warnings: duplicate prompts, prompts longer than the usual limit. Files
for supervised training are known by their columns and asked for an answer in place of a ground truth.
Leaves out repairing anything.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from hone.config.data import DataConfig
from hone.config.rollout import BUILT_IN_LOOPS
from hone.config.sft import MultiTurnDataConfig, SFTDataConfig
from hone.data.chat_template import BrokenTemplate
from hone.data.prompts import Prompt, PromptError, PromptTooLong, as_messages, render_prompt
from hone.data.rows import BadRows, DataError, FileRows, read_file
from hone.data.schema import Problem, SchemaCheck, kind_of
from hone.text import shown
from hone.tokenizer import Tokenizer
from hone.types import Row

SHOWN = 5
MEASURED = 8
"""Prompts of up to so many times data.max_prompt_length are measured; longer ones are only counted."""
_MESSAGES = MultiTurnDataConfig.messages_key
_RESPONSES = ("response", SFTDataConfig.response_key)
"""Columns that supervised training learns, the first of them that a file has."""
_ANSWERS = {*_RESPONSES, "chosen", "rejected"}
BAR_WIDTH = 40
Score = Callable[[Row], float | str]
"""The score of a row's own ground truth as the response, or why the scorer failed."""


@dataclass
class Findings:
    """What one pass over the rows has seen."""

    known_loops: Collection[str] = BUILT_IN_LOOPS
    """Agent loops that a row may name."""
    supervised: bool = False
    """The rows hold their own answers: nothing will score them."""
    response_key: str | None = None
    """The column that is learnt, where a file has one for it."""
    rows: int = 0
    columns: dict[str, Counter[str]] = field(default_factory=dict)
    sources: Counter[str] = field(default_factory=Counter)
    ruled: set[str] = field(default_factory=set)
    """Sources with a row that a rule must score."""
    lengths: list[int] = field(default_factory=list)
    overlong: list[int] = field(default_factory=list)
    """Row numbers of prompts that are longer than the limit."""
    scores: Counter[float] = field(default_factory=Counter)
    """What a given scorer says of the ground truths themselves."""
    unscored: dict[int, str] = field(default_factory=dict)
    """Row number → why the given scorer failed on it."""
    prompts: dict[str, list[int]] = field(default_factory=dict)
    without_truth: list[int] = field(default_factory=list)
    """Row numbers that a rule must score and that have nothing to compare with."""
    bad: BadRows = field(default_factory=lambda: BadRows("skip"))

    @property
    def duplicates(self) -> list[list[int]]:
        return [numbers for numbers in self.prompts.values() if len(numbers) > 1]


def check_file(
    path: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    known_sources: Collection[str] | Callable[[str], bool] | None = None,
    known_loops: Collection[str] = BUILT_IN_LOOPS,
    config: DataConfig | None = None,
    score: Score | None = None,
    max_prompt_length: int | None = None,
) -> tuple[int, str]:
    """(exit status, report). Lengths are in tokens with a tokenizer, else in characters.

    A longer prompt than `max_prompt_length` is an error; `score` is called on every row.
    """
    settings = config or DataConfig()
    if max_prompt_length is not None:
        settings = dataclasses.replace(settings, max_prompt_length=max_prompt_length)
    findings = Findings(known_loops=known_loops)
    path = os.path.expanduser(os.fspath(path))
    if not os.path.isfile(path):
        what = "is a folder, name its files" if os.path.isdir(path) else "does not exist"
        return 1, f"error: {path} {what}"
    try:
        file = read_file(path, findings.bad)
    except DataError as error:
        return 1, f"error: {error}"
    if file is None:
        return 1, "\n".join(f"error: {message}" for message in findings.bad.examples)
    settings = recognised(set(next(iter(file.rows.scan()), {})), findings, settings)
    try:
        _look_at(file, findings, tokenizer, settings, score)
    except BrokenTemplate as error:
        return 1, f"error: {error}"
    errors, warnings = _judged(findings, known_sources, settings)
    long = _long_prompts(findings, settings) if tokenizer is not None else []
    errors += long if max_prompt_length is not None else []
    warnings += long if max_prompt_length is None else []
    report = [
        f"{file.path}: {findings.rows:,} rows",
        *_described(findings, "tokens" if tokenizer is not None else "characters"),
        *(f"warning: {message}" for message in warnings),
        *(f"error: {message}" for message in errors),
        *(f"  {message}" for message in findings.bad.examples[:SHOWN]),
    ]
    report.append(_summary(len(errors), findings.bad.total, len(warnings)))
    return (1 if errors else 0), "\n".join(report)


def recognised(columns: set[str], findings: Findings, settings: DataConfig) -> DataConfig:
    """Which program the file is for, by its columns; the settings with the prompt's column in it."""
    key = settings.prompt_key
    is_answered = bool(columns & _ANSWERS) and not columns & {
        "reward_model",
        settings.reward_fn_key,
    }
    if key not in columns:
        if _MESSAGES in columns:
            key = _MESSAGES
        elif is_answered and SFTDataConfig.prompt_key in columns:
            key = SFTDataConfig.prompt_key
    findings.supervised = key == _MESSAGES or is_answered
    if findings.supervised and key != _MESSAGES:
        findings.response_key = next((name for name in _RESPONSES if name in columns), None)
    return dataclasses.replace(settings, prompt_key=key)


def _summary(errors: int, bad_rows: int, warnings: int) -> str:
    rows = f" ({_counted(bad_rows, 'bad row')})" if bad_rows else ""
    return f"{_counted(errors, 'error')}{rows}, {_counted(warnings, 'warning')}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _look_at(
    file: FileRows,
    findings: Findings,
    tokenizer: Tokenizer | None,
    settings: DataConfig,
    score: Score | None,
) -> None:
    check = SchemaCheck(settings.prompt_key, settings.prompt_format)
    for index, row in enumerate(file.rows.scan()):
        findings.rows += 1
        for name, value in row.items():
            findings.columns.setdefault(name, Counter())[kind_of(value)] += 1
        problem = check.problem(row) or _answer_problem(row, findings, settings)
        problem = problem or _loop_problem(row, findings)
        if problem is not None:
            findings.bad.report(problem.reason, f"{file.where(index)}: {problem}")
            continue
        number = int(file.numbers[index])
        prompt = row[settings.prompt_key]
        identity = _identity(row, prompt, settings, findings.supervised)
        findings.prompts.setdefault(identity, []).append(number)
        if not findings.supervised:
            _look_at_reward(row, number, findings, settings, score)
        try:
            length = _length(prompt, tokenizer, settings)
        except PromptTooLong:
            findings.overlong.append(number)
            continue
        except PromptError as error:
            findings.bad.report("cannot be rendered", f"{file.where(index)}: {error}")
            continue
        findings.lengths.append(length)
        if length > settings.max_prompt_length:
            findings.overlong.append(number)


def _answer_problem(row: Row, findings: Findings, settings: DataConfig) -> Problem | None:
    """What `hone sft` would say of a row that holds nothing to learn."""
    if settings.prompt_key == _MESSAGES:
        if any(message["role"] == "assistant" for message in as_messages(row[_MESSAGES])):
            return None
        return Problem(
            "no assistant turn", f"column {_MESSAGES!r} has no assistant turn, so nothing to learn"
        )
    key = findings.response_key
    kind = kind_of(row.get(key)) if key is not None else "text"
    if kind == "text":
        return None
    if kind == "null":
        return Problem("missing response", f"column {key!r} is missing: nothing to learn")
    return Problem("wrong type", f"column {key!r} is text, got {kind}")


def _loop_problem(row: Row, findings: Findings) -> Problem | None:
    """What `hone train` would say of the agent loop that a row names."""
    name, known = row.get("agent_name"), findings.known_loops
    if not name or findings.supervised or name in known:
        return None
    told = (
        "a row names a loop, never a place to import one from"
        if ":" in name or "/" in name
        else f"known are {', '.join(known)}; name your own with --agent-loop"
    )
    return Problem("unknown agent loop", f"agent_name={shown(name)} is not known: {told}")


def _look_at_reward(
    row: Row, number: int, findings: Findings, settings: DataConfig, score: Score | None
) -> None:
    source = str(row.get(settings.reward_fn_key))
    findings.sources[source] += 1
    is_ruled = (row.get("reward_model") or {}).get("style") != "model"
    if is_ruled:
        findings.ruled.add(source)
    if score is None:
        if _lacks_truth(row):
            findings.without_truth.append(number)
    elif is_ruled:
        outcome = score(row)
        if isinstance(outcome, str):
            findings.unscored[number] = outcome
        else:
            findings.scores[outcome] += 1


def _identity(row: Row, prompt: Prompt, settings: DataConfig, supervised: bool) -> str:
    """A prompt with its images: the same words about another picture are another prompt. So are
    those with another answer, where the answer is what is learnt."""
    listed = row.get(settings.image_key)
    images = [
        image.get("path") or hash(image.get("bytes")) if isinstance(image, dict) else image
        for image in (listed if isinstance(listed, list) else ())
    ]
    answers = [row.get(name) for name in sorted(_ANSWERS) if supervised]
    text = json.dumps([prompt, images, answers], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _lacks_truth(row: Row) -> bool:
    reward = row.get("reward_model") or {}
    if reward.get("style") == "model":
        return False
    has_tests = bool((row.get("extra_info") or {}).get("test_cases"))
    return reward.get("ground_truth") in (None, "") and not has_tests


def _length(prompt: Prompt, tokenizer: Tokenizer | None, settings: DataConfig) -> int:
    if tokenizer is not None:
        ids = render_prompt(
            prompt,
            tokenizer,
            settings.prompt_format,
            template_kwargs=settings.apply_chat_template_kwargs,
            max_tokens=MEASURED * settings.max_prompt_length,
        )
        return len(ids)
    return sum(
        len(message["content"])
        if isinstance(message["content"], str)
        else sum(len(part.get("text") or "") for part in message["content"])
        for message in as_messages(prompt)
    )


def _judged(
    findings: Findings,
    known_sources: Collection[str] | Callable[[str], bool] | None,
    settings: DataConfig,
) -> tuple[list[str], list[str]]:
    errors = [f"{count:,} rows: {reason}" for reason, count in sorted(findings.bad.counts.items())]
    warnings = []
    if 0 < len(findings.without_truth) < sum(findings.sources.values()):
        errors.append(
            f"{len(findings.without_truth):,} rows have no reward_model.ground_truth"
            f" (rows {_some(findings.without_truth)}) and others do"
        )
    elif findings.without_truth:
        warnings.append(
            "no row has reward_model.ground_truth: only a reward model or a"
            " custom_reward_function can score these"
        )
    unknown = [name for name in sorted(findings.ruled) if not _is_known(name, known_sources)]
    if unknown:
        errors.append(
            f"no scorer knows data_source {', '.join(map(repr, unknown))}; rename it, or name"
            " your score function: --reward FILE.py (in a run, custom_reward_function.path)"
        )
    if findings.duplicates:
        extra = sum(len(numbers) - 1 for numbers in findings.duplicates)
        warnings.append(
            f"{extra:,} rows repeat an earlier prompt (such as rows {_some(findings.duplicates[0])})"
        )
    if findings.unscored:
        first = next(iter(findings.unscored))
        errors.append(
            f"{len(findings.unscored):,} rows cannot be scored (rows {_some(findings.unscored)}); "
            f"row {first}: {findings.unscored[first]}"
        )
    return errors, warnings


def _long_prompts(findings: Findings, settings: DataConfig) -> list[str]:
    if not findings.overlong:
        return []
    return [
        f"{len(findings.overlong):,} prompts have more than data.max_prompt_length="
        f"{settings.max_prompt_length} tokens (rows {_some(findings.overlong)})"
    ]


def _is_known(name: str, known: Collection[str] | Callable[[str], bool] | None) -> bool:
    if known is None:
        return True
    return known(name) if callable(known) else name in known


def _some(numbers: Iterable[int]) -> str:
    listed = list(numbers)
    shown = ", ".join(map(str, listed[:SHOWN]))
    return shown if len(listed) <= SHOWN else f"{shown}, …"


def _described(findings: Findings, unit: str) -> list[str]:
    lines = ["columns:"]
    width = max(map(len, findings.columns), default=0)
    for name, kinds in findings.columns.items():
        absent = findings.rows - sum(kinds.values()) + kinds["null"]
        shown = " or ".join(kind for kind in sorted(kinds) if kind != "null") or "null"
        missing = f", missing in {absent:,}" if absent else ""
        lines.append(f"  {name:<{width}}  {shown}{missing}")
    if findings.supervised:
        lines.append("for supervised training: the rows hold their answers")
    else:
        lines.append("sources:")
        lines += [f"  {name}: {count:,}" for name, count in findings.sources.most_common()]
    if findings.scores:
        counts = sorted(findings.scores.items(), reverse=True)
        told = ", ".join(f"{score:g} in {count:,}" for score, count in counts[:SHOWN])
        more = f" and {len(counts) - SHOWN} values more" if len(counts) > SHOWN else ""
        lines.append(f"score of the ground truth itself: {told}{more} rows")
    return [*lines, *histogram(findings.lengths, unit)]


def histogram(lengths: list[int], unit: str, buckets: int = 8) -> list[str]:
    """Prompt lengths in equal buckets, with a bar each."""
    if not lengths:
        return []
    low, high = min(lengths), max(lengths)
    step = max(-(-(high - low + 1) // buckets), 1)
    counts = Counter((length - low) // step for length in lengths)
    most = max(counts.values())
    middle = sorted(lengths)[len(lengths) // 2]
    lines = [f"prompt length in {unit}: shortest {low:,}, median {middle:,}, longest {high:,}"]
    for bucket in range(max(counts) + 1):
        start = low + bucket * step
        bar = "#" * round(BAR_WIDTH * counts[bucket] / most)
        lines.append(
            f"  {start:>7,} to {start + step - 1:>7,}  {counts[bucket]:>8,}  {bar}".rstrip()
        )
    return lines
