"""`hone data check FILE`: reports the content of a data file, errors (exit status 1) and warnings.

Files for supervised training are recognized by their columns; their rows need an answer, and no
ground truth.
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
from hone.data.rows import BadRowPolicy, DataError, FileRows, read_file
from hone.data.schema import Problem, SchemaCheck, kind_of
from hone.text import shown
from hone.tokenizer import Tokenizer
from hone.types import Row

MAX_SHOWN = 5
MAX_LENGTH_FACTOR = 8
"""Longer prompts than this multiple of data.max_prompt_length are not tokenised completely."""
MESSAGES = MultiTurnDataConfig.messages_key
_RESPONSE_COLUMNS = ("response", SFTDataConfig.response_key)
_ANSWER_COLUMNS = {*_RESPONSE_COLUMNS, "chosen", "rejected"}
BAR_WIDTH = 40
Score = Callable[[Row], float | str]
"""Maps a row to the score of its ground truth as the response, or to the scorer's error."""


@dataclass(frozen=True)
class FileKind:
    """The kind of a data file, recognized by its columns."""

    settings: DataConfig
    """The settings, with `prompt_key` set to the prompt column of the file."""
    supervised: bool
    """Whether the rows contain the answers, so that no scorer is needed."""
    response_key: str | None
    """The response column of a supervised file without conversations."""


