"""`hone data check FILE`: reports the content of a data file, errors (exit status 1) and warnings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from hone.config.data import DataConfig
from hone.config.preference import PreferenceDataConfig
from hone.config.rollout import BUILT_IN_LOOPS
from hone.config.sft import MultiTurnDataConfig, SFTDataConfig
from hone.data.chat_template import BrokenTemplate
from hone.data.encoded import check_row_text
from hone.data.labelled import check_labelled, read_labelled
from hone.data.messages import Prompt, PromptError, PromptTooLong, as_messages, content_text
from hone.data.pairs import check_pair, read_pair
from hone.data.prompt_ids import render_prompt
from hone.data.prompts import FileRows, RowStore
from hone.data.reading import read_file, to_verl_schema
from hone.data.rows import BadRowPolicy, DataError
from hone.data.schema import Problem, SchemaCheck, json_type
from hone.text import short_repr
from hone.tokenizer import Tokenizer
from hone.types import Row

MAX_SHOWN_EXAMPLES = 5
MAX_LENGTH_FACTOR = 8
"""Prompts longer than this multiple of data.max_prompt_length are not tokenised completely."""
MESSAGES_COLUMN = MultiTurnDataConfig.messages_key
_RESPONSE_COLUMNS = ("response", SFTDataConfig.response_key)
_ANSWER_COLUMNS = {*_RESPONSE_COLUMNS, "chosen", "rejected"}
_COMPARED_COLUMNS = (*sorted(_ANSWER_COLUMNS), "completion", "label", MESSAGES_COLUMN)
"""The columns in which supervised rows with one prompt may differ."""
BAR_WIDTH = 40
_PREFERENCES = PreferenceDataConfig()
ScoreGroundTruth = Callable[[Row], float | str]
"""Returns the score of a row whose response is the ground truth, or the scorer's error message."""


@dataclass(frozen=True)
class FileKind:
    """The kind of a data file, recognized by its columns."""

    config: DataConfig  # the data config, with `prompt_key` set to the prompt column of the file
    is_supervised: bool  # whether the rows contain the answers, so that no scorer is needed
    response_key: str | None  # the response column of a supervised file without conversations
    read_preference: Callable[[Row], Prompt] | None = None
    """Returns the prompt of a row of preferences; raises PromptError on a bad row."""


def kind_of_file(
    columns: Collection[str], config: DataConfig, *, is_scored: bool = False
) -> FileKind:
    """Returns the kind of a file with these columns; with `is_scored`, the rows are not supervised."""
    names, prompt_key = set(columns), config.prompt_key
    if not is_scored and (read_preference := _preference_reader(names)) is not None:
        return FileKind(config, True, None, read_preference)
    has_reward = is_scored or bool(names & {"reward_model", config.reward_fn_key})
    has_answers = bool(names & _ANSWER_COLUMNS) and not has_reward
    if prompt_key not in names and not is_scored:
        if MESSAGES_COLUMN in names:
            prompt_key = MESSAGES_COLUMN
        elif has_answers and SFTDataConfig.prompt_key in names:
            prompt_key = SFTDataConfig.prompt_key
    response_key = next((name for name in _RESPONSE_COLUMNS if name in names), None)
    has_response = has_answers and prompt_key != MESSAGES_COLUMN
    return FileKind(
        dataclasses.replace(config, prompt_key=prompt_key),
        is_supervised=not is_scored and (prompt_key == MESSAGES_COLUMN or has_answers),
        response_key=response_key if has_response else None,
    )


def _preference_reader(columns: Collection[str]) -> Callable[[Row], Prompt] | None:
    """Returns the reader of pairs or of labelled responses; None if the columns are of another file."""
    names, config = set(columns), _PREFERENCES
    if {config.chosen_key, config.rejected_key} <= names:
        return _read_pair
    if config.label_key in names and names & {config.completion_key, MESSAGES_COLUMN}:
        return _read_labelled
    return None


def _read_pair(row: Row) -> Prompt:
    check_row_text(row)
    pair = read_pair(row, _PREFERENCES)
    check_pair(pair)
    return pair.prompt


def _read_labelled(row: Row) -> Prompt:
    check_row_text(row)
    response = read_labelled(row, _PREFERENCES)
    check_labelled(response)
    return response.prompt


