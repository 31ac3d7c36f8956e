"""The base class of advantage estimators: a frozen dataclass that declares which columns it reads.

Its fields are its options, read from `algorithm` by name. `VerlForm` gives an estimator verl's
signature; `FunctionEstimator` wraps a user's function.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor

from hone.algorithms.settings import has_key, raise_if_unknown, setting
from hone.columns import COLUMNS, REWARD_PREFIX
from hone.config.algorithm import AlgorithmConfig
from hone.ops.groups import Labels
from hone.plugins import PluginError
from hone.types import Fields, Function, JsonValue, Settings

Estimate = tuple[Tensor, Tensor]  # advantages and returns, both [B, T], 0 outside response_mask
GroupUse = Literal["ignored", "compared", "required"]
T = TypeVar("T", bound="Estimator")

TRAJECTORY_COLUMN = "trajectory_id"
CALL_ONLY = {"read from": "the call alone"}
"""Metadata of an option that has the name of a key of `algorithm` but is set only by the caller."""


@dataclass(frozen=True)
class Trajectories:
    """The part of a batch that an estimator reads."""

    rewards: Tensor  # [B, T] token_level_rewards
    mask: Tensor  # [B, T] response_mask
    uid: Labels | None = None  # [B] equal for the responses of one prompt
    columns: Settings = field(default_factory=dict)  # the columns in `requires` and `uses`

    @property
    def trajectory_id(self) -> Labels | None:
        return self.columns.get(TRAJECTORY_COLUMN)

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
    groups: ClassVar[GroupUse | None] = None
    """How the estimator uses groups. ignored: not at all; compared: a single response keeps its raw score;
    required: a single response has advantage 0; None: unknown."""

    @property
    def requires(self) -> tuple[str, ...]:
        """Columns that the estimator requires, in addition to rewards, mask and uid."""
        return ()

    def __call__(self, batch: Trajectories) -> Estimate:
        raise NotImplementedError(f"{type(self).__name__} must define __call__")

    @classmethod
    def from_config(cls: type[T], config: Settings | None = None, **options: JsonValue) -> T:
        """Creates an estimator; an option is set by its keyword, else its config key, else its default."""
        values: Fields = {}
        for option in dataclasses.fields(cls):
            name = option.name
            if options.get(name) is not None:
                values[name] = options[name]
            elif option.metadata != CALL_ONLY and (
                has_key(config, name) or name in AlgorithmConfig.__dataclass_fields__
            ):
                values[name] = setting(config, name, AlgorithmConfig)
            elif option.default is dataclasses.MISSING:
                raise PluginError(
                    f"the estimator {cls.__name__} has an option {name!r} without a default, and "
                    "algorithm has no key of that name; give it a default"
                )
        return cls(**values)


@dataclass(frozen=True)
class FunctionEstimator(Estimator):
    """A user's function `fn(token_level_rewards, response_mask, index, config, **columns)`.

    Its attribute `needs` lists the columns it requires. It is called with the arguments that it accepts.
    """

    function: Function
    config: Settings | None

    @property
    def requires(self) -> tuple[str, ...]:
        return needed_columns(self.function)

    def __call__(self, batch: Trajectories) -> Estimate:
        values = {"index": batch.uid, "config": self.config, **batch.columns}
        tensors = {"token_level_rewards": batch.rewards, "response_mask": batch.mask}
        parameters = inspect.signature(self.function).parameters
        positional: tuple[Tensor, ...] = ()
        if tensors.keys() <= parameters.keys():
            values = tensors | values
        else:
            positional = tuple(tensors.values())
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            accepted_names = {*parameters, *self.requires}
            values = {name: value for name, value in values.items() if name in accepted_names}
        result = self.function(*positional, **values)
        if not isinstance(result, tuple) or len(result) != 2:
            raise PluginError(
                f"the estimator {_entry_name(self.function)} returned a {type(result).__name__}; "
                "return (advantages, returns), both [B, T]"
            )
        return result


class VerlForm:
    """An estimator as a function with verl's arguments: options and columns are keywords.

    Every estimator accepts the columns of all estimators; an unknown keyword is an error.
    """

    def __init__(self, name: str, estimator: type[Estimator]) -> None:
        self.__name__ = self.__qualname__ = name
        self.__doc__ = estimator.__doc__
        self.estimator = estimator
        self._options = [option.name for option in dataclasses.fields(estimator)]

    def __call__(
        self,
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Labels | None = None,
        config: Settings | None = None,
        **keywords: Any,
    ) -> Estimate:
        if isinstance(index, Mapping) or isinstance(config, int | float):
            raise TypeError(  # verl has other arguments at these positions
                f"{self.__name__} takes (token_level_rewards, response_mask, index, config); got "
                f"{type(index).__name__} as index and {type(config).__name__} as config. Name the "
                "arguments, or call verl's form in hone.trainer.ppo.core_algos"
            )
        options = {name: keywords.pop(name) for name in self._options if name in keywords}
        # Every estimator accepts all columns, and the whole batch as verl passes it.
        columns = {*COLUMNS, "non_tensor_batch", "batch"}
        unknown_names = [
            n for n in keywords if n not in columns and not n.startswith(REWARD_PREFIX)
        ]
        known_names = ("token_level_rewards", "response_mask", "index", "config", *self._options)
        raise_if_unknown(
            self.__name__, unknown_names, (*known_names, TRAJECTORY_COLUMN, *self.estimator.uses)
        )
        estimator = self.estimator.from_config(config, **options)
        return estimator(Trajectories(token_level_rewards, response_mask, index, keywords))


Entry = type[Estimator] | VerlForm | Function
"""An entry of the table of estimators."""


def needed_columns(function: Function) -> tuple[str, ...]:
    """Returns the columns that a user's function lists in its attribute `needs`."""
    needs = getattr(function, "needs", ())
    return (needs,) if isinstance(needs, str) else tuple(needs)


def _entry_name(entry: Entry) -> str:
    return getattr(entry, "__name__", repr(entry))


def create_estimator(entry: Entry, config: Settings | None, **options: JsonValue) -> Estimator:
    """Creates the estimator of a table entry: an estimator class, its verl form, or a function."""
    if isinstance(entry, VerlForm):
        entry = entry.estimator
    if isinstance(entry, type) and issubclass(entry, Estimator):
        if entry.__call__ is Estimator.__call__:
            raise PluginError(f"the estimator {entry.__name__} must define __call__(self, batch)")
        fields = entry.__dataclass_fields__
        return entry.from_config(
            config, **{name: v for name, v in options.items() if name in fields}
        )
    if isinstance(entry, type) or not callable(entry):
        raise PluginError(
            f"{_entry_name(entry)} is not an advantage estimator; name a function, or a dataclass that "
            "inherits from hone.algorithms.advantages.estimator.Estimator"
        )
    if isinstance(entry, Estimator):
        return entry
    return FunctionEstimator(entry, config)
