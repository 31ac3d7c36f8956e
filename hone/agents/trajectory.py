"""Runs the agent loop that a row names, with a seed per trajectory, and checks its output.

The seed is derived from (run seed, uid, sample index), so that a row's tokens do not depend on the
other rows of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hone.agents.contract import (
    LOOPS,
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    DictConfigWrap,
    ServerManager,
)
from hone.columns import COLUMNS
from hone.config import PPOTrainerConfig
from hone.config.rollout import RolloutConfig, SamplingConfig
from hone.data.create import dataset_class
from hone.event_loop import run_with_deadline
from hone.ops.counter_rng import trajectory_seed
from hone.plugins import PluginError, load_object, suggestion
from hone.protocol import DataProto
from hone.protocol.rows import deeply_equal
from hone.rollout.contract import RolloutEngine
from hone.text import BadText, read_yaml, short_repr
from hone.tokenizer import Tokenizer
from hone.types import Fields, Row, Settings

LoopFactory = Callable[..., AgentLoopBase]
LOOP_METRICS = ("generate_sequences", "tool_calls", "num_preempted")
"""Metrics that any loop may return; missing ones are 0."""
RESERVED_COLUMNS = (
    *("prompts", "responses", "response_mask", "attention_mask", "input_ids", "position_ids"),
    *("rollout_log_probs", "rm_scores", "reward/agent", "num_turns", "stop_reason", "versions"),
    "trajectory_row",
)
"""Columns that are built from the other fields of an output, so `extra_fields` may not set them."""


class BadTrajectory(ValueError):
    """A loop returned an output that cannot be collated."""


class AgentLoopFailed(RuntimeError):
    """A loop raised; the message names the loop, the row and the error."""


def loop_arguments(config: PPOTrainerConfig, tokenizer: Tokenizer) -> Fields:
    """Returns verl's keyword arguments of an agent loop, without its `server_manager`."""
    return {
        "trainer_config": DictConfigWrap(config),
        "tokenizer": tokenizer,
        "processor": None,
        "dataset_cls": dataset_class(config.data),
        "data_config": DictConfigWrap(config.data),
        "dataset_config": config.data,
    }


class LoopNames:
    """The loops of a run by name; `factory` imports a loop at its first use.

    A row may name only loops that the configuration allows: built-in loops, loops registered with
    `@register`, the loops of the YAML list `agent_loop_config_path`, and the default loop.
    """

    def __init__(self, rollout: RolloutConfig) -> None:
        self.default = rollout.default_loop
        self._path = rollout.agent.agent_loop_config_path
        self._factory_loaders = _read_factory_loaders(self._path) if self._path else {}
        self._factories: dict[str, LoopFactory] = {}
        self._has_imported = False

    def name_of_row(self, agent_name: object) -> str:
        """Returns the loop name for a row's `agent_name`; raises PluginError if it is unknown."""
        if agent_name is None or (isinstance(agent_name, str) and not agent_name):
            return self.default
        if not isinstance(agent_name, str):
            raise PluginError(
                f"agent_name must be the name of an agent loop, got {short_repr(agent_name)}; write "
                "text, or omit agent_name for the default loop"
            )
        if not self._is_known(agent_name):
            names = self._names()
            hint = suggestion(agent_name, names)
            raise PluginError(
                f"agent_name={short_repr(agent_name)} names no agent loop of this run.{hint} "
                f"A row may name {', '.join(names)}; only the configuration may name import "
                "paths and files (actor_rollout_ref.rollout.agent.agent_loop_config_path)"
            )
        return agent_name

    def factory(self, name: str) -> LoopFactory:
        """Returns the factory of a loop name that `name_of_row` returned."""
        if name not in self._factories:
            self._factories[name] = self._find_factory(name)
        return self._factories[name]

    def _find_factory(self, name: str) -> LoopFactory:
        if name in self._factory_loaders:
            return self._factory_loaders[name]()
        return LOOPS.get(name) if name == self.default else LOOPS.get_registered(name)

    def _names(self) -> list[str]:
        return sorted({*LOOPS.names(), *self._factory_loaders, self.default})

    def _is_known(self, name: str) -> bool:
        if name not in self._names():
            self._import_configured_loops()
        return name in self._names()

    def _import_configured_loops(self) -> None:
        """Imports the configured loops, because their modules may register more names."""
        if not self._has_imported:
            for name in (*self._factory_loaders, self.default):
                self.factory(name)
            self._has_imported = True


def _read_factory_loaders(path: str) -> dict[str, Callable[[], LoopFactory]]:
    """Reads a YAML list of loops: `name`, `_target_` and further constructor arguments."""
    try:
        entries = read_yaml(path)
    except BadText as error:
        raise PluginError(str(error)) from error
    loaders: dict[str, Callable[[], LoopFactory]] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        arguments = {str(k): v for k, v in entry.items()} if isinstance(entry, dict) else {}
        name, target = arguments.pop("name", None), arguments.pop("_target_", None)
        if not name or not target:
            raise PluginError(
                f"{path}: every loop needs `name` and `_target_`, got {short_repr(entry)}"
            )
        loaders[str(name)] = partial(_load_factory, str(target), arguments)
    return loaders


