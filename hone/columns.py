"""Every column of a batch, declared once: shape, type, who writes it, when, and what it means.

`require` reads a column or says who should have written it; `write` adds one, once. Leaves out the
batch itself (hone.protocol): any object with `has_column`, `column` and `set_column` will do.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hone.protocol import DataProto

REWARD_PREFIX = "reward/"


@dataclass(frozen=True)
class Column:
    """One column: B rows, P prompt positions, T response positions."""

    name: str
    shape: str
    """For example "[B, T]"."""
    dtype: str
    """float, int, mask (0 or 1 in any type) or object (a numpy column)."""
    step: str
    """The step of the loop that writes it."""
    when: str
    """When that step runs, or when it writes this column; "always" or a condition on the config."""
    meaning: str

    @property
    def dims(self) -> int:
        return self.shape.count(",") + 1

    def absence(self) -> str:
        """The sentence that says who should have written it."""
        run = "every step" if self.when == "always" else f"when {self.when}"
        return (
            f"batch has no {self.name!r} ({self.meaning}): step {self.step!r} writes it; "
            f"it runs {run}"
        )


class MissingColumn(KeyError):
    """A step reads a column that no step before it wrote."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.message, self.name = message, name

    def __str__(self) -> str:  # KeyError would quote the sentence
        return self.message

    def __reduce__(self) -> tuple[type[MissingColumn], tuple[str, str]]:
        return type(self), (self.message, self.name)


class ColumnWrittenTwice(ValueError):
    """Two steps write the same column."""


_B, _BT, _BPT = "[B]", "[B, T]", "[B, P+T]"

