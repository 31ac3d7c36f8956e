"""Keys that a program cannot choose for its user: their defaults are only examples.

The values stay in the tree, for `hone config show`; a run asks that they be given.
"""

from __future__ import annotations

from collections.abc import Mapping

from hone.config import Composed
from hone.config.errors import ConfigError


def require_given(composed: Composed, keys: Mapping[str, str]) -> None:
    """Refuse where a key was left at its default; `keys` says what each one names."""
    missing = [key for key in keys if key not in composed.origins]
    if missing:
        raise ConfigError(
            "; ".join(f"{key} was not given: set it to {keys[key]}" for key in missing)
        )