def _load_factory(target: str, arguments: Fields) -> LoopFactory:
    """Returns a factory that adds the arguments of a list entry, as `hydra.utils.instantiate` does.

    An argument with a `_target_` is instantiated for each trajectory.
    """
    cls = load_object(target)
    if not any(isinstance(value, dict | list) for value in arguments.values()):
        return partial(cls, **arguments)
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    config = OmegaConf.create(arguments)
    return lambda **kwargs: cls(**{**instantiate(config), **kwargs})


class Job(NamedTuple):
    """One row and its agent loop."""

    loop_name: str
    factory: LoopFactory
    sampling_params: Fields
    row: Row


@dataclass
class TrajectoryMaker:
    """Runs the agent loop of each row, with a new loop object per row."""

    config: PPOTrainerConfig
    engine: RolloutEngine
    tokenizer: Tokenizer
    run_seed: int
    vocab_size: int | None

    def __post_init__(self) -> None:
        self._loop_names = LoopNames(self.config.actor_rollout_ref.rollout)
        self._loop_names.factory(self._loop_names.default)  # imported before the first step
        self._loop_arguments = loop_arguments(self.config, self.tokenizer)

    def jobs(self, rows: DataProto) -> list[Job]:
        """Pairs each row with its loop; raises on an unknown loop name."""
        columns, sampling_params = rows.non_tensor_batch, rows.meta_info["sampling_params"]
        agent_names = columns.get("agent_name", [None] * len(rows))
        names = [self._loop_names.name_of_row(name) for name in agent_names]
        factories = {name: self._loop_names.factory(name) for name in set(names)}
        return [
            Job(name, factories[name], dict(sampling_params), {k: v[i] for k, v in columns.items()})
            for i, name in enumerate(names)
        ]

    async def make(self, job: Job) -> tuple[AgentLoopOutput, ...]:
        """Runs the row's loop and returns the outputs of its trajectory, usually one."""
        name, row = job.loop_name, job.row
        rollout = self.config.actor_rollout_ref.rollout
        manager = ServerManager(
            self.engine,
            seed=trajectory_seed(self.run_seed, row["uid"], row["sample_index"]),
            max_tokens=rollout.response_length,
            max_model_len=rollout.max_model_len,
        )

        async def run_loop() -> list[AgentLoopOutput]:
            loop = job.factory(server_manager=manager, **self._loop_arguments)
            loop.request_id = row["trajectory_id"]
            result: Any = await loop.run(job.sampling_params, **row)
            outputs = list(result) if isinstance(result, list | tuple) and result else [result]
            for output in outputs:
                check_output(output, name, row=row, vocab_size=self.vocab_size)
            return outputs

        try:
            # A cancelled loop gets the time of one tool call to release its tools.
            grace_s = rollout.multi_turn.tool_timeout_s
            outputs = await run_with_deadline(run_loop(), None, grace_s=grace_s)
        except Exception as error:
            raise AgentLoopFailed(
                f"agent loop {name!r} failed on row uid={row['uid']} sample {row['sample_index']}: "
                f"{type(error).__name__}: {error}"
            ) from error
        is_scored = any(output.reward_score is not None for output in outputs)
        for output in outputs:
            if is_scored and output.reward_score is None:
                output.reward_score = 0.0  # a trajectory's score is the sum over its rows
            # Columns that the loop copied from its row are already in the batch.
            output.extra_fields = {k: v for k, v in output.extra_fields.items() if k not in row}
        return tuple(_truncate_response(output, rollout.response_length) for output in outputs)


def _truncate_response(output: AgentLoopOutput, max_tokens: int) -> AgentLoopOutput:
    """Truncates the response to `max_tokens`."""
    if len(output.response_ids) <= max_tokens:
        return output
    for name in ("response_ids", "response_mask", "response_logprobs", "versions"):
        values = getattr(output, name)
        setattr(output, name, values if values is None else values[:max_tokens])
    return output


def loop_metrics(loops: Sequence[AgentLoopMetrics | Settings]) -> dict[str, float]:
    """Returns min, max and mean of the metrics of `loops` under verl's names."""
    values_by_loop = [metric_values(loop) for loop in loops]
    summary: dict[str, float] = {}
    for name in LOOP_METRICS:
        values = np.array([float(loop_values[name]) for loop_values in values_by_loop])
        for statistic in ("min", "max", "mean"):
            summary[f"timing_s/agent_loop/{name}/{statistic}"] = float(getattr(values, statistic)())
    metrics = [loop for loop in loops if isinstance(loop, AgentLoopMetrics)]
    if prompt_tokens := sum(m.later_prompt_tokens for m in metrics):
        cached_tokens = sum(m.later_cached_tokens for m in metrics)
        summary["rollout/prefix_cache_hit/later_turns"] = cached_tokens / prompt_tokens
    return summary