_DECLARED = (
    # what a data row brings
    Column("uid", _B, "object", "prompts", "always", "names the prompt; its responses are a group"),
    Column("data_source", _B, "object", "prompts", "always", "which data set; picks the scorer"),
    Column("reward_model", _B, "object", "prompts", "always", "how to score: style, ground_truth"),
    Column("extra_info", _B, "object", "prompts", "always", "whatever else the row brought"),
    Column("raw_prompt", _B, "object", "prompts", "always", "the prompt as chat messages"),
    Column(
        "raw_prompt_ids", _B, "object", "prompts", "always", "the prompt as token ids, no padding"
    ),
    Column(
        "full_prompts",
        _B,
        "object",
        "prompts",
        "data.return_full_prompt=True",
        "the prompt as text after the chat template",
    ),
    Column("ability", _B, "object", "prompts", "the data set has it", "kind of task"),
    Column("index", _B, "object", "prompts", "always", "the row's index in its data set"),
    Column("agent_name", _B, "object", "prompts", "always", "which agent loop plays this row"),
    Column(
        "tools_kwargs", _B, "object", "prompts", "the data set has it", "arguments for each tool"
    ),
    Column(
        "interaction_kwargs",
        _B,
        "object",
        "prompts",
        "the data set has it",
        "arguments for the environment that answers",
    ),
    Column(
        "multi_modal_data",
        _B,
        "object",
        "prompts",
        "the data set has images, video or audio",
        "media of the prompt",
    ),
    Column(
        "multi_modal_inputs",
        _B,
        "object",
        "generate",
        "the data set has images, video or audio",
        "media as the model's processor made them",
    ),
    # what a trajectory is
    Column(
        "trajectory_id",
        _B,
        "object",
        "generate",
        "always",
        "names the attempt; its rows are one trajectory",
    ),
    Column(
        "sample_index", _B, "object", "generate", "always", "which response of its group this is"
    ),
    Column("prompts", "[B, P]", "int", "generate", "always", "prompt ids, left-padded"),
    Column("responses", _BT, "int", "generate", "always", "response ids, right-padded"),
    Column(
        "response_mask", _BT, "mask", "generate", "always", "1 where the policy wrote the token"
    ),
    Column("input_ids", _BPT, "int", "generate", "always", "prompts then responses"),
    Column("attention_mask", _BPT, "mask", "generate", "always", "1 where there is a token"),
    Column("position_ids", _BPT, "int", "generate", "always", "each token's position, from 0"),
    Column(
        "rollout_log_probs",
        _BT,
        "float",
        "generate",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "log-prob of each token as the rollout engine sampled it",
    ),
    Column("versions", _BT, "int", "generate", "always", "weights version that wrote each token"),
    Column("seed", _B, "object", "generate", "always", "sampling seed of the response"),
    Column("num_turns", _B, "object", "generate", "always", "model completions in the trajectory"),
    Column("__num_turns__", _B, "object", "generate", "always", "num_turns, by the family's name"),
    Column("stop_reason", _B, "object", "generate", "always", "why generation ended"),
    Column("request_id", _B, "object", "generate", "always", "the request at the rollout engine"),
    Column(
        "tool_outputs", _B, "object", "generate", "an agent loop calls tools", "what tools answered"
    ),
    Column(
        "tool_rewards", _B, "object", "generate", "an agent loop calls tools", "what tools scored"
    ),
    Column(
        "turn_scores",
        _B,
        "object",
        "generate",
        "an agent loop has an interaction",
        "what the interaction scored, turn by turn",
    ),
    Column(
        "reward_scores",
        _B,
        "object",
        "generate",
        "an agent loop calls tools or has an interaction",
        "score of the trajectory by each tool and interaction",
    ),
    Column(
        "turn_spans",
        _B,
        "object",
        "generate",
        "an agent loop has turns",
        "role, tokens, tool calls and score of each turn, in order",
    ),
    Column(
        "timeouts", _B, "object", "generate", "an agent loop calls tools", "waits that were cut off"
    ),
    # what it was worth
    Column(
        "rm_scores",
        _BT,
        "float",
        "score",
        "reward_model.enable=True or an agent loop scores",
        "reward model's score, on the last token",
    ),
    Column(
        "step_mask",
        _BT,
        "mask",
        "score",
        "reward_model.type=prm",
        "where a reasoning step ends: the process reward model judges it there",
    ),
    Column(
        "token_level_scores", _BT, "float", "score", "always", "configured sum of the reward parts"
    ),
    Column(
        "reward_baselines",
        _B,
        "float",
        "score",
        "algorithm.adv_estimator=remax",
        "score of the greedy response to the same prompt",
    ),
    # what the models say about it
    Column(
        "old_log_probs",
        _BT,
        "float",
        "log_probs",
        "always",
        "log-prob of each token before the update",
    ),
    Column(
        "entropys",
        _BT,
        "float",
        "log_probs",
        "always",
        "policy entropy at each token before the update",
    ),
    Column(
        "sum_pi_squared",
        _BT,
        "float",
        "log_probs",
        "algorithm.adv_estimator=optimal_token_baseline",
        "sum of squared token probabilities at each position",
    ),
    Column(
        "ref_log_prob",
        _BT,
        "float",
        "ref_log_probs",
        "algorithm.use_kl_in_reward=True or actor_rollout_ref.actor.use_kl_loss=True",
        "log-prob of each token under the reference",
    ),
    Column(
        "values",
        _BT,
        "float",
        "values",
        "algorithm.adv_estimator=gae",
        "critic estimate before each token",
    ),
    # what follows from it
    Column(
        "token_level_rewards",
        _BT,
        "float",
        "advantages",
        "always",
        "scores after KL and shaping",
    ),
    Column("advantages", _BT, "float", "advantages", "always", "how much better than expected"),
    Column("returns", _BT, "float", "advantages", "always", "what the critic should have said"),
    Column(
        "loss_mask",
        _BT,
        "mask",
        "advantages",
        "always",
        "tokens the policy loss reads: response_mask, narrowed by correction and filters",
    ),
    Column(
        "rollout_is_weights",
        _BT,
        "float",
        "advantages",
        "algorithm.rollout_correction.rollout_is is set",
        "importance weight of each token, trainer over rollout",
    ),
    Column(
        "step_row",
        _B,
        "int",
        "advantages",
        "always",
        "the row's number in the step before ranks share the rows: mini-batches are drawn over it",
    ),
    # what the controller adds on the way to a worker
    Column(
        "padded_row",
        _B,
        "mask",
        "dispatch",
        "a batch does not divide over the ranks",
        "1 for a row added to even out the ranks: leave it out of means",
    ),
)

