"""The keys of a tree: one record per leaf, with its type, default, range and docstring.

Also resolves `${a.b}` references and suggests keys for unknown ones. The schema has dozens of simple
references; resolving them here instead of with OmegaConf makes loading ten times faster.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from hone.config.block import Block
from hone.config.convert import Hint, Value, describe_type, show_value, to_plain
from hone.config.errors import ConfigError, did_you_mean, nearest
from hone.config.ranges import Range
from hone.types import Fields, JsonObject, JsonValue, Settings

if TYPE_CHECKING:
    from omegaconf import DictConfig

B = TypeVar("B", bound=Block)
T = TypeVar("T")

PLAIN = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
BOUND = re.compile(r"\$\{least:(\d+),\$\{([A-Za-z_][\w.]*)\}\}")
_REFERENCE = re.compile(r"(\$\{(?:oc\.select:\s*)?)([A-Za-z_][\w.]*)(?=\s*[},])")
_DEEPEST = 20
"""Maximum depth of nested references; a longer chain is treated as a cycle."""


@dataclass(frozen=True)
class Leaf:
    """One key with a value."""

    key: str
    hint: Hint
    default: JsonValue
    """The default as declared; references to other keys are not resolved."""
    bounds: Range | None
    doc: str

    @property
    def takes(self) -> str:
        """Describes in words the values that the key accepts."""
        return describe_type(self.hint) + (f" ({self.bounds})" if self.bounds else "")

    @property
    def followed(self) -> str | None:
        """The key whose value is the default, or None."""
        match = PLAIN.fullmatch(self.default) if isinstance(self.default, str) else None
        return match and match[1]

    @property
    def default_in_words(self) -> str:
        """Describes the default: the value, the key it follows, or the limit."""
        if self.followed:
            return f"follows {self.followed}"
        if bound := BOUND.fullmatch(str(self.default)):
            return f"{bound[1]}, or {bound[2]} where that is smaller"
        return show_value(self.default)


@functools.cache
def leaves(root: type) -> dict[str, Leaf]:
    """Returns every leaf of a tree by its dotted key, in schema order."""
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
        default = to_plain(value)
        if isinstance(default, str) and default.startswith("${."):  # relative to this block
            default = "${" + prefix + default.removeprefix("${.")
        yield Leaf(key, hint, default, bounds, _field_doc(cls, name))


@functools.cache
def blocks(root: type) -> dict[str, type]:
    """Returns the class of every block of a tree by its dotted key; the root's key is empty."""
    classes = {"": root}
    for name, hint in hints(root).items():
        if inner := block_type(hint):
            classes |= {f"{name}.{key}".rstrip("."): cls for key, cls in blocks(inner).items()}
    return classes


@functools.cache
def hints(cls: type) -> dict[str, Hint]:
    """Returns the fields of a schema class and their types, without ranges."""
    resolved = typing.get_type_hints(cls)
    return {field.name: resolved[field.name] for field in dataclasses.fields(cls)}


def block_type(hint: Hint) -> type | None:
    """Returns the schema class of a hint, or None for a plain value."""
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def _field_doc(cls: type, name: str) -> str:
    """Returns the docstring under a field in the schema class or in the parent that declares it."""
    owners = [owner for owner in cls.__mro__ if owner.__module__.startswith("hone.")]
    docs = (_module_docs(owner.__module__).get((owner.__name__, name)) for owner in owners)
    return next(filter(None, docs), "")


@functools.cache
def _module_docs(module: str) -> dict[tuple[str, str], str]:
    """Returns the docstring under each field of the module's classes, by class and name."""
    docs: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        for field, after in itertools.pairwise(getattr(node, "body", ())):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                text = inspect.cleandoc(ast.literal_eval(after.value))
                docs[node.name, ast.unparse(field.target)] = text  # type: ignore[attr-defined]
    return docs


def get(config: Value, key: str) -> Value:
    """Returns the value of a dotted key."""
    return functools.reduce(getattr, key.split("."), config)


def replace(config: B, key: str, value: Value) -> B:
    """Returns a copy of the tree with one dotted key changed; the key must exist."""
    name, _, rest = key.partition(".")
    if name not in list(config):
        hint = did_you_mean(nearest(name, config))
        raise ConfigError(f"{type(config).__name__} has no key '{name}'.{hint}")
    changed = replace(getattr(config, name), rest, value) if rest else value
    return dataclasses.replace(config, **{name: changed})


def owner_of(root: type, key: str) -> str | None:
    """Returns the declared leaf or block that contains the key, or None."""
    parts = key.split(".")
    starts = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    leaf = next((start for start in starts if start in leaves(root)), None)
    return leaf or (key if key in blocks(root) else None)


def unknown_key(root: type, key: str, added: bool = False) -> str | None:
    """Returns the message for an unknown key, with suggestions if any; None for a key that the user
    added with `+` and that resembles no other."""
    parts = key.split(".")
    depth = max(i for i in range(len(parts)) if ".".join(parts[:i]) in blocks(root))
    parent, name, is_last = ".".join(parts[:depth]), parts[depth], depth == len(parts) - 1
    cutoff = 0.85 if added else 0.6 if is_last else 0.75
    sibling = nearest(name, hints(blocks(root)[parent]), cutoff)
    meant = [sibling] if sibling else suggested_keys(root, key, is_last)
    if added and not meant:
        return None
    return f"{parent or 'the config'} has no key '{name}'.{did_you_mean(*meant)}"


