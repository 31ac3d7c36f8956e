"""Solutions with a label per step, for process reward models.

A solution is encoded as in RL: the policy's prompt, then each step and its separator. The model scores a
step at its separator. A label is the probability that a step is good; steps without a label are context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from hone.config.errors import ConfigError
from hone.config.sft import StepDataConfig
from hone.data.encoded import EncodedDataset, EncodedRow, UntrainableRow, check_row_text
from hone.data.messages import Prompt, PromptError, as_messages, check_message_roles
from hone.data.prompts import RowStore, tokenise, truncate
from hone.data.rows import Files
from hone.text import short_repr
from hone.tokenizer import Tokenizer
from hone.types import Row

MATH_SHEPHERD_STEP_END = "ки"
"""Ends each step in Math-Shepherd's `input`; `label` has + or - instead."""
_FIRST_STEP_HEADING = "Step 1:"
MAX_CACHED_TEXTS = 100_000


@dataclass(frozen=True)
class Solution:
    """A prompt, the steps of one solution and their labels."""

    prompt: Prompt
    steps: list[str]
    labels: list[float | None]
    """Probability that each step is good; None for a step without a label."""


def single_token_id(tokenizer: Tokenizer, text: str, key: str = "data.step_separator") -> int:
    """Returns the token id of a text, which must be one token."""
    text = unescape_newlines(text)
    ids = tokenise(text, tokenizer)
    if len(ids) != 1:
        raise ConfigError(
            f"{key}={text!r} has {len(ids)} tokens with this tokenizer; use a text with one token"
        )
    return ids[0]


class LabelTokens(NamedTuple):
    """The token ids of the two labels, in the order of a classifier's outputs."""

    bad: int
    good: int


@dataclass(frozen=True)
class StepSeparator:
    """The separator tokens after each step, and the token at which the step is scored."""

    tokens: list[int]
    score_index: int  # index in `tokens` of the token after which the step is scored
    label_tokens: LabelTokens | None
    """The labels of a causal model; None for a token classifier."""


def build_step_separator(
    tokenizer: Tokenizer,
    separator: str,
    label_texts: tuple[str, str] | None,
    config_block: str = "data",
) -> StepSeparator:
    """Returns the separator; `label_texts` are (good step, bad step), None for a token classifier."""
    key = f"{config_block}.step_separator"
    if label_texts is None:
        return StepSeparator([single_token_id(tokenizer, separator, key)], 0, None)
    labels_key = f"{config_block}.step_labels"
    good, bad = (single_token_id(tokenizer, label, labels_key) for label in label_texts)
    tokens = tokenise(unescape_newlines(separator), tokenizer)
    nonblank_indices = [i for i, token in enumerate(tokens) if tokenizer.decode([token]).strip()]
    if not tokens or good == bad:
        raise ConfigError(
            f"{key}={separator!r} must not be empty, and {labels_key}={list(label_texts)} must"
            " be two different tokens"
        )
    score_index = nonblank_indices[-1] if nonblank_indices else len(tokens) - 1
    return StepSeparator(tokens, score_index, LabelTokens(bad, good))


def unescape_newlines(text: str) -> str:
    r"""Replaces each backslash followed by n, as typed in a shell, with a line break."""
    return text.replace("\\n", "\n")


