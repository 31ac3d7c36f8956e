"""Every column of a batch, declared once: shape, type, who writes it, when, and what it means.

`require` reads a column or says who should have written it; `write` adds one, once. Leaves out the
batch itself (hone.protocol): any object with `has_column`, `column` and `set_column` will do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

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

_ALWAYS = "always"
_TOOLS = "an agent loop calls tools or has an interaction"
_READ = "an estimator or a loss reads it"
_CORRECTED = "algorithm.rollout_correction has rollout_is or rollout_rs, without bypass_mode"
_PASS = (
    "old log-probs, entropies or sums of squares are read before the update: more than one update per "
    "batch, KL in the reward, rollout correction, critic_warmup, or an estimator that reads them"
)


def _objects(step: str, when: str, **meanings: str) -> tuple[Column, ...]:
    """Columns of one object per row."""
    return tuple(Column(name, _B, "object", step, when, text) for name, text in meanings.items())


_DECLARED = (
    # what a data row brings
    *_objects(
        "prompts",
        _ALWAYS,
        uid="names the prompt; its responses are a group",
        data_source="which data set; picks the scorer",
        reward_model="how to score: style, ground_truth",
        extra_info="whatever else the row brought",
        raw_prompt="the prompt as chat messages, or as text",
        prompt_ids="the prompt as token ids, no padding",
        index="the row's index in its data set",
        dataset_index="where the row stands among the rows that were kept",
        agent_name="which agent loop plays this row; None is the default loop",
        tools_kwargs="arguments for each tool",
        interaction_kwargs="arguments for the environment that answers",
    ),
    *_objects("prompts", "the data has it", ability="kind of task"),
    *_objects(
        "prompts", "the data has images, video or audio", multi_modal_data="media of the prompt"
    ),
    # what a trajectory is
    *_objects(
        "generate",
        _ALWAYS,
        trajectory_id="names the attempt; its rows are one trajectory",
        sample_index="which response of its group this is",
        seed="sampling seed of the response",
        num_turns="messages of the conversation: the prompt, the model's and what answered it",
        stop_reason="why generation ended",
        versions="weights version that wrote each token, a list; None where a loop does not say",
    ),
    Column("prompts", "[B, P]", "int", "generate", _ALWAYS, "prompt ids, left-padded"),
    Column("responses", _BT, "int", "generate", _ALWAYS, "response ids, right-padded"),
    Column("response_mask", _BT, "mask", "generate", _ALWAYS, "1 where the policy wrote the token"),
    Column("attention_mask", _BPT, "mask", "generate", _ALWAYS, "1 where there is a token"),
    Column("input_ids", _BPT, "int", "generate", _READ, "prompts then responses"),
    Column("position_ids", _BPT, "int", "generate", _READ, "each token's position, from 0"),
    Column(
        "rollout_log_probs",
        _BT,
        "float",
        "generate",
        "actor_rollout_ref.rollout.calculate_log_probs=True and the agent loops return them",
        "log-prob of each token as the rollout engine sampled it",
    ),
    Column(
        "reward/agent",
        _BT,
        "float",
        "generate",
        "an agent loop scores its trajectory",
        "reward part 'agent': the loop's own score, on the last token of the policy",
    ),
    *_objects(
        "generate",
        _TOOLS,
        tool_outputs="what tools answered",
        tool_rewards="what tools scored",
        turn_scores="what the interaction scored, turn by turn",
        timeouts="waits that were cut off",
        tool_call_counts="how many calls the policy made",
        tool_failures="how many calls and answers failed",
        reward_scores="score of the trajectory by each tool and interaction",
        turn_spans="role, tokens, tool calls and score of each turn, in order",
    ),
    # what it was worth
    *_objects(
        "score", _ALWAYS, reward_failure="why the row could not be scored; None where it was"
    ),
    Column(
        "rm_scores",
        _BT,
        "float",
        "score",
        "reward_model.enable=True and reward_model.type=orm",
        "the reward model's score, on the last token of the policy",
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
        "token_level_scores", _BT, "float", "score", _ALWAYS, "configured sum of the reward parts"
    ),
    Column(
        "reward_baselines",
        _B,
        "float",
        "score",
        "an estimator reads it (remax)",
        "score of the greedy response to the same prompt",
    ),
    # what the models say about it
    Column(
        "old_log_probs",
        _BT,
        "float",
        "log_probs",
        f"bypass_mode, or {_PASS}",
        "log-prob of each token before the update",
    ),
    Column(
        "entropys",
        _BT,
        "float",
        "log_probs",
        _PASS,
        "policy entropy at each token before the update",
    ),
    Column(
        "sum_pi_squared",
        _BT,
        "float",
        "log_probs",
        "an estimator reads it (optimal_token_baseline), or actor.calculate_sum_pi_squared=True",
        "sum of squared token probabilities at each position",
    ),
    Column(
        "ref_log_prob",
        _BT,
        "float",
        "ref_log_probs",
        "algorithm.use_kl_in_reward=True, actor_rollout_ref.actor.use_kl_loss=True, or an estimator or "
        "a loss reads it",
        "log-prob of each token under the reference",
    ),
    Column(
        "values",
        _BT,
        "float",
        "values",
        "an estimator reads it (gae), or critic.enable=True",
        "critic estimate before each token",
    ),
    # what follows from it
    Column(
        "token_level_rewards", _BT, "float", "advantages", _ALWAYS, "scores after KL and shaping"
    ),
    Column("advantages", _BT, "float", "advantages", _ALWAYS, "how much better than expected"),
    Column("returns", _BT, "float", "advantages", _ALWAYS, "what the critic should have said"),
    Column(
        "loss_mask",
        _BT,
        "mask",
        "advantages",
        _CORRECTED,
        "tokens the policy loss reads where they are not those of response_mask",
    ),
    Column(
        "rollout_is_weights",
        _BT,
        "float",
        "advantages",
        "algorithm.rollout_correction.rollout_is is set, without bypass_mode",
        "importance weight of each token, trainer over rollout",
    ),
    Column(
        "step_row",
        _B,
        "int",
        "advantages",
        _ALWAYS,
        "the row's number in the step before ranks share the rows: mini-batches are drawn over it",
    ),
    # what the controller adds on the way to a worker, and takes off again
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


def reward_column(part: str) -> str:
    """The name of a reward part's column: reward_column("rule") is "reward/rule"."""
    if not part or "/" in part:
        raise ValueError(f"a reward part is a plain word, not {part!r}")
    return REWARD_PREFIX + part


def declared(name: str) -> Column | None:
    """The declaration of `name`; a `reward/<part>` needs none of its own."""
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
    return column is None or column.step == "prompts"


def require(batch: DataProto, name: str) -> Tensor:
    """The tensor column, or MissingColumn with the sentence that says who should have written it."""
    if batch.has_column(name):
        values: Tensor = batch.column(name)
        return values
    column = declared(name)
    if column is not None:
        raise MissingColumn(column.absence(), name)
    close = difflib.get_close_matches(name, [*COLUMNS, *batch.column_names()], n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise MissingColumn(
        f"batch has no {name!r}, and no step declares it.{hint} It has {batch.column_names()}", name
    )


def write(batch: DataProto, name: str, value: Tensor | np.ndarray) -> None:
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


def adopt(batch: DataProto, result: DataProto, names: Iterable[str] | None = None) -> None:
    """Write the columns that a worker returned, or those of them that are named."""
    kept = result.column_names() if names is None else [n for n in names if result.has_column(n)]
    for name in kept:
        write(batch, name, result.column(name))


def _mismatch(column: Column, value: Tensor | np.ndarray) -> str | None:
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
