"""Declares every column of a batch: its shape, dtype and meaning, and the phase of a step that writes it.

`require` reads a column and raises if it is missing; `write` adds a column and raises if it exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hone.suggestions import suggestion

if TYPE_CHECKING:
    from torch import Tensor

    from hone.protocol import DataProto

REWARD_PREFIX = "reward/"
REWARD_PARTS = ("agent", "rule", "model", "process")
"""The parts of a score: agent loop, rule, reward model and process reward model."""
_ALWAYS = "always"


@dataclass(frozen=True)
class Column:
    """One column: B rows, P prompt positions, T response positions, L MoE layers, k experts per token."""

    name: str
    shape: str
    """For example "[B, T]"."""
    dtype: str
    """float, int, mask (0 or 1 in any type) or object (a numpy column)."""
    phase: str
    """The phase of the training loop that writes the column."""
    when: str
    """"always", or the condition on the config under which the phase writes the column."""
    meaning: str

    @property
    def ndim(self) -> int:
        """The number of dimensions in `shape`."""
        return self.shape.count(",") + 1


class MissingColumn(KeyError):
    """A phase reads a column that no earlier phase has written."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message, name)  # two arguments, so that the error can be pickled
        self.message, self.name = message, name

    def __str__(self) -> str:
        return self.message


class ColumnWrittenTwice(ValueError):
    """Two phases write the same column."""


_LOG_PROB_CONDITION = (
    "old log-probs, entropies or sums of squares are read before the update: more than one update per "
    "batch, KL in the reward, rollout correction, critic_warmup, or an estimator that reads them"
)


_DECLARATIONS = {  # {(phase, when): one line per column}
    ("prompts", _ALWAYS): """
        uid object [B]: id of the prompt; the responses with the same uid are a group
        data_source object [B]: name of the data set, which selects the scorer
        reward_model object [B]: style and ground_truth, for the scorer
        extra_info object [B]: other fields of the data row
        raw_prompt object [B]: the prompt as chat messages or as text
        prompt_ids object [B]: the prompt as token ids, without padding
        index object [B]: the row's index in its data set
        dataset_index object [B]: the row's index after filtering
        agent_name object [B]: name of the row's agent loop; None is the default loop
        tools_kwargs object [B]: arguments of each tool
        interaction_kwargs object [B]: arguments of the interaction
        tool_config object [B]: the row's own tools, their format and limits
    """,
    ("prompts", "the data has it"): "ability object [B]: kind of task",
    ("prompts", "the data has images, video or audio"): """
        multi_modal_data object [B]: media of the prompt
    """,
    ("generate", _ALWAYS): """
        trajectory_id object [B]: id of the trajectory, which may have several rows
        sample_index object [B]: index of the response in its group
        seed object [B]: sampling seed of the response
        num_turns object [B]: number of messages in the conversation, the prompt included
        stop_reason object [B]: why generation ended
        versions object [B]: list of the weights version of each token, or None if unknown
        prompts int [B, P]: prompt ids, left-padded
        responses int [B, T]: response ids, right-padded
        response_mask mask [B, T]: 1 for tokens that the policy generated
        attention_mask mask [B, P+T]: 0 for padding
    """,
    ("generate", "an estimator or a loss reads it"): """
        input_ids int [B, P+T]: prompts, then responses
        position_ids int [B, P+T]: position of each token, from 0
    """,
    (
        "generate",
        "actor_rollout_ref.rollout.calculate_log_probs=True and the agent loops return them",
    ): "rollout_log_probs float [B, T]: log-prob of each token in the rollout engine",
    (
        "generate",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=True; with router_replay.mode=R2, phase "
        "'log_probs' writes it",
    ): "routed_experts int [B, P+T, L, k]: the experts of each token in each MoE layer, -1 for none",
    ("generate", "an agent loop scores its trajectory"): """
        reward/agent float [B, T]: score of the agent loop, on the policy's last token
    """,
    ("generate", "an agent loop returns several rows for a trajectory"): """
        trajectory_row object [B]: the row's index in its trajectory, from 0; None is 0
    """,
    ("generate", "an agent loop calls tools or has an interaction"): """
        tool_outputs object [B]: outputs of the tools
        tool_rewards object [B]: rewards of the tools
        turn_scores object [B]: the interaction's score of each turn
        turn_rewards object [B]: rewards of tools and interactions, each with its turn's last position
        timeouts object [B]: number of calls that reached their time limit
        tool_call_counts object [B]: number of tool calls
        tool_failures object [B]: number of failed tool calls and interaction answers
        reward_scores object [B]: score of the trajectory by each tool and interaction
        turn_spans object [B]: role, tokens, tool calls and score of each turn, in order
    """,
    ("score", _ALWAYS): """
        reward_failure object [B]: why the row could not be scored; None if it was scored
        token_level_scores float [B, T]: weighted sum of the reward parts
    """,
    ("score", "reward_model.enable=True and reward_model.type=orm or judge"): """
        rm_scores float [B, T]: score of the reward model, on the policy's last token
    """,
    ("score", "reward_model.type=prm"): """
        step_mask mask [B, T]: 1 for the last token of each reasoning step, which the PRM scores
    """,
    ("score", "an estimator reads it (remax)"): """
        reward_baselines float [B]: score of the greedy response to the same prompt
    """,
    ("log_probs", f"bypass_mode, or {_LOG_PROB_CONDITION}"): """
        old_log_probs float [B, T]: log-prob of each token before the update
    """,
    ("log_probs", _LOG_PROB_CONDITION): """
        entropys float [B, T]: policy entropy at each token before the update
    """,
    (
        "log_probs",
        "an estimator reads it (optimal_token_baseline), or actor.calculate_sum_pi_squared=True",
    ): "sum_pi_squared float [B, T]: sum of squared token probabilities at each position",
    (
        "ref_log_probs",
        "algorithm.use_kl_in_reward=True, actor_rollout_ref.actor.use_kl_loss=True, or an estimator or "
        "a loss reads it",
    ): "ref_log_prob float [B, T]: log-prob of each token under the reference",
    ("values", "an estimator reads it (gae), or critic.enable=True"): """
        values float [B, T]: critic estimate before each token
    """,
    ("advantages", _ALWAYS): """
        token_level_rewards float [B, T]: scores after KL and shaping
        advantages float [B, T]: advantage of each token
        returns float [B, T]: target of the critic
        global_row int [B]: index of the row, or of its trajectory, in the whole batch before balancing
    """,
    (
        "advantages",
        "algorithm.rollout_correction weighs or rejects tokens, without bypass_mode",
    ): "loss_mask mask [B, T]: the tokens of the policy loss, if they differ from response_mask",
    ("advantages", "algorithm.rollout_correction.rollout_is is set, without bypass_mode"): """
        rollout_is_weights float [B, T]: importance weight of each token, trainer over rollout
    """,
    ("dispatch", "the rows do not divide evenly over the ranks"): """
        padded_row mask [B]: 1 for a padding row, which every mean must exclude
    """,
}


