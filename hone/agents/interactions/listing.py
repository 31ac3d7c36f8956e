"""The interactions of a run: a YAML list of classes by name.

interaction:
  - name: gsm8k
    class_name: hone.agents.interactions.gsm8k.Gsm8kInteraction
    config: {}
"""

from __future__ import annotations

from hone.agents.interactions.contract import BaseInteraction
from hone.agents.tools.contract import ToolError
from hone.agents.tools.listing import read_entries
from hone.plugins import load_object


def initialize_interactions_from_config(
    interaction_config_file: str,
) -> dict[str, BaseInteraction]:
    """Every interaction by the name that rows give in `interaction_kwargs`."""
    path = interaction_config_file
    found: dict[str, BaseInteraction] = {}
    for entry in read_entries(path, "interaction"):
        cls = load_object(str(entry["class_name"]))
        name = str(entry.get("name") or _name_of(cls.__name__))
        if name in found:
            raise ToolError(
                f"Duplicate interaction name {name!r} found in {path}; rename one of them"
            )
        found[name] = cls({**(entry.get("config") or {}), "name": name})
    return found


def _name_of(class_name: str) -> str:
    """`WeatherInteraction` is called `weather`."""
    return class_name.removesuffix("Interaction").lower()
