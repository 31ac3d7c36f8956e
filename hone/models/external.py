"""A user's own modules that must be imported first, for example to register an architecture."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from hone.plugins import PluginError


def import_external(names: str | Sequence[str] | None) -> None:
    """Import `model.external_lib`: one module, several separated by commas, or a list."""
    listed = names.split(",") if isinstance(names, str) else list(names or ())
    for name in (n.strip() for n in listed):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise PluginError(
                f"model.external_lib={name} cannot be imported ({error}); install it or add its "
                "folder to PYTHONPATH"
            ) from error