COLUMNS: dict[str, Column] = {}
for (_phase, _when), _lines in _DECLARATIONS.items():
    for _line in filter(None, map(str.strip, _lines.splitlines())):
        _head, _, _meaning = _line.partition(": ")
        _name, _dtype, _shape = _head.split(maxsplit=2)
        COLUMNS[_name] = Column(_name, _shape, _dtype, _phase, _when, _meaning)


def reward_column(part: str) -> str:
    """Returns the column name of a reward part: reward_column("rule") is "reward/rule"."""
    if not part or "/" in part:
        raise ValueError(f"a reward part is a name without '/', not {part!r}")
    return REWARD_PREFIX + part


def declaration(name: str) -> Column | None:
    """Returns the declaration of a column, or None; every `reward/<part>` has one."""
    if name in COLUMNS:
        return COLUMNS[name]
    if name.startswith(REWARD_PREFIX) and len(name) > len(REWARD_PREFIX):
        part = name.removeprefix(REWARD_PREFIX)
        when = f"the reward part {part!r} is configured"
        return Column(name, "[B, T]", "float", "score", when, f"reward part {part!r} of each token")
    return None


def is_data_column(name: str) -> bool:
    """Whether a data row may have this column: no phase declares it, or the phase `prompts` writes it."""
    column = declaration(name)
    return column is None or column.phase == "prompts"


def require(batch: DataProto, name: str) -> Tensor:
    """Returns the values of a column; raises MissingColumn, which names the phase that writes it."""
    if batch.has_column(name):
        values: Tensor = batch.column(name)
        return values
    if (column := declaration(name)) is not None:
        is_always = column.when == _ALWAYS
        writes = "always writes it" if is_always else f"writes it if {column.when}"
        raise MissingColumn(
            f"batch has no {name!r} ({column.meaning}): phase {column.phase!r} {writes}", name
        )
    hint = suggestion(name, [*COLUMNS, *batch.column_names()])
    raise MissingColumn(
        f"batch has no {name!r}, and no phase declares it.{hint} It has {batch.column_names()}",
        name,
    )


def write(batch: DataProto, name: str, value: Tensor | np.ndarray) -> None:
    """Adds a column to the batch, in place; raises ColumnWrittenTwice if it exists."""
    column = declaration(name)
    if batch.has_column(name):
        writer = f" by phase {column.phase!r}" if column else ""
        raise ColumnWrittenTwice(
            f"column {name!r} has already been written{writer}; choose another name for yours"
        )
    if column is not None and (problem := _mismatch(column, value)):
        raise ValueError(
            f"column {name!r} ({column.meaning}) is {column.dtype} {column.shape}; got {problem}"
        )
    batch.set_column(name, value)


def add_columns(batch: DataProto, result: DataProto, names: Iterable[str] | None = None) -> None:
    """Adds the columns of a worker's result to the batch; `names` selects some of them."""
    for name in result.column_names() if names is None else names:
        if result.has_column(name):
            write(batch, name, result.column(name))


def _mismatch(column: Column, value: Tensor | np.ndarray) -> str | None:
    """Returns the type, shape or dtype of a value if the declaration has another; else None."""
    if column.dtype == "object":
        return None if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
    if isinstance(value, np.ndarray) or not hasattr(value, "is_floating_point"):
        return f"a {type(value).__name__}, not a tensor"
    # Multimodal RoPE has one position per axis.
    has_rope_axes = column.name == "position_ids" and value.ndim == 3
    if value.ndim != column.ndim and not has_rope_axes:
        return f"shape {tuple(value.shape)}"
    is_wrong_dtype = column.dtype == ("int" if value.is_floating_point() else "float")
    return str(value.dtype) if is_wrong_dtype else None