COLUMNS: dict[str, Column] = {column.name: column for column in _DECLARED}


def declare(column: Column) -> None:
    """Add a column of your own; a name has one meaning."""
    known = COLUMNS.get(column.name)
    if known is not None and known != column:
        raise ValueError(
            f"column {column.name!r} is declared already: {known.meaning} (step {known.step!r}); "
            "choose another name"
        )
    COLUMNS[column.name] = column


def reward_column(part: str) -> str:
    """The name of a reward part's column: reward_column("rule") is "reward/rule"."""
    if not part or "/" in part:
        raise ValueError(f"a reward part is a plain word, not {part!r}")
    return REWARD_PREFIX + part


def declared(name: str) -> Column | None:
    """The declaration of `name`; every `reward/<part>` is declared by its family."""
    if name in COLUMNS:
        return COLUMNS[name]
    if name.startswith(REWARD_PREFIX) and len(name) > len(REWARD_PREFIX):
        part = name.removeprefix(REWARD_PREFIX)
        when = f"the reward part {part!r} is configured"
        return Column(name, _BT, "float", "score", when, f"reward part {part!r}, token by token")
    return None


def row_may_bring(name: str) -> bool:
    """Whether a data row may have this column: undeclared, or declared as what rows bring."""
    column = declared(name)
    return column is None or column.step == "prompts" or name == "multi_modal_inputs"


def require(batch: DataProto, name: str) -> Any:
    """The column, or MissingColumn with the sentence that says who should have written it."""
    if batch.has_column(name):
        return batch.column(name)
    column = declared(name)
    if column is not None:
        raise MissingColumn(column.absence(), name)
    close = difflib.get_close_matches(name, [*COLUMNS, *batch.column_names()], n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise MissingColumn(
        f"batch has no {name!r}, and no step declares it.{hint} It has {batch.column_names()}", name
    )


def write(batch: DataProto, name: str, value: Any) -> None:
    """Add a column to the batch, in place; a column is written once."""
    column = declared(name)
    if batch.has_column(name):
        writer = f" by step {column.step!r}" if column else ""
        raise ColumnWrittenTwice(
            f"column {name!r} is written already{writer}; a column is written once: "
            "write yours under another name"
        )
    if column is not None:
        problem = _mismatch(column, value)
        if problem:
            raise ValueError(
                f"column {name!r} ({column.meaning}) is {column.dtype} {column.shape}; {problem}"
            )
    batch.set_column(name, value)


def reward_parts(batch: DataProto) -> dict[str, Any]:
    """Every reward part in the batch, by its plain name."""
    return {
        name.removeprefix(REWARD_PREFIX): batch.column(name)
        for name in batch.column_names()
        if name.startswith(REWARD_PREFIX)
    }


def _mismatch(column: Column, value: Any) -> str | None:
    if column.dtype == "object":
        return None if isinstance(value, np.ndarray) else f"got a {type(value).__name__}"
    if isinstance(value, np.ndarray) or not hasattr(value, "is_floating_point"):
        return f"got a {type(value).__name__}, not a tensor"
    many_axes = column.name == "position_ids" and value.ndim == 3  # one position for each rope axis
    if value.ndim != column.dims and not many_axes:
        return f"got shape {tuple(value.shape)}"
    floating = value.is_floating_point()
    if (column.dtype == "float" and not floating) or (column.dtype == "int" and floating):
        return f"got {value.dtype}"
    return None