def check_file(
    path: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    is_known_source: Callable[[str], bool] | None = None,
    known_loops: Collection[str] = BUILT_IN_LOOPS,
    config: DataConfig | None = None,
    score: ScoreGroundTruth | None = None,
    max_prompt_length: int | None = None,
) -> tuple[int, str]:
    """Returns (exit status, report); overlong prompts are errors if `max_prompt_length` is given."""
    config = config or DataConfig()
    if max_prompt_length is not None:
        config = dataclasses.replace(config, max_prompt_length=max_prompt_length)
    path = os.path.expanduser(os.fspath(path))
    if not os.path.isfile(path):
        reason = "is a folder; name its files" if os.path.isdir(path) else "does not exist"
        return 1, f"error: {path} {reason}"
    bad_rows = BadRowPolicy("skip")
    try:
        file = read_file(path, bad_rows)
        if file is None:
            return 1, "\n".join(f"error: {message}" for message in bad_rows.examples)
        if score is not None:  # the rows are for RL, and may have PURE's layout
            (file,) = to_verl_schema(RowStore([file]), config.prompt_key).files
        kind = kind_of_file(next(iter(file.scan()), {}), config, is_scored=score is not None)
        check = _Check(kind, known_loops, tokenizer, score, bad_rows)
        check.check_rows(file)
    except (DataError, BrokenTemplate) as error:
        return 1, f"error: {error}"
    errors, warnings = [*check.errors(is_known_source)], [*check.warnings()]
    if tokenizer is not None and check.overlong_rows:
        message = (
            f"{len(check.overlong_rows):,} prompts have more than data.max_prompt_length="
            f"{config.max_prompt_length} tokens (rows {_format_numbers(check.overlong_rows)})"
        )
        if max_prompt_length is None:
            warnings.append(message)
        else:
            errors.append(message)
    bad_rows_text = f" ({_plural(bad_rows.total, 'bad row')})" if bad_rows.total else ""
    report = [
        f"{file.path}: {check.num_rows:,} rows",
        *check.summary_lines(),
        *(f"warning: {message}" for message in warnings),
        *(f"error: {message}" for message in errors),
        *(f"  {message}" for message in bad_rows.examples[:MAX_SHOWN_EXAMPLES]),
        f"{_plural(len(errors), 'error')}{bad_rows_text}, {_plural(len(warnings), 'warning')}",
    ]
    return (1 if errors else 0), "\n".join(report)