def suggested_keys(root: type, key: str, is_last: bool = True) -> list[str]:
    """Returns the keys that a short form may mean, else the keys with the same name in the same block, or
    the only one anywhere: a suggestion must not set another model's key."""
    every = list(leaves(root))
    name = key.rpartition(".")[2]
    way = key.removesuffix(name)
    meant = [k for k in every if k.endswith(f".{key}")] or fitting(key, every)
    if not meant and key.split(".")[0] not in hints(root):  # its last name may be misspelled
        endings = {end for k in every if fitting(f"{way}{(end := k.rpartition('.')[2])}", [k])}
        meant = fitting(f"{way}{nearest(name, endings)}", every)
    elif not meant and is_last:
        same = [k for k in every if k.rpartition(".")[2] == name]
        inside = [k for k in same if k.startswith(key.split(".")[0] + ".")]
        meant = inside or (same if len(same) == 1 else [])
    return meant if len(meant) <= 4 else []


def fitting(short: str, keys: Iterable[str]) -> list[str]:
    """Returns the keys that a short form may mean: `actor.lr` matches `actor_rollout_ref.actor.optim.lr`,
    which ends with the same name and contains the others."""
    *words, last = short.split(".")
    ways = ((key, key.split(".")) for key in keys)
    return [key for key, way in ways if way[-1] == last and set(words) <= set(way[:-1])]


def omega_conf_to_dataclass(
    config: DictConfig | Settings | T | None, dataclass_type: type[T] | None = None
) -> T | None:
    """Makes a dataclass of the given type or of the type named by `_target_`, as verl does for one block."""
    if dataclasses.is_dataclass(config):
        return config
    block: T | None = _made(dataclass_type, plain_containers(config or {}))  # type: ignore[arg-type]
    return block


def plain_containers(config: DictConfig | Settings) -> Fields:
    """Converts a config to nested dicts and lists, with references resolved."""
    from omegaconf import OmegaConf

    made = config if OmegaConf.is_config(config) else OmegaConf.create(dict(config))
    tree: Value = OmegaConf.to_container(made, resolve=True)
    return {str(key): value for key, value in tree.items()}


def _made(cls: Value, tree: Settings) -> Value:
    """Makes a block of a class or of the one that `_target_` names (verl's paths are mapped to ours);
    returns None without a class."""
    module, _, name = re.sub(r"^verl(?=\.)", "hone", str(tree.get("_target_") or "")).rpartition(
        "."
    )
    if cls is None and not module:
        return None
    cls = cls or getattr(importlib.import_module(module), name)
    values = {key: value for key, value in tree.items() if key != "_target_"}
    fields = {field.name for field in dataclasses.fields(cls)}
    for key, value in values.items():
        if key not in fields:
            hint = did_you_mean(nearest(key, fields))
            raise TypeError(f"{cls.__name__} has no field {key!r}.{hint}")
        if isinstance(value, Mapping):
            block = _made(block_type(hints(cls)[key]), value)
            values[key] = value if block is None else block
    return cls(**values)


class _NotPlain(Exception):
    """A reference that only OmegaConf can resolve."""


def resolve(values: JsonObject) -> JsonObject:
    """Returns the values by dotted key, with every reference resolved."""
    try:
        return {key: _resolved(value, values) for key, value in values.items()}
    except _NotPlain:
        return by_omegaconf(values)


def value_in(default: Value, values: JsonObject) -> Value:
    """Resolves a default of the schema against the values of other keys."""
    with contextlib.suppress(_NotPlain):
        return _resolved(default, values)
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
        other = look_up(bound[2])
        return min(int(bound[1]), other) if isinstance(other, int) else other
    text = PLAIN.sub(lambda match: str(look_up(match[1])), value)
    if "${" in text:
        raise _NotPlain
    return text


def named_keys(value: JsonValue) -> list[str]:
    """Returns the keys that a value references."""
    return [match[2] for match in _REFERENCE.finditer(value)] if isinstance(value, str) else []


def rename_references(value: JsonValue, rename: Callable[[str], str]) -> JsonValue:
    """Renames the keys in the references of a value."""
    if isinstance(value, list):
        return [rename_references(item, rename) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    return _REFERENCE.sub(lambda match: match[1] + rename(match[2]), value)


def by_omegaconf(values: JsonObject) -> JsonObject:
    """Does the same as `resolve`, with OmegaConf's and Hydra's resolvers."""
    from hydra.core.utils import setup_globals
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    setup_globals()  # Hydra's resolvers, such as `now`
    OmegaConf.register_new_resolver("least", min, replace=True)
    tree = OmegaConf.create({})
    for key, value in values.items():
        OmegaConf.update(tree, key, value, force_add=True)
    try:
        plain: Value = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        where = f" (in {error.full_key})" if getattr(error, "full_key", None) else ""
        reason = str(error).splitlines()[0]
        raise ConfigError(f"a reference does not resolve: {reason}{where}") from None

    def inner(tree: Value, name: str) -> Value:
        return tree.get(name) if isinstance(tree, dict) else None

    return {key: functools.reduce(inner, key.split("."), plain) for key in values}
