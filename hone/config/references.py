"""`${a.b}` references between keys: plain ones are resolved here, others by OmegaConf.

The schema's references are plain and there are dozens; taking them by hand makes loading ten times faster.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from hone.config.convert import Value
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


def resolve(values: JsonObject) -> JsonObject:
    """The values by dotted key, with every reference replaced by the value of the key that it names."""
    try:
        return {key: _resolved(value, values) for key, value in values.items()}
    except _NotPlain:
        return by_omegaconf(values)


def value_in(default: Value, values: JsonObject) -> Value:
    """What a default of the schema comes to beside the values of other keys."""
    try:
        return _resolved(default, values)
    except _NotPlain:
        return default


def _resolved(value: Value, values: JsonObject, depth: int = 0) -> Value:
    if isinstance(value, dict):
        return {name: _resolved(inner, values, depth) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_resolved(inner, values, depth) for inner in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    if depth > _DEEPEST:
        raise ConfigError(f"the reference {value} leads back to itself")

    def look_up(key: str) -> Value:
        if key not in values:
            raise _NotPlain
        return _resolved(values[key], values, depth + 1)

    if whole := PLAIN.fullmatch(value):
        return look_up(whole[1])
    if bound := BOUND.fullmatch(value):
        other, limit = look_up(bound[3]), int(bound[2])
        return _BOUNDS[bound[1]](limit, other) if isinstance(other, int) else other
    text = PLAIN.sub(lambda match: str(look_up(match[1])), value)
    if "${" in text:
        raise _NotPlain
    return text


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


def by_omegaconf(values: JsonObject) -> JsonObject:
    """The same with OmegaConf's and Hydra's resolvers."""
    from hydra.core.utils import setup_globals
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    setup_globals()  # Hydra's own resolvers, such as `now`
    for name, bound in _BOUNDS.items():
        OmegaConf.register_new_resolver(name, bound, replace=True)
    try:
        tree: Value = OmegaConf.to_container(OmegaConf.create(_nested(values)), resolve=True)
    except OmegaConfBaseException as error:
        where = f" (in {error.full_key})" if getattr(error, "full_key", None) else ""
        reason = str(error).splitlines()[0]
        raise ConfigError(f"a reference does not resolve: {reason}{where}") from None
    return {key: _at(tree, key.split(".")) for key in values}


def _at(tree: Value, names: list[str]) -> Value:
    for name in names:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _nested(values: JsonObject) -> JsonObject:
    """The tree of values by dotted key; a block wins over a value of the same name."""
    tree: JsonObject = {}
    for key, value in values.items():
        node: Value = tree
        *way, last = key.split(".")
        for name in way:
            node[name] = inner = node[name] if isinstance(node.get(name), dict) else {}
            node = inner
        if not isinstance(node.get(last), dict):
            node[last] = value
    return tree