def kind_of_file(columns: Collection[str], settings: DataConfig) -> FileKind:
    """Returns the kind of a file with these columns."""
    names, key = set(columns), settings.prompt_key
    has_reward = bool(names & {"reward_model", settings.reward_fn_key})
    has_answers = bool(names & _ANSWER_COLUMNS) and not has_reward
    if key not in names:
        if MESSAGES in names:
            key = MESSAGES
        elif has_answers and SFTDataConfig.prompt_key in names:
            key = SFTDataConfig.prompt_key
    response = next((name for name in _RESPONSE_COLUMNS if name in names), None)
    has_response = has_answers and key != MESSAGES
    return FileKind(
        dataclasses.replace(settings, prompt_key=key),
        key == MESSAGES or has_answers,
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
        reason = "is a folder, name its files" if os.path.isdir(path) else "does not exist"
        return 1, f"error: {path} {reason}"
    bad_rows = BadRowPolicy("skip")
    try:
        file = read_file(path, bad_rows)
        if file is None:
            return 1, "\n".join(f"error: {message}" for message in bad_rows.examples)
        kind = kind_of_file(next(iter(file.scan()), {}), settings)
        check = _Check(kind, known_loops, tokenizer, score, bad_rows)
        check.check_rows(file)
    except (DataError, BrokenTemplate) as error:
        return 1, f"error: {error}"
    errors, warnings = [*check.errors(known_sources)], [*check.warnings()]
    if tokenizer is not None and check.overlong_rows:
        message = (
            f"{len(check.overlong_rows):,} prompts have more than data.max_prompt_length="
            f"{settings.max_prompt_length} tokens (rows {_examples(check.overlong_rows)})"
        )
        (warnings if max_prompt_length is None else errors).append(message)
    bad_rows_text = f" ({_plural(bad_rows.total, 'bad row')})" if bad_rows.total else ""
    report = [
        f"{file.path}: {check.rows:,} rows",
        *check.summary_lines(),
        *(f"warning: {message}" for message in warnings),
        *(f"error: {message}" for message in errors),
        *(f"  {message}" for message in bad_rows.examples[:MAX_SHOWN]),
        f"{_plural(len(errors), 'error')}{bad_rows_text}, {_plural(len(warnings), 'warning')}",
    ]
    return (1 if errors else 0), "\n".join(report)


@dataclass
class _Check:
    kind: FileKind
    known_loops: Collection[str]
    tokenizer: Tokenizer | None
    score: Score | None
    bad_rows: BadRowPolicy
    rows: int = 0
    columns: dict[str, Counter[str]] = field(default_factory=dict)
    sources: Counter[str] = field(default_factory=Counter)
    rule_sources: set[str] = field(default_factory=set)
    """Data sources with a row that needs a rule-based scorer."""
    lengths: list[int] = field(default_factory=list)
    scores: Counter[float] = field(default_factory=Counter)
    """Score of the ground truth -> number of rows."""
    score_errors: dict[int, str] = field(default_factory=dict)
    """Row number -> the scorer's error."""
    prompts: dict[str, list[int]] = field(default_factory=dict)
    """Prompt hash -> the numbers of its rows."""
    overlong_rows: list[int] = field(default_factory=list)
    without_truth: list[int] = field(default_factory=list)

    def check_rows(self, file: FileRows) -> None:
        settings = self.kind.settings
        check = SchemaCheck(settings.prompt_key, settings.prompt_format)
        for index, row in enumerate(file.scan()):
            self.rows += 1
            for name, value in row.items():
                self.columns.setdefault(name, Counter())[kind_of(value)] += 1
            problem = check.problem(row) or self._answer_problem(row) or self._loop_problem(row)
            if problem is not None:
                self.bad_rows.report(problem.reason, f"{file.where(index)}: {problem}")
                continue
            number, prompt = int(file.numbers[index]), row[settings.prompt_key]
            self.prompts.setdefault(self._prompt_hash(row), []).append(number)
            if not self.kind.supervised:
                self._check_reward(row, number)
            try:
                self.lengths.append(self._length(prompt))
                if self.lengths[-1] > settings.max_prompt_length:
                    self.overlong_rows.append(number)
            except PromptTooLong:
                self.overlong_rows.append(number)
            except PromptError as error:
                self.bad_rows.report("cannot be rendered", f"{file.where(index)}: {error}")

    def _answer_problem(self, row: Row) -> Problem | None:
        """Returns the problem of a supervised row without targets."""
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
        """Returns the problem of a row with an unknown agent loop."""
        name = row.get("agent_name")
        if not name or self.kind.supervised or name in self.known_loops:
            return None
        hint = f"known are {', '.join(self.known_loops)}; name your own with --agent-loop"
        if ":" in name or "/" in name:
            hint = "a row names a loop, never a place to import one from"
        return Problem("unknown agent loop", f"agent_name={shown(name)} is not known: {hint}")

    def _check_reward(self, row: Row, number: int) -> None:
        source = str(row.get(self.kind.settings.reward_fn_key))
        self.sources[source] += 1
        reward = row.get("reward_model") or {}
        if reward.get("style") == "model":
            return
        self.rule_sources.add(source)
        if self.score is not None:
            outcome = self.score(row)
            if isinstance(outcome, str):
                self.score_errors[number] = outcome
            else:
                self.scores[outcome] += 1
            return
        has_tests = bool((row.get("extra_info") or {}).get("test_cases"))
        if reward.get("ground_truth") in (None, "") and not has_tests:
            self.without_truth.append(number)

    def _prompt_hash(self, row: Row) -> str:
        """Returns a hash of the prompt, its images and, in supervised rows, its answers."""
        settings = self.kind.settings
        column = row.get(settings.image_key)
        images = [
            image.get("path") or hash(image.get("bytes")) if isinstance(image, dict) else image
            for image in (column if isinstance(column, list) else ())
        ]
        answers = [row.get(name) for name in sorted(_ANSWER_COLUMNS) if self.kind.supervised]
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
                max_tokens=MAX_LENGTH_FACTOR * settings.max_prompt_length,
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
        for reason, count in sorted(self.bad_rows.counts.items()):
            yield f"{count:,} rows: {reason}"
        if 0 < len(self.without_truth) < sum(self.sources.values()):
            yield (
                f"{len(self.without_truth):,} rows have no reward_model.ground_truth"
                f" (rows {_examples(self.without_truth)}) and others do"
            )
        if is_known is not None:
            unknown = [repr(name) for name in sorted(self.rule_sources) if not is_known(name)]
            if unknown:
                yield (
                    f"no scorer knows data_source {', '.join(unknown)}; rename it, or name your"
                    " score function: --reward FILE.py (in a run, custom_reward_function.path)"
                )
        if self.score_errors:
            first = next(iter(self.score_errors))
            yield (
                f"{len(self.score_errors):,} rows cannot be scored (rows "
                f"{_examples(self.score_errors)}); row {first}: {self.score_errors[first]}"
            )

    def warnings(self) -> Iterator[str]:
        if self.without_truth and len(self.without_truth) == sum(self.sources.values()):
            yield (
                "no row has reward_model.ground_truth: only a reward model or a"
                " custom_reward_function can score these"
            )
        if duplicates := [numbers for numbers in self.prompts.values() if len(numbers) > 1]:
            count = sum(len(numbers) - 1 for numbers in duplicates)
            rows = _examples(duplicates[0])
            yield f"{count:,} rows repeat an earlier prompt (such as rows {rows})"

    def summary_lines(self) -> Iterator[str]:
        yield "columns:"
        width = max(map(len, self.columns), default=0)
        for name, kinds in self.columns.items():
            missing_rows = self.rows - sum(kinds.values()) + kinds["null"]
            kinds_text = " or ".join(kind for kind in sorted(kinds) if kind != "null") or "null"
            missing = f", missing in {missing_rows:,}" if missing_rows else ""
            yield f"  {name:<{width}}  {kinds_text}{missing}"
        if self.kind.supervised:
            yield "for supervised training: the rows hold their answers"
        else:
            yield "sources:"
            yield from (f"  {name}: {count:,}" for name, count in self.sources.most_common())
        if self.scores:
            counts = sorted(self.scores.items(), reverse=True)
            parts = [f"{score:g} in {count:,}" for score, count in counts[:MAX_SHOWN]]
            others = len(counts) - MAX_SHOWN
            remainder = f" and {others} values more" if others > 0 else ""
            yield f"score of the ground truth itself: {', '.join(parts)}{remainder} rows"
        yield from histogram(self.lengths, "characters" if self.tokenizer is None else "tokens")


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _examples(numbers: Iterable[int]) -> str:
    names = [str(number) for number in numbers]
    return ", ".join(names if len(names) <= MAX_SHOWN else [*names[:MAX_SHOWN], "…"])


def histogram(lengths: list[int], unit: str, buckets: int = 8) -> list[str]:
    """Formats lengths as a histogram of equal buckets."""
    if not lengths:
        return []
    low, high = min(lengths), max(lengths)
    step = max(-(-(high - low + 1) // buckets), 1)
    counts = Counter((length - low) // step for length in lengths)
    median = sorted(lengths)[len(lengths) // 2]
    lines = [f"prompt length in {unit}: shortest {low:,}, median {median:,}, longest {high:,}"]
    for bucket in range(max(counts) + 1):
        start, count = low + bucket * step, counts[bucket]
        bar = "#" * round(BAR_WIDTH * count / max(counts.values()))
        lines.append(f"  {start:>7,} to {start + step - 1:>7,}  {count:>8,}  {bar}".rstrip())
    return lines
