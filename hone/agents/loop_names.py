"""The agent loops of a run: their names, and the arguments of their constructors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hone.agents.contract import LOOPS, AgentLoopBase, DictConfigWrap
from hone.config import PPOTrainerConfig
from hone.config.rollout import RolloutConfig
from hone.data.create import dataset_class
from hone.plugins import PluginError, load_object
from hone.suggestions import suggestion
from hone.text import BadText, read_yaml, short_repr
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
    """The loops of a run by name; `factory` imports a loop at its first use.

    A row may name only loops that the configuration allows: built-in loops, loops registered with
    `@register`, the loops of the YAML list `agent_loop_config_path`, and the default loop.
    """

    def __init__(self, rollout: RolloutConfig) -> None:
        self.default = rollout.default_loop
        path = rollout.agent.agent_loop_config_path
        self._factory_loaders = _read_factory_loaders(path) if path else {}
        self._factories: dict[str, LoopFactory] = {}

    def name_of_row(self, agent_name: object) -> str:
        """Returns the loop name for a row's `agent_name`; raises PluginError for an unknown name."""
        if agent_name is None:
            return self.default
        if not isinstance(agent_name, str):
            raise PluginError(
                f"agent_name must be the name of an agent loop, got {short_repr(agent_name)}; write "
                "text, or omit agent_name for the default loop"
            )
        if not agent_name:
            return self.default
        if agent_name not in self._names():
            for name in (*self._factory_loaders, self.default):
                self.factory(name)  # the module of a configured loop may register more names
        names = self._names()
        if agent_name not in names:
            raise PluginError(
                f"agent_name={short_repr(agent_name)} names no agent loop of this run."
                f"{suggestion(agent_name, names)} "
                f"A row may name {', '.join(names)}; only the configuration may name import "
                "paths and files (actor_rollout_ref.rollout.agent.agent_loop_config_path)"
            )
        return agent_name

    def factory(self, name: str) -> LoopFactory:
        """Returns the factory of a loop name that `name_of_row` returned."""
        if name not in self._factories:
            if name in self._factory_loaders:
                self._factories[name] = self._factory_loaders[name]()
            elif name == self.default:  # the configuration may also give an import path
                self._factories[name] = LOOPS.get(name)
            else:
                self._factories[name] = LOOPS.get_registered(name)
        return self._factories[name]

    def _names(self) -> list[str]:
        return sorted({*LOOPS.names(), *self._factory_loaders, self.default})


def _read_factory_loaders(path: str) -> dict[str, Callable[[], LoopFactory]]:
    """Reads a YAML list of loops: `name`, `_target_` and further constructor arguments."""
    try:
        entries = read_yaml(path)
    except BadText as error:
        raise PluginError(str(error)) from error
    loaders: dict[str, Callable[[], LoopFactory]] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        fields = entry if isinstance(entry, dict) else {}
        arguments = {str(key): value for key, value in fields.items()}
        name, target = arguments.pop("name", None), arguments.pop("_target_", None)
        if not name or not target:
            raise PluginError(
                f"{path}: every loop needs `name` and `_target_`, got {short_repr(entry)}"
            )
        loaders[str(name)] = partial(_load_factory, str(target), arguments)
    return loaders


def _load_factory(target: str, arguments: Fields) -> LoopFactory:
    """Returns a factory that passes the arguments of a list entry to the loop `target`.

    An argument that is a mapping with `_target_` is instantiated anew for each trajectory.
    """
    cls = load_object(target)
    if not any(isinstance(value, dict | list) for value in arguments.values()):
        return partial(cls, **arguments)
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    config = OmegaConf.create(arguments)
    return lambda **kwargs: cls(**{**instantiate(config), **kwargs})
