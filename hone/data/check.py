"""`hone data check FILE`: reports the content of a data file and its problems.

Errors (exit 1): an unreadable or empty file, bad rows, ground truths missing in some rows, data sources
without a scorer, rows on which the given scorer fails, unknown agent loops, prompts longer than a given
limit. Warnings: duplicate prompts, prompts longer than the default limit. Files for supervised
training are recognized by their columns and need an answer instead of a ground truth.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
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
"""Prompts up to this multiple of data.max_prompt_length are measured; longer ones are only counted."""
MESSAGES = MultiTurnDataConfig.messages_key
_RESPONSES = ("response", SFTDataConfig.response_key)
_ANSWERS = {*_RESPONSES, "chosen", "rejected"}
BAR_WIDTH = 40
Score = Callable[[Row], float | str]
"""Returns the score of a row's ground truth as the response, or the scorer's error."""


@dataclass(frozen=True)
class Kind:
    """The kind of a data file, recognized by its columns."""

    settings: DataConfig
    """The settings, with `prompt_key` set to the prompt column of the file."""
    supervised: bool
    """Whether the rows contain the answers, so that no scorer is needed."""
    response_key: str | None
    """The response column of a supervised file without conversations."""


def kind_of_file(columns: Collection[str], settings: DataConfig) -> Kind:
    """Returns the kind of a file with these columns."""
    names, key = set(columns), settings.prompt_key
    is_answered = bool(names & _ANSWERS) and not names & {"reward_model", settings.reward_fn_key}
    if key not in names:
        if MESSAGES in names:
            key = MESSAGES
        elif is_answered and SFTDataConfig.prompt_key in names:
            key = SFTDataConfig.prompt_key
    response = next((name for name in _RESPONSES if name in names), None)
    has_response = is_answered and key != MESSAGES
    return Kind(
        dataclasses.replace(settings, prompt_key=key),
        key == MESSAGES or is_answered,
        response if has_response else None,
    )


def check_file(
    path: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    known_sources: Callable[[str], bool] | None = None,
    known_loops: Collection[str] = BUILT_IN_LOOPS,
    config: DataConfig | None = None,
    score: Score | None = None,
    max_prompt_length: int | None = None,
) -> tuple[int, str]:
    """Returns (exit status, report); lengths are in tokens with a tokenizer, else in characters."""
    settings = config or DataConfig()
    if max_prompt_length is not None:
        settings = dataclasses.replace(settings, max_prompt_length=max_prompt_length)
    path = os.path.expanduser(os.fspath(path))
    if not os.path.isfile(path):
        what = "is a folder, name its files" if os.path.isdir(path) else "does not exist"
        return 1, f"error: {path} {what}"
    bad = BadRows("skip")
    try:
        file = read_file(path, bad)
        if file is None:
            return 1, "\n".join(f"error: {message}" for message in bad.examples)
        kind = kind_of_file(next(iter(file.scan()), {}), settings)
        check = _Check(kind, known_loops, tokenizer, score, bad)
        check.read(file)
    except (DataError, BrokenTemplate) as error:
        return 1, f"error: {error}"
    errors, warnings = [*check.errors(known_sources)], [*check.warnings()]
    if tokenizer is not None and check.overlong:
        message = (
            f"{len(check.overlong):,} prompts have more than data.max_prompt_length="
            f"{settings.max_prompt_length} tokens (rows {_some(check.overlong)})"
        )
        (warnings if max_prompt_length is None else errors).append(message)
    bad_rows = f" ({_counted(bad.total, 'bad row')})" if bad.total else ""
    report = [
        f"{file.path}: {check.rows:,} rows",
        *check.described(),
        *(f"warning: {message}" for message in warnings),
        *(f"error: {message}" for message in errors),
        *(f"  {message}" for message in bad.examples[:SHOWN]),
        f"{_counted(len(errors), 'error')}{bad_rows}, {_counted(len(warnings), 'warning')}",
    ]
    return (1 if errors else 0), "\n".join(report)


@dataclass
class _Check:
    kind: Kind
    known_loops: Collection[str]
    tokenizer: Tokenizer | None
    score: Score | None
    bad: BadRows
    rows: int = 0
    columns: dict[str, Counter[str]] = field(default_factory=dict)
    sources: Counter[str] = field(default_factory=Counter)
    ruled: set[str] = field(default_factory=set)
    """Sources with a row that needs a rule-based scorer."""
    lengths: list[int] = field(default_factory=list)
    scores: Counter[float] = field(default_factory=Counter)
    """Score of the ground truth -> number of rows."""
    unscored: dict[int, str] = field(default_factory=dict)
    """Row number -> the scorer's error."""
    prompts: dict[str, list[int]] = field(default_factory=dict)
    """Prompt hash -> the numbers of its rows."""
    overlong: list[int] = field(default_factory=list)
    without_truth: list[int] = field(default_factory=list)

    def read(self, file: FileRows) -> None:
        settings = self.kind.settings
        check = SchemaCheck(settings.prompt_key, settings.prompt_format)
        for index, row in enumerate(file.scan()):
            self.rows += 1
            for name, value in row.items():
                self.columns.setdefault(name, Counter())[kind_of(value)] += 1
            problem = check.problem(row) or self._answer_problem(row) or self._loop_problem(row)
            if problem is not None:
                self.bad.report(problem.reason, f"{file.where(index)}: {problem}")
                continue
            number, prompt = int(file.numbers[index]), row[settings.prompt_key]
            self.prompts.setdefault(self._identity(row), []).append(number)
            if not self.kind.supervised:
                self._read_reward(row, number)
            try:
                self.lengths.append(self._length(prompt))
                if self.lengths[-1] > settings.max_prompt_length:
                    self.overlong.append(number)
            except PromptTooLong:
                self.overlong.append(number)
            except PromptError as error:
                self.bad.report("cannot be rendered", f"{file.where(index)}: {error}")

    def _answer_problem(self, row: Row) -> Problem | None:
        """Returns the problem that `hone sft` would report for a row without targets."""
        if self.kind.settings.prompt_key == MESSAGES:
            if any(message["role"] == "assistant" for message in as_messages(row[MESSAGES])):
                return None
            message = f"column {MESSAGES!r} has no assistant turn, so nothing to learn"
            return Problem("no assistant turn", message)
        key = self.kind.response_key
        kind = kind_of(row.get(key)) if key is not None else "text"
        if kind == "null":
            return Problem("missing response", f"column {key!r} is missing: nothing to learn")
        return (
            Problem("wrong type", f"column {key!r} is text, got {kind}") if kind != "text" else None
        )

    def _loop_problem(self, row: Row) -> Problem | None:
        """Returns the problem that `hone train` would report for the row's agent loop."""
        name = row.get("agent_name")
        if not name or self.kind.supervised or name in self.known_loops:
            return None
        hint = f"known are {', '.join(self.known_loops)}; name your own with --agent-loop"
        if ":" in name or "/" in name:
            hint = "a row names a loop, never a place to import one from"
        return Problem("unknown agent loop", f"agent_name={shown(name)} is not known: {hint}")

    def _read_reward(self, row: Row, number: int) -> None:
        source = str(row.get(self.kind.settings.reward_fn_key))
        self.sources[source] += 1
        reward = row.get("reward_model") or {}
        if reward.get("style") == "model":
            return
        self.ruled.add(source)
        if self.score is not None:
            outcome = self.score(row)
            if isinstance(outcome, str):
                self.unscored[number] = outcome
            else:
                self.scores[outcome] += 1
            return
        has_tests = bool((row.get("extra_info") or {}).get("test_cases"))
        if reward.get("ground_truth") in (None, "") and not has_tests:
            self.without_truth.append(number)

    def _identity(self, row: Row) -> str:
        """Hashes a prompt with its images and, in supervised rows, its answers."""
        settings = self.kind.settings
        column = row.get(settings.image_key)
        images = [
            image.get("path") or hash(image.get("bytes")) if isinstance(image, dict) else image
            for image in (column if isinstance(column, list) else ())
        ]
        answers = [row.get(name) for name in sorted(_ANSWERS) if self.kind.supervised]
        parts = [row[settings.prompt_key], images, answers]
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _length(self, prompt: Prompt) -> int:
        settings = self.kind.settings
        if self.tokenizer is not None:
            ids = render_prompt(
                prompt,
                self.tokenizer,
                settings.prompt_format,
                template_kwargs=settings.apply_chat_template_kwargs,
                max_tokens=MEASURED * settings.max_prompt_length,
            )
            return len(ids)
        contents = [message["content"] for message in as_messages(prompt)]
        return sum(
            len(content)
            if isinstance(content, str)
            else sum(len(part.get("text") or "") for part in content)
            for content in contents
        )

    def errors(self, is_known: Callable[[str], bool] | None) -> Iterator[str]:
        for reason, count in sorted(self.bad.counts.items()):
            yield f"{count:,} rows: {reason}"
        if 0 < len(self.without_truth) < sum(self.sources.values()):
            yield (
                f"{len(self.without_truth):,} rows have no reward_model.ground_truth"
                f" (rows {_some(self.without_truth)}) and others do"
            )
        if is_known is not None:
            unknown = [repr(name) for name in sorted(self.ruled) if not is_known(name)]
            if unknown:
                yield (
                    f"no scorer knows data_source {', '.join(unknown)}; rename it, or name your"
                    " score function: --reward FILE.py (in a run, custom_reward_function.path)"
                )
        if self.unscored:
            first = next(iter(self.unscored))
            yield (
                f"{len(self.unscored):,} rows cannot be scored (rows {_some(self.unscored)}); "
                f"row {first}: {self.unscored[first]}"
            )

    def warnings(self) -> Iterator[str]:
        if self.without_truth and len(self.without_truth) == sum(self.sources.values()):
            yield (
                "no row has reward_model.ground_truth: only a reward model or a"
                " custom_reward_function can score these"
            )
        if repeated := [numbers for numbers in self.prompts.values() if len(numbers) > 1]:
            extra = sum(len(numbers) - 1 for numbers in repeated)
            yield f"{extra:,} rows repeat an earlier prompt (such as rows {_some(repeated[0])})"

    def described(self) -> Iterator[str]:
        yield "columns:"
        width = max(map(len, self.columns), default=0)
        for name, kinds in self.columns.items():
            missing_rows = self.rows - sum(kinds.values()) + kinds["null"]
            present = " or ".join(kind for kind in sorted(kinds) if kind != "null") or "null"
            missing = f", missing in {missing_rows:,}" if missing_rows else ""
            yield f"  {name:<{width}}  {present}{missing}"
        if self.kind.supervised:
            yield "for supervised training: the rows hold their answers"
        else:
            yield "sources:"
            yield from (f"  {name}: {count:,}" for name, count in self.sources.most_common())
        if self.scores:
            counts = sorted(self.scores.items(), reverse=True)
            score_counts = ", ".join(f"{score:g} in {count:,}" for score, count in counts[:SHOWN])
            remainder = f" and {len(counts) - SHOWN} values more" if len(counts) > SHOWN else ""
            yield f"score of the ground truth itself: {score_counts}{remainder} rows"
        yield from histogram(self.lengths, "characters" if self.tokenizer is None else "tokens")


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _some(numbers: Iterable[int]) -> str:
    names = [str(number) for number in numbers]
    return ", ".join(names if len(names) <= SHOWN else [*names[:SHOWN], "…"])


def histogram(lengths: list[int], unit: str, buckets: int = 8) -> list[str]:
    """Formats prompt lengths as equal buckets with bars."""
    if not lengths:
        return []
    low, high = min(lengths), max(lengths)
    step = max(-(-(high - low + 1) // buckets), 1)
    counts = Counter((length - low) // step for length in lengths)
    middle = sorted(lengths)[len(lengths) // 2]
    lines = [f"prompt length in {unit}: shortest {low:,}, median {middle:,}, longest {high:,}"]
    for bucket in range(max(counts) + 1):
        start, count = low + bucket * step, counts[bucket]
        bar = "#" * round(BAR_WIDTH * count / max(counts.values()))
        lines.append(f"  {start:>7,} to {start + step - 1:>7,}  {count:>8,}  {bar}".rstrip())
    return lines