@dataclass
class _Check:
    """Checks the rows of one file and collects counts, errors and warnings."""

    kind: FileKind
    known_loops: Collection[str]
    tokenizer: Tokenizer | None
    score: ScoreGroundTruth | None
    bad_rows: BadRowPolicy
    num_rows: int = 0
    types_by_column: dict[str, Counter[str]] = field(default_factory=dict)
    """Number of rows by column and JSON type."""
    source_counts: Counter[str] = field(default_factory=Counter)
    rule_source_counts: Counter[str] = field(default_factory=Counter)
    """Number of rows that need a rule-based scorer, by data source."""
    lengths: list[int] = field(default_factory=list)
    score_counts: Counter[float] = field(default_factory=Counter)
    """Number of rows by score of the ground truth."""
    score_errors: dict[int, str] = field(default_factory=dict)  # errors of the scorer by row number
    rows_by_prompt: dict[str, list[int]] = field(default_factory=dict)
    """Row numbers by hash of the prompt."""
    overlong_rows: list[int] = field(default_factory=list)
    rows_without_truth: list[int] = field(default_factory=list)

    def check_rows(self, file: FileRows) -> None:
        config = self.kind.config
        schema = SchemaCheck(config.prompt_key, config.prompt_format)
        for index, row in enumerate(file.scan()):
            self.num_rows += 1
            for name, value in row.items():
                self.types_by_column.setdefault(name, Counter())[json_type(value)] += 1
            prompt = self._prompt(row, schema)
            if isinstance(prompt, Problem):
                self.bad_rows.report(prompt.reason, f"{file.where(index)}: {prompt}")
                continue
            number = int(file.row_numbers[index])
            self.rows_by_prompt.setdefault(self._prompt_hash(row, prompt), []).append(number)
            if not self.kind.is_supervised:
                self._check_reward(row, number)
            try:
                self.lengths.append(self._prompt_length(prompt))
                if self.lengths[-1] > config.max_prompt_length:
                    self.overlong_rows.append(number)
            except PromptTooLong:
                self.overlong_rows.append(number)
            except PromptError as error:
                self.bad_rows.report("cannot be rendered", f"{file.where(index)}: {error}")

    def _prompt(self, row: Row, schema: SchemaCheck) -> Prompt | Problem:
        """Returns the prompt of a row, or the first problem of the row."""
        if self.kind.read_preference is not None:
            try:
                return self.kind.read_preference(row)
            except PromptError as error:
                return Problem(getattr(error, "reason", "not in the schema"), str(error))
        problem = schema.problem(row) or self._target_problem(row) or self._loop_problem(row)
        prompt: Prompt = row.get(self.kind.config.prompt_key)
        return problem or prompt

    def _target_problem(self, row: Row) -> Problem | None:
        """Returns the problem of a supervised row that has nothing to train on, or None."""
        if not self.kind.is_supervised:
            return None
        if self.kind.config.prompt_key == MESSAGES_COLUMN:
            if any(message["role"] == "assistant" for message in as_messages(row[MESSAGES_COLUMN])):
                return None
            message = f"column {MESSAGES_COLUMN!r} has no assistant turn, so nothing to learn"
            return Problem("no assistant turn", message)
        key = self.kind.response_key
        value_type = json_type(row.get(key)) if key is not None else "text"
        if value_type == "null":
            return Problem("missing response", f"column {key!r} is missing: nothing to learn")
        if value_type != "text":
            return Problem("wrong type", f"column {key!r} must be text, got {value_type}")
        return None

    def _loop_problem(self, row: Row) -> Problem | None:
        """Returns the problem of a row that names an unknown agent loop, or None."""
        name = row.get("agent_name")
        if not name or self.kind.is_supervised or name in self.known_loops:
            return None
        hint = f"use {', '.join(self.known_loops)}, or name your own with --agent-loop"
        if ":" in name or "/" in name:
            hint = "a row must give the name of a loop, not its import path"
        return Problem("unknown agent loop", f"agent_name={short_repr(name)} is not known: {hint}")

    def _check_reward(self, row: Row, number: int) -> None:
        source = str(row.get(self.kind.config.reward_fn_key))
        self.source_counts[source] += 1
        reward = row.get("reward_model") or {}
        if reward.get("style") == "model":
            return
        self.rule_source_counts[source] += 1
        if self.score is not None:
            score = self.score(row)
            if isinstance(score, str):
                self.score_errors[number] = score
            else:
                self.score_counts[score] += 1
            return
        has_tests = bool((row.get("extra_info") or {}).get("test_cases"))
        if reward.get("ground_truth") in (None, "") and not has_tests:
            self.rows_without_truth.append(number)

    def _prompt_hash(self, row: Row, prompt: Prompt) -> str:
        """Returns a hash of the prompt, its images and, in supervised rows, its answers."""
        config = self.kind.config
        images = row.get(config.image_key)
        image_names = [
            image.get("path") or hash(image.get("bytes")) if isinstance(image, dict) else image
            for image in (images if isinstance(images, list) else ())
        ]
        answers = [row.get(name) for name in _COMPARED_COLUMNS if self.kind.is_supervised]
        content = [prompt, image_names, answers]
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _prompt_length(self, prompt: Prompt) -> int:
        """Returns the number of tokens, or of characters without a tokenizer."""
        config = self.kind.config
        if self.tokenizer is not None:
            ids = render_prompt(
                prompt,
                self.tokenizer,
                config.prompt_format,
                template_kwargs=config.apply_chat_template_kwargs,
                max_tokens=MAX_LENGTH_FACTOR * config.max_prompt_length,
            )
            return len(ids)
        return sum(len(content_text(message["content"])) for message in as_messages(prompt))

    def errors(self, is_known_source: Callable[[str], bool] | None) -> Iterator[str]:
        for reason, count in sorted(self.bad_rows.counts.items()):
            yield f"{count:,} rows: {reason}"
        if 0 < len(self.rows_without_truth) < self.rule_source_counts.total():
            yield (
                f"{len(self.rows_without_truth):,} rows have no reward_model.ground_truth"
                f" (rows {_format_numbers(self.rows_without_truth)}), but other rows of a rule do"
            )
        if is_known_source is not None:
            unknown_sources = [
                repr(name) for name in sorted(self.rule_source_counts) if not is_known_source(name)
            ]
            if unknown_sources:
                yield (
                    f"no scorer knows data_source {', '.join(unknown_sources)}; rename it, or name"
                    " your score function: --reward FILE.py (in a run, custom_reward_function.path)"
                )
        if self.score_errors:
            number, message = next(iter(self.score_errors.items()))
            yield (
                f"{len(self.score_errors):,} rows cannot be scored (rows "
                f"{_format_numbers(self.score_errors)}); row {number}: {message}"
            )

    def warnings(self) -> Iterator[str]:
        if 0 < len(self.rows_without_truth) == self.rule_source_counts.total():
            rows = "row" if self.rule_source_counts == self.source_counts else "row of a rule"
            yield (
                f"no {rows} has reward_model.ground_truth: only a reward model or a"
                " custom_reward_function can score these rows"
            )
        duplicates = [numbers for numbers in self.rows_by_prompt.values() if len(numbers) > 1]
        if duplicates:
            count = sum(len(numbers) - 1 for numbers in duplicates)
            rows = _format_numbers(duplicates[0])
            yield f"{count:,} rows repeat an earlier prompt (such as rows {rows})"

    def summary_lines(self) -> Iterator[str]:
        yield "columns:"
        width = max(map(len, self.types_by_column), default=0)
        for name, type_counts in self.types_by_column.items():
            missing_rows = self.num_rows - sum(type_counts.values()) + type_counts["null"]
            types = " or ".join(name for name in sorted(type_counts) if name != "null") or "null"
            missing = f", missing in {missing_rows:,}" if missing_rows else ""
            yield f"  {name:<{width}}  {types}{missing}"
        if self.kind.read_preference is not None:
            loss = "" if self.kind.read_preference is _read_pair else " algorithm.loss_type=kto"
            yield f"for training on preferences: hone dpo{loss}"
        elif self.kind.is_supervised:
            yield "for supervised training: the rows contain the answers"
        else:
            yield "sources:"
            yield from (f"  {name}: {count:,}" for name, count in self.source_counts.most_common())
        if self.score_counts:
            counts = sorted(self.score_counts.items(), reverse=True)
            texts = [f"{score:g} in {count:,}" for score, count in counts[:MAX_SHOWN_EXAMPLES]]
            num_others = len(counts) - MAX_SHOWN_EXAMPLES
            remainder = f", and {num_others} other scores" if num_others > 0 else ""
            yield f"scores when the ground truth is the response: {', '.join(texts)} rows{remainder}"
        yield from histogram(self.lengths, "characters" if self.tokenizer is None else "tokens")


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _format_numbers(numbers: Iterable[int]) -> str:
    texts = [str(number) for number in numbers]
    if len(texts) > MAX_SHOWN_EXAMPLES:
        texts[MAX_SHOWN_EXAMPLES:] = ["…"]
    return ", ".join(texts)


def histogram(lengths: list[int], unit: str, num_buckets: int = 8) -> list[str]:
    """Formats prompt lengths as a histogram with equally wide buckets."""
    if not lengths:
        return []
    low, high = min(lengths), max(lengths)
    bucket_size = max(-(-(high - low + 1) // num_buckets), 1)
    counts = Counter((length - low) // bucket_size for length in lengths)
    median = sorted(lengths)[len(lengths) // 2]
    lines = [f"prompt length in {unit}: shortest {low:,}, median {median:,}, longest {high:,}"]
    for bucket in range(max(counts) + 1):
        start, count = low + bucket * bucket_size, counts[bucket]
        bar = "#" * round(BAR_WIDTH * count / max(counts.values()))
        lines.append(f"  {start:>7,} to {start + bucket_size - 1:>7,}  {count:>8,}  {bar}".rstrip())
    return lines