def check_output(output: Any, loop_name: str, *, row: Row, vocab_size: int | None) -> None:
    """Raises BadTrajectory on an invalid output."""
    if not isinstance(output, AgentLoopOutput):
        raise BadTrajectory(
            f"agent loop {loop_name!r} returned {short_repr(output)}; return an AgentLoopOutput, or a "
            "list of at least one"
        )
    for problem in _problems(output, row, vocab_size):
        raise BadTrajectory(f"agent loop {loop_name!r} returned {problem}")


def metric_values(metrics: AgentLoopMetrics | Settings) -> dict[str, float]:
    """Returns the values of `LOOP_METRICS` by name."""
    values = vars(metrics) if isinstance(metrics, AgentLoopMetrics) else dict(metrics)
    return {name: values.get(name, 0.0) for name in LOOP_METRICS}


def _problems(output: AgentLoopOutput, row: Row, vocab_size: int | None) -> Iterator[str]:
    num_tokens = len(output.response_ids)
    for field in ("response_mask", "response_logprobs", "versions"):
        value = getattr(output, field)
        if value is not None and len(value) != num_tokens:
            yield (f"{num_tokens} response_ids but {len(value)} {field}; give one entry per token")
    if len(output.prompt_ids) == 0 or num_tokens == 0:
        yield "an empty prompt or response"
    mask = list(output.response_mask)
    if mask.count(0) + mask.count(1) != len(mask):
        yield "a response_mask with values other than 0, 1"
    for field, ids in (("prompt_ids", output.prompt_ids), ("response_ids", output.response_ids)):
        low, high = min(ids), max(ids)
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            valid_ids = "0 and up" if vocab_size is None else f"0 to {vocab_size - 1}"
            yield f"{field} from {low} to {high}; the model knows {valid_ids}"
    if (experts := output.routed_experts) is not None and experts.dim() != 3:
        yield f"routed_experts of shape {tuple(experts.shape)}; give [tokens, layers, k], or None"
    for name, media in (output.multi_modal_data or {}).items():
        if media is not None and not (isinstance(media, Sized) and len(media) == 0):
            yield f"{name} in multi_modal_data; images, video and audio are not supported"
    if output.reward_score is not None and not _is_finite(output.reward_score):
        yield (
            f"reward_score={output.reward_score!r}; give a finite number, or None in every loop "
            "if the reward function scores"
        )
    if not isinstance(output.stop_reason, str | None):
        yield f"stop_reason={short_repr(output.stop_reason)}; give text or None"
    if not _is_finite(output.num_turns):
        yield f"num_turns={short_repr(output.num_turns)}; give a number"
    for name, value in metric_values(output.metrics).items():
        if not _is_finite(value):
            yield f"metrics[{name!r}]={value!r}; give a number, or leave it out"
    yield from _extra_field_problems(output, row)


def _extra_field_problems(output: AgentLoopOutput, row: Row) -> Iterator[str]:
    """Yields a problem per extra field that changes a column of the row or a reserved column."""
    for field, value in output.extra_fields.items():
        column = COLUMNS.get(field)
        origin = ""
        if field in row:
            origin = "" if deeply_equal(row[field], value) else "a column of the data row"
        elif field in RESERVED_COLUMNS:
            origin = "built from the output's other fields"
        elif column is not None and column.step not in ("generate", "prompts"):
            origin = f"written by the step {column.step!r}"
        elif field.startswith("reward/"):
            origin = "written by the step 'score'"
        if origin:
            yield f"extra_fields[{field!r}], but the column {field!r} is {origin}; rename it"


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def default_sampling(rollout: SamplingConfig) -> Fields:
    """Returns the `sampling_params` of training and of `hone generate`."""
    return {
        "temperature": rollout.temperature if rollout.do_sample else 0.0,
        "top_k": rollout.top_k,
        "top_p": rollout.top_p,
        "min_p": rollout.min_p,
        "stop": (rollout.stop,) if isinstance(rollout.stop, str) else tuple(rollout.stop or ()),
        "stop_token_ids": tuple(rollout.stop_token_ids or ()),
        "ignore_eos": rollout.ignore_eos,
        "max_tokens": rollout.max_tokens_per_turn,
    }


def validation_sampling(rollout: RolloutConfig) -> Fields:
    """Returns the `sampling_params` of validation: greedy unless `val_kwargs.do_sample`."""
    val_kwargs = rollout.val_kwargs
    return default_sampling(rollout) | {
        "temperature": val_kwargs.temperature if val_kwargs.uses_sampling else 0.0,
        "top_k": val_kwargs.top_k,
        "top_p": val_kwargs.top_p,
        "min_p": val_kwargs.min_p,
    }
