"""The base classes of advantage estimators, and GRPO.

An estimator is a frozen dataclass. Its fields are its options, which are read from `algorithm` by name.

A trajectory is usually one row. If several rows have the same `trajectory_id`, their rewards and lengths are
summed, statistics count the trajectory once, and each of its rows gets the trajectory's advantage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from hone.columns import COLUMNS, REWARD_PREFIX
from hone.config.algorithm import AlgorithmConfig
from hone.config.block import setting
from hone.config.errors import unknown_argument
from hone.ops.rows import (
    WHITEN_EPS,
    Groups,
    Labels,
    count_unmasked,
    factorise,
    factorise_pairs,
    masked_sum,
)
from hone.plugins import PluginError, check_parameters, needed_columns
from hone.types import Columns, Function, JsonValue, Settings

Estimate = tuple[Tensor, Tensor]  # advantages and returns, both [B, T], 0 outside response_mask
GroupUse = Literal["ignored", "compared", "required"]
T = TypeVar("T", bound="Estimator")

EPS = 1e-6
TRAJECTORY_COLUMN = "trajectory_id"
GROUP_ARGUMENTS = "token_level_rewards response_mask index"
"""The first arguments of an estimator that compares the responses of a group."""
_ARGUMENTS = ("token_level_rewards", "response_mask", "index", "config")
"""The arguments of every estimator; other arguments are options or columns."""
_POSITIONAL = Parameter.POSITIONAL_OR_KEYWORD
_BLOCK_ROWS = 256
"""Rows that are processed together; their tensors fit into the CPU cache."""
CALL_ONLY = {"source": "call"}
"""Metadata of an option that has the name of a key of `algorithm` but is set only by the caller."""


@dataclass(frozen=True)
class Trajectories:
    """The part of a batch that an estimator reads."""

    rewards: Tensor  # [B, T] token_level_rewards
    mask: Tensor  # [B, T] response_mask
    uid: Labels | None = None  # [B] equal for the responses of one prompt
    columns: Columns = field(default_factory=dict)  # the columns in `requires` and `uses`

    @property
    def trajectory_id(self) -> Labels | None:
        return self.columns.get(TRAJECTORY_COLUMN)

    def outcomes(self, name: str, rewards: Tensor) -> Outcomes:
        """Returns the outcomes of the trajectories for these rewards, grouped by prompt; errors name the
        estimator `name`."""
        uid, device = checked_labels(name, self.uid, len(self.mask)), self.mask.device
        if self.trajectory_id is None:
            return Outcomes(rewards, self.mask.bool(), None, Groups.of(uid, device))
        prompt = factorise(uid)
        trajectory, first_rows = factorise_pairs(prompt, factorise(self.trajectory_id))
        row_trajectory = torch.from_numpy(trajectory).to(device)
        groups = Groups.of(prompt[first_rows], device)
        return Outcomes(rewards, self.mask.bool(), row_trajectory, groups)

    def column(self, name: str) -> Tensor:
        """Returns a column that the estimator requires."""
        if self.columns.get(name) is None:
            raise TypeError(f"the estimator needs the column {name!r}; pass it by that name")
        return self.columns[name]


@dataclass(frozen=True)
class Estimator:
    """Computes advantages and returns from token rewards."""

    uses: ClassVar[tuple[str, ...]] = ()
    """Optional columns that the estimator reads, in addition to `trajectory_id`."""
    group_use: ClassVar[GroupUse | None] = None
    """How the estimator uses groups. ignored: no responses are compared; compared: a group of one keeps
    its raw score; required: a group of one has advantage 0; None: unknown."""

    @property
    def requires(self) -> tuple[str, ...]:
        """Columns that the estimator requires, in addition to rewards, mask and uid."""
        return ()

    def __call__(self, batch: Trajectories) -> Estimate:
        raise NotImplementedError(f"{type(self).__name__} must define __call__")

    @classmethod
    def from_config(cls: type[T], config: Settings | None = None, **options: JsonValue) -> T:
        """Creates an estimator; an option is set by its keyword, else its config key, else its default."""
        values = {name: value for name, value in options.items() if value is not None}
        for option in dataclasses.fields(cls):
            name = option.name
            if name not in values and option.metadata != CALL_ONLY:
                with contextlib.suppress(KeyError):
                    values[name] = setting(config, name, AlgorithmConfig)
            if name not in values and option.default is dataclasses.MISSING:
                raise PluginError(
                    f"the estimator {cls.__name__} has an option {name!r} without a default, and "
                    "algorithm has no key of that name; give it a default"
                )
        return cls(**values)


@dataclass(frozen=True)
class FunctionEstimator(Estimator):
    """A user's function `fn(token_level_rewards, response_mask, index, config, **columns)`.

    The function's attribute `needs` lists the columns that it requires. Arguments that the function does not
    accept are not passed.
    """

    function: Function
    config: Settings | None

    @property
    def requires(self) -> tuple[str, ...]:
        return needed_columns(self.function)

    def __call__(self, batch: Trajectories) -> Estimate:
        arguments = (batch.rewards, batch.mask, batch.uid, self.config)
        values = {**dict(zip(_ARGUMENTS, arguments, strict=True)), **batch.columns}
        parameters = inspect.signature(self.function).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            accepted_names = {*parameters, *self.requires}
            values = {name: value for name, value in values.items() if name in accepted_names}
        result = self.function(**values)
        if not isinstance(result, tuple) or len(result) != 2:
            name = getattr(self.function, "__name__", repr(self.function))
            raise PluginError(
                f"the estimator {name} returned a {type(result).__name__}; "
                "return (advantages, returns), both [B, T]"
            )
        return result


class EstimatorFunction:
    """An estimator as a function with verl's arguments in verl's order; options and columns are keywords.

    Every estimator accepts the columns of all estimators, and the arguments of verl that it does not use.
    `arguments` are the names of verl's arguments; those after `response_mask` are optional.
    """

    def __init__(
        self, name: str, estimator: type[Estimator], arguments: str = f"{GROUP_ARGUMENTS} config"
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self.__doc__ = estimator.__doc__
        self.estimator = estimator
        self._options = [option.name for option in dataclasses.fields(estimator)]
        required, _, optional = arguments.partition(" response_mask")
        parameters = [
            *(Parameter(n, _POSITIONAL) for n in (*required.split(), "response_mask")),
            *(Parameter(n, _POSITIONAL, default=None) for n in optional.split()),
            Parameter("columns", Parameter.VAR_KEYWORD),
        ]
        self.__signature__ = inspect.Signature(parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Estimate:
        values = self.__signature__.bind(*args, **kwargs).arguments
        keywords = values.pop("columns", {})
        # Every estimator accepts all columns, and the whole batch as verl passes it.
        accepted_names = {*COLUMNS, *_ARGUMENTS, *self._options, "non_tensor_batch", "batch"}
        for name in keywords:
            if name not in accepted_names and not name.startswith(REWARD_PREFIX):
                used_names = (*_ARGUMENTS, *self._options, TRAJECTORY_COLUMN, *self.estimator.uses)
                raise unknown_argument(self.__name__, name, used_names)
        columns = values | keywords
        rewards, mask, index, config = (columns.pop(name, None) for name in _ARGUMENTS)
        is_sequence = isinstance(config, Collection) and not isinstance(config, Mapping)
        if is_sequence or isinstance(config, int | float) or isinstance(index, Mapping):
            raise TypeError(
                f"{self.__name__} takes {self.__signature__}; got {type(index).__name__} as index and "
                f"{type(config).__name__} as config; name the arguments"
            )
        options = {name: columns.pop(name) for name in self._options if name in columns}
        estimator = self.estimator.from_config(config, **options)
        return estimator(Trajectories(rewards, mask, index, columns))


def create_estimator(entry: Function, config: Settings | None, **options: JsonValue) -> Estimator:
    """Creates the estimator of a table entry: an estimator class, its verl form, or a function."""
    if isinstance(entry, EstimatorFunction):
        entry = entry.estimator
    if isinstance(entry, type) and issubclass(entry, Estimator):
        if entry.__call__ is Estimator.__call__:
            raise PluginError(f"the estimator {entry.__name__} must define __call__(self, batch)")
        fields = entry.__dataclass_fields__
        return entry.from_config(config, **{n: v for n, v in options.items() if n in fields})
    if isinstance(entry, type) or not callable(entry):
        raise PluginError(
            f"{getattr(entry, '__name__', repr(entry))} is not an advantage estimator; name a function, or a "
            "dataclass that inherits from hone.algorithms.advantages.estimator.Estimator"
        )
    if isinstance(entry, Estimator):
        return entry
    check_parameters("advantage estimator", entry, (*_ARGUMENTS, TRAJECTORY_COLUMN))
    return FunctionEstimator(entry, config)


@dataclass(frozen=True)
class Outcomes:
    """The scores and lengths of N trajectories, and their groups."""

    rewards: Tensor  # [B, T]
    mask: Tensor  # [B, T] bool
    row_trajectory: Tensor | None  # [B] index of each row's trajectory; None if each row is one
    groups: Groups  # of the N trajectories

    @cached_property
    def scores(self) -> Tensor:
        """The sum of a trajectory's rewards over the response mask, [N] float64."""
        return self.sum_rows(row_sums(self.rewards, self.mask))

    @cached_property
    def lengths(self) -> Tensor:
        """The number of a trajectory's policy tokens, [N] float64."""
        return self.sum_rows(count_unmasked(self.mask, -1).double())

    def sum_rows(self, per_row: Tensor) -> Tensor:
        """Returns [N] the sums of `per_row` [B] over the rows of each trajectory."""
        if self.row_trajectory is None:
            return per_row
        return per_row.new_zeros(len(self.groups.ids)).index_add_(0, self.row_trajectory, per_row)

    def baseline(self) -> Tensor:
        """Returns [N] the mean score of the group, or 0 for a group of one, which keeps its raw score."""
        mean = self.groups.mean(self.scores)[self.groups.ids]
        return mean.masked_fill(self.groups.is_singleton, 0.0)

    def whiten(self, per_trajectory: Tensor) -> Tensor:
        """Whitens values [N] by their mean and variance over all tokens of the trajectories."""
        lengths = self.lengths
        tokens = lengths.sum()
        centered = per_trajectory - (per_trajectory * lengths).sum() / tokens.clamp(min=1)
        variance = (centered**2 * lengths).sum() / (tokens - 1).clamp(min=1)
        return centered * torch.rsqrt(variance + WHITEN_EPS)

    def broadcast(self, per_trajectory: Tensor) -> Tensor:
        """Returns [B, T] the trajectory's value on each policy token, and 0 elsewhere."""
        rows = slice(None) if self.row_trajectory is None else self.row_trajectory
        per_row = per_trajectory[rows].to(self.rewards.dtype).unsqueeze(-1)
        out = torch.empty_like(self.rewards)
        for start in range(0, len(out), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            out[block].copy_(self.mask[block].view(torch.uint8)).mul_(per_row[block])
        return out


@dataclass(frozen=True)
class OutcomeEstimator(Estimator):
    """An estimator with one advantage per trajectory, the same on each of its tokens."""

    def advantages(self, outcome: Outcomes) -> Tensor:
        """Returns the advantages [N] of N trajectories."""
        raise NotImplementedError(f"{type(self).__name__} must define advantages")

    def __call__(self, batch: Trajectories) -> Estimate:
        outcome = batch.outcomes(type(self).__name__, batch.rewards)
        advantages = outcome.broadcast(self.advantages(outcome))
        return advantages, advantages


def checked_labels(name: str, index: Labels | None, num_rows: int) -> Labels:
    """Returns `index`; raises an error with the estimator's `name` unless `index` has one label per row."""
    if index is None:
        raise ValueError(
            f"{name} compares the responses of one prompt and got index=None; "
            "pass the batch's uid column"
        )
    if len(index) != num_rows:
        raise ValueError(f"{name}: index has {len(index)} labels for {num_rows} rows")
    return index


def row_sums(x: Tensor, mask: Tensor) -> Tensor:
    """Returns [B] float64, the sums of x [B, T] over the mask."""
    sums = x.new_empty(len(x))
    # Blocks share one buffer, which stays in the CPU cache; torch is slow on bool masks.
    buffer = x.new_empty(_BLOCK_ROWS, x.shape[-1])
    for start in range(0, len(x), _BLOCK_ROWS):
        block = slice(start, min(start + _BLOCK_ROWS, len(x)))
        masked_block = buffer[: block.stop - start].copy_(mask[block].view(torch.uint8))
        torch.sum(masked_block.mul_(x[block]), -1, out=sums[block])
    if not sums.isfinite().all():  # 0 · NaN is NaN; masked_sum replaces masked entries
        sums = masked_sum(x, mask, -1)
    return sums.double()


@dataclass(frozen=True)
class GRPO(OutcomeEstimator):
    """A = (R − mean_g) / (std_g + ε), std unbiased; the division is optional."""

    norm_adv_by_std_in_grpo: bool
    epsilon: float = EPS

    group_use = "compared"  # a group of one keeps its raw score

    def advantages(self, outcome: Outcomes) -> Tensor:
        divide_by_std = self.norm_adv_by_std_in_grpo
        return group_relative_scores(outcome.groups, outcome.scores, divide_by_std, self.epsilon)


@dataclass(frozen=True)
class DrGRPO(OutcomeEstimator):
    """A = R − mean_g: GRPO without the bias towards easy and hard prompts."""

    group_use = "compared"  # a group of one keeps its raw score

    def advantages(self, outcome: Outcomes) -> Tensor:
        return outcome.scores - outcome.baseline()


def group_relative_scores(
    groups: Groups, scores: Tensor, divide_by_std: bool, epsilon: float
) -> Tensor:
    """Returns [N] (score − group mean) / group std; a group of one has mean 0 and std 1."""
    mean = groups.mean(scores)[groups.ids].masked_fill(groups.is_singleton, 0.0)
    if not divide_by_std:
        return scores - mean
    std = groups.std(scores)[groups.ids].masked_fill(groups.is_singleton, 1.0)
    divisor = std + epsilon
    return torch.where(divisor > 0, (scores - mean) / divisor, 0.0)  # 0/0 if epsilon is 0


grpo = EstimatorFunction("grpo", GRPO, f"{GROUP_ARGUMENTS} epsilon norm_adv_by_std_in_grpo config")
dr_grpo = EstimatorFunction("dr_grpo", DrGRPO)