class StepDataset(EncodedDataset):
    """Rows in one of the layouts of `data.format`.

    `dataset[i]` is {"input_ids", "loss_mask", "labels", "prompt_tokens"}; the mask is 1 at the
    separators of labelled steps, and `prompt_tokens` is a list with the number of prompt tokens.
    """

    config: StepDataConfig

    def read(self, files: Files) -> RowStore:
        """Reads the files; a row of PRM800K's own layout becomes one row per rated step."""
        config = self.config
        self.separator = build_step_separator(
            self.tokenizer, config.step_separator, config.step_labels
        )
        # The rows of one problem have the same prompt and mostly the same steps.
        self._prompt_ids = lru_cache(MAX_CACHED_TEXTS)(self.render)
        self._step_ids = lru_cache(MAX_CACHED_TEXTS)(self.tokenise)
        store = super().read(files)
        expanded_files, num_unrated = [], 0
        for file in store.files:
            rows: list[Row] = []
            row_numbers: list[int] = []
            for number, row in zip(file.row_numbers, file.scan(), strict=True):
                step_rows = rated_rows = [row]
                if _layout_of(row, config) == "prm800k":
                    step_rows = _split_into_completions(row)
                    # A row without a rating column is kept, and then reported as a bad row.
                    unrated = (None,) if config.neutral_label is not None else (None, 0)
                    rated_rows = [
                        step for step in step_rows if step.get("rating", 1) not in unrated
                    ]
                num_unrated += len(step_rows) - len(rated_rows)
                rows += rated_rows
                row_numbers += [number] * len(rated_rows)
            expanded_files.append(replace(file, content=rows, row_numbers=row_numbers))
        if num_unrated:
            self.bad_rows.counts["no rating"] += num_unrated
            self.bad_rows.examples.append(f"{num_unrated} steps of PRM800K have no rating")
        return RowStore(expanded_files)

    def solution(self, row: Row) -> Solution:
        """Returns the solution of a row; raises PromptError on a bad row."""
        layout = _layout_of(row, self.config)
        if layout is None:
            raise PromptError(
                f"the columns {', '.join(map(str, row))} are not a known layout of labelled steps; "
                "give prompt, completions and labels, or set data.format"
            )
        return LAYOUTS[layout](row, self.config)

    def check(self, row: Row) -> None:
        check_row_text(row)
        solution = self.solution(row)
        check_message_roles(as_messages(solution.prompt))
        if all(label is None for label in solution.labels):
            raise UntrainableRow("nothing to learn", "no step of the row has a label")

    def encode_row(self, row: Row) -> EncodedRow:
        solution = self.solution(row)
        # A list of messages is not hashable, so only text prompts are cached.
        render = self._prompt_ids if isinstance(solution.prompt, str) else self.render
        prompt = render(solution.prompt)
        if not prompt:
            raise PromptError("the prompt is empty")
        ids, mask, labels = list(prompt), [0] * len(prompt), [0.0] * len(prompt)
        for step, label in zip(solution.steps, solution.labels, strict=True):
            tokens, separator = self._step_ids(step.strip()), self.separator
            num_before = len(tokens) + separator.score_index
            num_after = len(separator.tokens) - separator.score_index - 1
            ids += [*tokens, *separator.tokens]
            mask += [*[0] * num_before, int(label is not None), *[0] * num_after]
            labels += [*[0.0] * num_before, label or 0.0, *[0.0] * num_after]
        self.check_length(len(ids))
        length, truncation = self.max_length, self.truncation
        num_dropped_left = max(0, len(ids) - length) if truncation == "left" else 0
        ids, mask = truncate(ids, length, truncation), truncate(mask, length, truncation)
        if 1 not in mask:
            raise UntrainableRow(
                "nothing to learn",
                f"no labelled step is left within data.max_length={length} tokens",
            )
        labels = labels[num_dropped_left:][: len(ids)]
        num_prompt_tokens = min(max(1, len(prompt) - num_dropped_left), mask.index(1) + 1)
        return {
            "input_ids": ids,
            "loss_mask": mask,
            "labels": labels,
            "prompt_tokens": [num_prompt_tokens],
        }


def _layout_of(row: Row, config: StepDataConfig) -> str | None:
    """Returns the configured layout, or by default the layout with the row's columns."""
    if config.format != "auto":
        return config.format
    if config.completions_key in row:
        return "steps"
    if "next_response" in row or isinstance(row.get("question"), Mapping):
        return "prm800k"
    if {"steps", "label"} <= row.keys():
        return "processbench"
    return "math_shepherd" if {"input", "label"} <= row.keys() else None


def _parse_trl(row: Row, config: StepDataConfig) -> Solution:
    """Parses TRL's layout: prompt, completions, labels."""
    labels = _list_column(row, config.labels_key)
    steps = _check_step_texts(_list_column(row, config.completions_key), config.completions_key)
    if len(labels) != len(steps):
        raise PromptError(
            f"{config.completions_key!r} has {len(steps)} steps and {config.labels_key!r} "
            f"{len(labels)} labels; give one label per step (null for none)"
        )
    return Solution(row.get(config.prompt_key), steps, [_parse_label(label) for label in labels])


def _parse_prm800k(row: Row, config: StepDataConfig) -> Solution:
    """Parses a rated step and its context: instruction, responses, next_response, rating."""
    if "next_response" not in row:
        raise PromptError(
            "the row is in neither layout of PRM800K: it has no next_response, and its "
            "question.problem or label.steps is missing or malformed"
        )
    steps = [*_list_column(row, "responses"), row["next_response"]]
    label = _parse_rating(row.get("rating"), config)
    labels: list[float | None] = [*[None] * (len(steps) - 1), label]
    return Solution(row.get("instruction"), _check_step_texts(steps, "responses"), labels)


