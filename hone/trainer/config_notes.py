"""Prints what a run says about its configuration before it starts."""

from __future__ import annotations

from hone.config import ComposedConfig
from hone.config.convert import show_value
from hone.config.keys import get
from hone.tracking.console import screen

STARTING_VALUES_ORIGIN = "hone train"
"""The origin label of values from starting_values.py."""


def print_config_notes(composed: ComposedConfig) -> None:
    """Prints the tree of the command, the starting values that `hone train` chose, and notes about the
    user's keys without effect."""
    if composed.tree_line:
        screen().line(composed.tree_line)
    keys = [key for key, origin in composed.origins.items() if origin == STARTING_VALUES_ORIGIN]
    settings = [f"{key}={show_value(get(composed.config, key))}" for key in keys]
    if settings:
        screen().line(
            "starting values for this data, model and device (set a key to change its value):"
        )
        half = (len(settings) + 1) // 2
        for settings_of_line in filter(None, (settings[:half], settings[half:])):
            screen().line("  " + " ".join(settings_of_line))
    if composed.notes:
        screen().line("set, but without effect here:")
        for note in composed.notes:
            screen().line(f"  {note}")
