"""The keys of a tree: one record per leaf, with its type, default, range and docstring.

Also the words that defaults are written in: `follows("a.b")` takes another key's value.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from hone.config.block import Block, Hint, Value
from hone.config.convert import describe_type, show_value, to_plain
from hone.config.errors import ConfigError, did_you_mean, nearest
from hone.config.ranges import Range
from hone.config.references import BOUND, PLAIN
from hone.types import JsonValue

B = TypeVar("B", bound=Block)


def follows(key: str) -> Value:
    """Default that takes the value of another key (an OmegaConf interpolation)."""
    return "${" + key + "}"


def at_most(limit: int, key: str) -> Value:
    """Default that is `limit`, or the value of another key where that is smaller."""
    return "${least:" + str(limit) + ",${" + key + "}}"


def at_least(limit: int, key: str) -> Value:
    """Default that is `limit`, or the value of another key where that is larger."""
    return "${most:" + str(limit) + ",${" + key + "}}"


@dataclass(frozen=True)
class Leaf:
    """One key with a value."""

    key: str
    hint: Hint
    default: JsonValue
    """As it is written: a reference to another key stays one."""
    bounds: Range | None
    doc: str

    @property
    def takes(self) -> str:
        """What may be written, in words."""
        return describe_type(self.hint) + (f" ({self.bounds})" if self.bounds else "")

    @property
    def followed(self) -> str | None:
        """The key whose value is the default, or None."""
        match = PLAIN.fullmatch(self.default) if isinstance(self.default, str) else None
        return match and match[1]

    @property
    def default_in_words(self) -> str:
        """The default: the value, the key it follows, or the limit."""
        if self.followed:
            return f"follows {self.followed}"
        bound = BOUND.fullmatch(self.default) if isinstance(self.default, str) else None
        if bound:
            compared = {"least": "smaller", "most": "larger"}[bound[1]]
            return f"{bound[2]}, or {bound[3]} where that is {compared}"
        return show_value(self.default)


@functools.cache
def leaves(root: type) -> dict[str, Leaf]:
    """Every leaf of a tree by its dotted key, in the order of the schema."""
    return {leaf.key: leaf for leaf in _walk(root, root(), "")}


def _walk(cls: type, instance: Value, prefix: str) -> Iterator[Leaf]:
    extras = typing.get_type_hints(cls, include_extras=True)
    for name, hint in hints(cls).items():
        key, value, inner = f"{prefix}{name}", getattr(instance, name), block_type(hint)
        if inner is not None:
            yield from _walk(inner, value, key + ".")
            continue
        parts = (extras[name], *typing.get_args(extras[name]))
        bounds = next((b for part in parts for b in getattr(part, "__metadata__", ())), None)
        yield Leaf(key, hint, to_plain(value), bounds, field_docs(cls).get(name, ""))


@functools.cache
def hints(cls: type) -> dict[str, Hint]:
    """The fields of a schema class and their types, ranges left out."""
    resolved = typing.get_type_hints(cls)
    return {field.name: resolved[field.name] for field in dataclasses.fields(cls)}


def block_type(hint: Hint) -> type | None:
    """The schema class behind a hint, or None for a plain value."""
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def find_block(root: type, key: str) -> tuple[type, str] | None:
    """The class and the docstring of the block of that name, or None."""
    cls, doc = root, ""
    for name in key.split("."):
        inner = block_type(hints(cls).get(name))
        if inner is None:
            return None
        cls, doc = inner, field_docs(cls).get(name) or inspect.getdoc(inner) or ""
    return cls, doc


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a schema class, its parents' included: nothing is written twice."""
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        docs |= _module_docs(owner.__module__).get(owner.__name__, {})
    return docs


@functools.cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    if not module.startswith("hone."):
        return {}
    parsed = ast.parse(inspect.getsource(sys.modules[module]))
    return {n.name: dict(_class_docs(n)) for n in parsed.body if isinstance(n, ast.ClassDef)}


def _class_docs(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, after in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield statement.target.id, inspect.cleandoc(str(after.value.value))


def get(config: Value, key: str) -> Value:
    """The value of a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def replace(config: B, key: str, value: Value) -> B:
    """A copy of the tree with one dotted key changed; the key must exist."""
    name, _, rest = key.partition(".")
    if name not in list(config):
        raise ConfigError(
            f"{type(config).__name__} has no key '{name}'.{did_you_mean(nearest(name, config))}"
        )
    changed = replace(getattr(config, name), rest, value) if rest else value
    return dataclasses.replace(config, **{name: changed})
