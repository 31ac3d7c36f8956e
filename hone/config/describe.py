"""What is known about a key: type, default, docstring, state, range, other names.

Docstrings are read from the source, where they stand under their field; nothing is written twice.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hone.config import aliases
from hone.config.convert import describe_type, show_value, to_plain
from hone.config.keys import block_type, hints, walk_fields
from hone.config.ranges import Range, ranges
from hone.config.states import renames
from hone.types import JsonValue

if TYPE_CHECKING:
    from hone.config.trees import Tree


@dataclass(frozen=True)
class KeyInfo:
    """One leaf of a tree."""

    key: str
    takes: str
    default: JsonValue
    doc: str
    bounds: Range | None
    old_names: tuple[str, ...]


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Docstring under each field of a schema class, its parents' included."""
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if owner is object:
            continue
        docs |= _module_docs(owner.__module__).get(owner.__name__, {})
    return docs


@functools.cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    parsed = ast.parse(inspect.getsource(sys.modules[module]))
    return {n.name: dict(_class_docs(n)) for n in parsed.body if isinstance(n, ast.ClassDef)}


def _class_docs(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, after in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield statement.target.id, inspect.cleandoc(str(after.value.value))


def old_names(tree: str) -> dict[str, str]:
    """Every other name of a tree's keys, with what it comes to."""
    if tree != "ppo_trainer":
        return renames(tree)
    rules = {old: rule.meaning for old, rule in aliases.RULES.items()}
    return {**renames(tree), **rules, **aliases.GROUPED}


def describe_keys(tree: Tree) -> list[KeyInfo]:
    """Every leaf of a tree, in the order of the schema."""
    renamed: dict[str, list[str]] = {}
    for old, new in old_names(tree.name).items():
        renamed.setdefault(new, []).append(old)
    infos = []
    for key, owner, _, default in walk_fields(tree.root):
        name = key.rsplit(".", 1)[-1]
        infos.append(
            KeyInfo(
                key=key,
                takes=describe_type(hints(owner)[name]),
                default=to_plain(default),
                doc=field_docs(owner).get(name, ""),
                bounds=ranges(tree.root).get(key),
                old_names=tuple(renamed.get(key, ())),
            )
        )
    return infos


def find_keys(key: str, trees: Iterable[Tree]) -> list[tuple[Tree, KeyInfo]]:
    """Every tree that has the leaf, with what is known about it there."""
    return [(tree, info) for tree in trees for info in describe_keys(tree) if info.key == key]


def find_blocks(key: str, trees: Iterable[Tree]) -> list[tuple[Tree, type, str]]:
    """Every tree that has a block of this name: tree, class, docstring."""
    found = []
    for tree in trees:
        cls, doc = tree.root, ""
        for name in key.split("."):
            inner = block_type(hints(cls).get(name))
            if inner is None:
                break
            cls, doc = inner, field_docs(cls).get(name) or inspect.getdoc(inner) or ""
        else:
            found.append((tree, cls, doc))
    return found


def follows_key(default: JsonValue) -> str | None:
    """The key a default follows, or None."""
    if isinstance(default, str) and default.startswith("${") and default.endswith("}"):
        inner = default[2:-1]
        return inner if "$" not in inner and ":" not in inner else None
    return None


def default_in_words(default: JsonValue) -> str:
    """A default as one reads it: the value, the key it follows, or the limit."""
    followed = follows_key(default)
    if followed:
        return f"follows {followed}"
    for word, compared in (("least", "smaller"), ("most", "larger")):
        if isinstance(default, str) and default.startswith(f"${{{word}:"):
            limit, _, key = default[len(word) + 3 : -1].partition(",")
            return f"{limit}, or {key[2:-1]} where that is {compared}"
    return show_value(default)
