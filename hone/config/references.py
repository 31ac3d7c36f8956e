"""`${a.b}` references between keys: the schema's own are resolved here, the user's by OmegaConf.

The schema's references are plain and there are dozens; taking them by hand makes loading ten times faster.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from hone.config.block import Value
from hone.config.errors import ConfigError
from hone.types import JsonObject, JsonValue

PLAIN = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
BOUND = re.compile(r"\$\{(least|most):(\d+),\$\{([A-Za-z_][\w.]*)\}\}")
_REFERENCE = re.compile(r"(\$\{(?:oc\.select:\s*)?)([A-Za-z_][\w.]*)(?=\s*[},])")
_BOUNDS: dict[str, Callable[[int, int], int]] = {"least": min, "most": max}
_DEEPEST = 20
"""References to references; a longer chain is a circle."""


class _NotPlain(Exception):
    """A reference that only OmegaConf can resolve."""


def resolve(tree: JsonObject) -> JsonObject:
    """The tree with every reference replaced by the value it names."""
    try:
        resolved: JsonObject = _walk(tree, tree)
        return resolved
    except _NotPlain:
        return _by_omegaconf(tree)


def value_in(default: Value, tree: JsonObject) -> Value:
    """What a default comes to beside the values of a resolved tree."""
    try:
        return _walk(default, tree)
    except _NotPlain:
        return default


def _walk(node: Value, tree: JsonObject) -> Value:
    if isinstance(node, dict):
        return {name: _walk(value, tree) for name, value in node.items()}
    if isinstance(node, list | tuple):
        return [_walk(value, tree) for value in node]
    return _value(node, tree, 0)


def _value(value: Value, tree: JsonObject, depth: int) -> Value:
    if not isinstance(value, str) or "${" not in value:
        return value
    if depth > _DEEPEST:
        raise ConfigError(f"the reference {value} leads back to itself")
    whole = PLAIN.fullmatch(value)
    if whole:
        return _look_up(whole[1], tree, depth)
    bound = BOUND.fullmatch(value)
    if bound:
        other, limit = _look_up(bound[3], tree, depth), int(bound[2])
        return _BOUNDS[bound[1]](limit, other) if isinstance(other, int) else other
    text = PLAIN.sub(lambda match: str(_look_up(match[1], tree, depth)), value)
    if "${" in text:
        raise _NotPlain
    return text


def value_at(tree: JsonObject, key: str, default: Value = None) -> Value:
    """The value of a dotted key in a plain tree."""
    node: Value = tree
    for name in key.split("."):
        if not isinstance(node, dict) or name not in node:
            return default
        node = node[name]
    return node


def _look_up(key: str, tree: JsonObject, depth: int) -> Value:
    value = value_at(tree, key, _NotPlain)
    if value is _NotPlain or isinstance(value, dict | list | tuple):
        raise _NotPlain
    return _value(value, tree, depth + 1)


def named_keys(value: JsonValue) -> list[str]:
    """The keys that the references inside a value name."""
    return [match[2] for match in _REFERENCE.finditer(value)] if isinstance(value, str) else []


def rename_references(value: JsonValue, rename: Callable[[str], str]) -> JsonValue:
    """The value with the keys inside its references under their new names."""
    if isinstance(value, list):
        return [rename_references(item, rename) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    return _REFERENCE.sub(lambda match: match[1] + rename(match[2]), value)


def _by_omegaconf(tree: JsonObject) -> JsonObject:
    from hydra.core.utils import setup_globals
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    setup_globals()  # Hydra's own resolvers, such as `now`
    for name, bound in _BOUNDS.items():
        OmegaConf.register_new_resolver(name, bound, replace=True)
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        where = f" (in {error.full_key})" if getattr(error, "full_key", None) else ""
        raise ConfigError(
            f"a reference does not resolve: {str(error).splitlines()[0]}{where}"
        ) from None
    assert isinstance(resolved, dict)
    return {str(name): value for name, value in resolved.items()}
