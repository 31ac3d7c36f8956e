"""Resolves the agent loop of a row; a row may name only loops that the configuration allows.

Allowed are the built-in loops, loops registered with `@register`, the loops of the YAML list
`agent_loop_config_path`, and the default loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hone.agents.contract import LOOPS, AgentLoopBase, DictConfigWrap
from hone.config import PPOTrainerConfig
from hone.config.rollout import RolloutConfig
from hone.data.create import dataset_class
from hone.plugins import PluginError, load_object, suggestion
from hone.text import BadText, read_yaml, shown
from hone.tokenizer import Tokenizer
from hone.types import Fields

LoopFactory = Callable[..., AgentLoopBase]


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
    """The loops of a run by name; a loop is imported at its first use."""

    def __init__(self, rollout: RolloutConfig) -> None:
        self.default = rollout.default_loop
        self._path = rollout.agent.agent_loop_config_path
        self._factory_loaders = _read_factory_loaders(self._path) if self._path else {}
        self._has_imported = False

    def of_row(self, agent_name: object) -> str:
        """Returns the loop name for a row's `agent_name`; raises PluginError if it is unknown."""
        if agent_name is None or (isinstance(agent_name, str) and not agent_name):
            return self.default
        if not isinstance(agent_name, str):
            raise PluginError(
                f"agent_name must be the name of an agent loop, got {shown(agent_name)}; write "
                "text, or omit agent_name for the default loop"
            )
        if not self._is_known(agent_name):
            names = self._names()
            hint = suggestion(agent_name, names)
            raise PluginError(
                f"agent_name={shown(agent_name)} names no agent loop of this run.{hint} "
                f"A row may name {', '.join(names)}; only the configuration may name import "
                "paths and files (actor_rollout_ref.rollout.agent.agent_loop_config_path)"
            )
        return agent_name

    def factory(self, name: str) -> LoopFactory:
        """Returns the factory of a loop name that `of_row` returned."""
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
        """Imports the modules of configured loops, which may register names."""
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
            raise PluginError(f"{path}: every loop needs `name` and `_target_`, got {shown(entry)}")
        loaders[str(name)] = partial(_load_factory, str(target), arguments)
    return loaders


def _load_factory(target: str, arguments: Fields) -> LoopFactory:
    """Returns a factory that adds the entry's arguments, like `hydra.utils.instantiate`.

    An argument with a `_target_` is instantiated for each trajectory.
    """
    cls = load_object(target)
    if not any(isinstance(value, dict | list) for value in arguments.values()):
        return partial(cls, **arguments)
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    config = OmegaConf.create(arguments)
    return lambda **kwargs: cls(**{**instantiate(config), **kwargs})
