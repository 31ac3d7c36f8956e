"""Loads the interactions of a run from a YAML list:

interaction:
  - name: gsm8k
    class_name: hone.agents.interactions.gsm8k.Gsm8kInteraction
    config: {}
  - name: maze                        # a class with `reset` and `step` is an environment
    class_name: my_env.py:Maze
  - name: reasoning_gym:leg_counting  # a reasoning-gym dataset by name
  - name: verifiers:my-env            # an environment of the package verifiers
"""

from __future__ import annotations

from hone.agents.interactions.contract import BaseInteraction
from hone.agents.interactions.environment import EnvironmentInteraction
from hone.agents.tools.contract import ToolError
from hone.agents.tools.listing import read_entries
from hone.plugins import load_object


def initialize_interactions_from_config(
    interaction_config_file: str,
) -> dict[str, BaseInteraction]:
    """Returns the interactions by the name that a row's `interaction_kwargs` gives."""
    path = interaction_config_file
    interactions: dict[str, BaseInteraction] = {}
    for entry in read_entries(path, "interaction"):
        cls = load_object(str(entry["class_name"]))
        # The default name of `WeatherInteraction` is `weather`.
        name = str(entry.get("name") or cls.__name__.removesuffix("Interaction").lower())
        if name in interactions:
            raise ToolError(
                f"Duplicate interaction name {name!r} found in {path}; rename one of them"
            )
        config = {**(entry.get("config") or {}), "name": name}
        is_interaction = isinstance(cls, type) and issubclass(cls, BaseInteraction)
        if not is_interaction and hasattr(cls, "reset") and hasattr(cls, "step"):
            interactions[name] = EnvironmentInteraction(cls, config)
        else:
            interactions[name] = cls(config)
    return interactions
