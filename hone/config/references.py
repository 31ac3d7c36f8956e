"""`${a.b}` references between keys: the schema's own are resolved here, the user's by OmegaConf.

The schema's references are plain and there are dozens; taking them by hand makes loading ten times faster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from hone.config.errors import ConfigError
from hone.types import JsonValue

_PLAIN = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_LEAST = re.compile(r"\$\{least:(\d+),\$\{([A-Za-z_][\w.]*)\}\}")
_REFERENCE = re.compile(r"(\$\{(?:oc\.select:\s*)?)([A-Za-z_][\w.]*)(?=\s*[},])")
_HERE = "the reference itself"
_DEEPEST = 20
"""References to references; a longer chain is a circle."""


class _NotPlain(Exception):
    """A reference that only OmegaConf can resolve."""


def resolve(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with every reference replaced by the value it names."""
    try:
        resolved: dict[str, Any] = _walk(tree, tree)
        return resolved
    except _NotPlain:
        return _by_omegaconf(tree)


def value_in(default: Any, tree: dict[str, Any]) -> Any:
    """What a default comes to beside the values of a resolved tree."""
    try:
        return _walk(default, tree)
    except _NotPlain:
        return default


def _walk(node: Any, tree: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        return {name: _walk(value, tree) for name, value in node.items()}
    if isinstance(node, list | tuple):
        return [_walk(value, tree) for value in node]
    return _value(node, tree, 0)


def _value(value: Any, tree: dict[str, Any], depth: int) -> Any:
    if not isinstance(value, str) or "${" not in value:
        return value
    if depth > _DEEPEST:
        raise ConfigError(f"the reference {value} leads back to itself")
    whole = _PLAIN.fullmatch(value)
    if whole:
        return _look_up(whole[1], tree, depth)
    least = _LEAST.fullmatch(value)
    if least:
        other = _look_up(least[2], tree, depth)
        return min(int(least[1]), other) if isinstance(other, int) else other
    text = _PLAIN.sub(lambda match: str(_look_up(match[1], tree, depth)), value)
    if "${" in text:
        raise _NotPlain
    return text


def _look_up(key: str, tree: dict[str, Any], depth: int) -> Any:
    node: Any = tree
    for name in key.split("."):
        if not isinstance(node, dict) or name not in node:
            raise _NotPlain
        node = node[name]
    if isinstance(node, dict | list | tuple):
        raise _NotPlain
    return _value(node, tree, depth + 1)


def rename_references(value: JsonValue, rename: Callable[[str], str]) -> JsonValue:
    """The value with the keys inside its references under their new names."""
    if isinstance(value, list):
        return [rename_references(item, rename) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    return _REFERENCE.sub(lambda match: match[1] + rename(match[2]), value)


def look_up(text: str, tree: Mapping[str, JsonValue]) -> JsonValue:
    """What a value that is one reference stands for, a block too; None where it names nothing."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _add_resolvers()
    config = OmegaConf.create({**tree, _HERE: text})
    try:
        value = config[_HERE]
    except OmegaConfBaseException:
        return None
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return {str(k): v for k, v in plain.items()} if isinstance(plain, dict) else plain


def _add_resolvers() -> None:
    from hydra.core.utils import setup_globals
    from omegaconf import OmegaConf

    setup_globals()  # Hydra's own resolvers, such as `now`
    OmegaConf.register_new_resolver("least", lambda *numbers: min(numbers), replace=True)


def _by_omegaconf(tree: dict[str, Any]) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _add_resolvers()
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        where = f" (in {error.full_key})" if getattr(error, "full_key", None) else ""
        raise ConfigError(
            f"a reference does not resolve: {str(error).splitlines()[0]}{where}"
        ) from None
    assert isinstance(resolved, dict)
    return {str(name): value for name, value in resolved.items()}