def _split_into_completions(row: Row) -> list[Row]:
    """Splits a row in PRM800K's own layout into one row per completion of each step."""
    rows: list[Row] = []
    previous_steps: list[str] = []
    try:
        problem = row["question"]["problem"]
        for step in row["label"]["steps"]:
            completions = step["completions"] or ()
            for completion in completions:
                rows.append(
                    {
                        "instruction": problem,
                        "responses": list(previous_steps),
                        "next_response": completion["text"],
                        "rating": completion["rating"],
                    }
                )
            choice, human_completion = step["chosen_completion"], step.get("human_completion")
            if choice is None and not human_completion:
                break
            completion = human_completion if choice is None else completions[choice]
            previous_steps.append(
                completion["text"] if isinstance(completion, Mapping) else completion
            )
    except (KeyError, IndexError, TypeError):
        return [row]
    return rows


def _parse_rating(rating: object, config: StepDataConfig) -> float | None:
    if rating is None:
        return None
    labels = {-1.0: 0.0, 0.0: config.neutral_label, 1.0: 1.0}
    if not isinstance(rating, (int, float)) or rating not in labels:
        raise PromptError(f"'rating' must be -1, 0, 1 or null, got {short_repr(rating)}")
    return labels[rating]


def _parse_math_shepherd(row: Row, config: StepDataConfig) -> Solution:
    """Parses text with MATH_SHEPHERD_STEP_END after each step, and its copy with + or - instead."""
    text, labelled_text = row.get("input"), row.get("label")
    if not isinstance(text, str) or not isinstance(labelled_text, str):
        raise PromptError("'input' and 'label' must be text in the Math-Shepherd layout")
    *step_texts, ending = text.split(MATH_SHEPHERD_STEP_END)
    if not step_texts:
        raise PromptError(f"'input' has no {MATH_SHEPHERD_STEP_END!r}, which ends a step")
    labels: list[float | None] = []
    start = 0
    for number, step_text in enumerate(step_texts, start=1):
        end = start + len(step_text)
        sign = labelled_text[end : end + 1]
        if labelled_text[start:end] != step_text or sign not in ("+", "-"):
            raise PromptError(
                f"'label' differs from 'input' at step {number}; it must have the same text, with "
                f"+ or - in place of each {MATH_SHEPHERD_STEP_END!r}"
            )
        labels.append(float(sign == "+"))
        start = end + 1
    if labelled_text[start:].strip() != ending.strip():
        raise PromptError(f"'label' differs from 'input' after the last {MATH_SHEPHERD_STEP_END!r}")
    prompt, heading, first_step = step_texts[0].partition(_FIRST_STEP_HEADING)
    if not heading:
        raise PromptError(f"'input' has no {_FIRST_STEP_HEADING!r} after the problem")
    steps = _check_step_texts([heading + first_step, *step_texts[1:]], "input")
    return Solution(prompt.strip(), steps, labels)


def _parse_processbench(row: Row, config: StepDataConfig) -> Solution:
    """Parses steps and the index of the first wrong step (-1: none); later steps have no label."""
    steps = _check_step_texts(_list_column(row, "steps"), "steps")
    first_wrong = row.get("label")
    if not isinstance(first_wrong, int) or not -1 <= first_wrong < len(steps):
        raise PromptError(
            f"'label' must be the index of the first wrong of {len(steps)} steps, or -1; got "
            f"{short_repr(first_wrong)}"
        )
    num_correct = len(steps) if first_wrong < 0 else first_wrong
    labels: list[float | None] = [1.0] * num_correct
    if first_wrong >= 0:
        labels += [0.0, *[None] * (len(steps) - first_wrong - 1)]
    return Solution(row.get("problem"), steps, labels)


LAYOUTS: dict[str, Callable[[Row, StepDataConfig], Solution]] = {
    "steps": _parse_trl,
    "prm800k": _parse_prm800k,
    "math_shepherd": _parse_math_shepherd,
    "processbench": _parse_processbench,
}


def _list_column(row: Row, key: str) -> list[Any]:
    value: Any = row.get(key)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise PromptError(f"column {key!r} must be a list, got {short_repr(value)}")
    return list(value)


def _check_step_texts(steps: Sequence[Any], key: str) -> list[str]:
    """Returns the steps; raises PromptError if there is no step or a step is not text."""
    if not steps:
        raise PromptError(f"column {key!r} has no steps")
    for number, step in enumerate(steps):
        if not isinstance(step, str) or not step.strip():
            raise PromptError(
                f"step {number} of {key!r} is not text, or is empty: {short_repr(step)}"
            )
    return list(steps)


def _parse_label(label: object) -> float | None:
    if label is None:
        return None
    if not isinstance(label, (bool, int, float)) or not 0 <= label <= 1 or math.isnan(label):
        raise PromptError(
            f"a label must be true, false, a probability from 0 to 1, or null; got {short_repr(label)}"
        )
    return float(label)
