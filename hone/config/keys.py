"""The keys of a tree: one `Leaf` per key, with its type, default, range and docstring.

Simple references (`${a.b}`) are resolved here, which makes loading ten times faster than with OmegaConf.
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
from hone.config.convert import Config, Hint, Value, describe_type, show_value, to_plain
from hone.config.errors import ConfigError
from hone.config.ranges import Range
from hone.suggestions import did_you_mean, nearest, suggestion
from hone.types import Fields, JsonObject, JsonValue, Settings

if TYPE_CHECKING:
    from omegaconf import DictConfig

B = TypeVar("B", bound=Block)
T = TypeVar("T")

PLAIN_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
"""`${a.b}`; the group is the key."""
MIN_REFERENCE = re.compile(r"\$\{least:(\d+),\$\{([A-Za-z_][\w.]*)\}\}")
"""`${least:N,${a.b}}`, the smaller of N and the value of a.b, declared with `at_most`; the groups are N and
the key."""
_REFERENCE = re.compile(r"(\$\{(?:oc\.select:\s*)?)([A-Za-z_][\w.]*)(?=\s*[},])")
"""The start of any reference, also of `${oc.select:a.b,default}`; the second group is the key."""
_MAX_REFERENCE_CHAIN = 20
"""A longer chain of references is treated as a cycle."""


@dataclass(frozen=True)
class Leaf:
    """A key that has a value, not a block."""

    key: str
    hint: Hint
    default: JsonValue
    """The default as declared; references to other keys are not resolved."""
    bounds: Range | None
    doc: str

    @property
    def accepted_values(self) -> str:
        """The values that the key accepts, in words."""
        return describe_type(self.hint) + (f" ({self.bounds})" if self.bounds else "")

    @property
    def followed_key(self) -> str | None:
        """The other key whose value this key has by default, or None."""
        match = PLAIN_REFERENCE.fullmatch(self.default) if isinstance(self.default, str) else None
        return match and match[1]

    @property
    def default_in_words(self) -> str:
        """The default, in words: the value, the key that it follows, or the smaller of two."""
        if self.followed_key:
            return f"follows {self.followed_key}"
        if minimum := MIN_REFERENCE.fullmatch(str(self.default)):
            return f"{minimum[1]}, or {minimum[2]} where that is smaller"
        return show_value(self.default)


@functools.cache
def leaves(root: type) -> dict[str, Leaf]:
    """Returns every leaf of a tree by its dotted key, in schema order."""
    return {leaf.key: leaf for leaf in _leaves_of_block(root, root(), "")}


def _leaves_of_block(cls: type, instance: Config, prefix: str) -> Iterator[Leaf]:
    annotated_hints = typing.get_type_hints(cls, include_extras=True)
    for name, hint in hints(cls).items():
        key, value, block_class = f"{prefix}{name}", getattr(instance, name), block_type(hint)
        if block_class is not None:
            yield from _leaves_of_block(block_class, value, key + ".")
            continue
        # The range is in the annotation of the hint, or of a member of a union.
        members = (annotated_hints[name], *typing.get_args(annotated_hints[name]))
        ranges = (item for member in members for item in getattr(member, "__metadata__", ()))
        bounds = next(ranges, None)
        default = to_plain(value)
        if isinstance(default, str) and default.startswith("${."):  # relative to this block
            default = "${" + prefix + default.removeprefix("${.")
        yield Leaf(key, hint, default, bounds, _field_doc(cls, name))


@functools.cache
def blocks(root: type) -> dict[str, type]:
    """Returns the class of every block of a tree by its dotted key; the root's key is empty."""
    classes = {"": root}
    for name, hint in hints(root).items():
        if block_class := block_type(hint):
            classes |= {
                f"{name}.{key}".rstrip("."): cls for key, cls in blocks(block_class).items()
            }
    return classes


@functools.cache
def hints(cls: type) -> dict[str, Hint]:
    """Returns the fields of a schema class and their types, without ranges."""
    field_types = typing.get_type_hints(cls)
    return {field.name: field_types[field.name] for field in dataclasses.fields(cls)}


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
        for field, next_node in itertools.pairwise(getattr(node, "body", ())):
            if isinstance(field, ast.AnnAssign) and isinstance(next_node, ast.Expr):
                text = inspect.cleandoc(ast.literal_eval(next_node.value))
                docs[node.name, ast.unparse(field.target)] = text  # type: ignore[attr-defined]
    return docs


def get(config: Config, key: str) -> Value:
    """Returns the value of a dotted key."""
    return functools.reduce(getattr, key.split("."), config)


def replace(config: B, key: str, value: Value) -> B:
    """Returns a copy of the tree with one dotted key changed; the key must exist."""
    name, _, rest = key.partition(".")
    if name not in list(config):
        hint = suggestion(name, config)
        raise ConfigError(f"{type(config).__name__} has no key '{name}'.{hint}")
    new_value = replace(getattr(config, name), rest, value) if rest else value
    return dataclasses.replace(config, **{name: new_value})


def owner_of(root: type, key: str) -> str | None:
    """Returns the key of the declared leaf or block that contains `key`, or None."""
    parts = key.split(".")
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    leaf = next((prefix for prefix in prefixes if prefix in leaves(root)), None)
    return leaf or (key if key in blocks(root) else None)


def unknown_key_message(
    root: type, key: str, added: bool = False, *, hint: str = "", short_names: Iterable[str] = ()
) -> str | None:
    """Returns the message about an unknown key, with `hint` or suggestions if any; None for a key that the
    user added with `+` and that resembles no known key."""
    parts = key.split(".")
    depth = max(i for i in range(len(parts)) if ".".join(parts[:i]) in blocks(root))
    parent, name, is_last = ".".join(parts[:depth]), parts[depth], depth == len(parts) - 1
    min_similarity = 0.6 if is_last else 0.75
    if added:  # with `+`, the user expects that the key does not exist yet
        min_similarity = 0.85
    if hint and not added:
        return f"{parent or 'the config'} has no key '{name}'.{hint}"
    siblings = [*hints(blocks(root)[parent]), *(() if parent else short_names)]
    sibling = nearest(name, siblings, min_similarity)
    suggestions = [sibling] if sibling else suggested_keys(root, key, is_last)
    if added and not suggestions:
        return None
    return f"{parent or 'the config'} has no key '{name}'.{did_you_mean(*suggestions)}"


def suggested_keys(root: type, key: str, is_last: bool = True) -> list[str]:
    """Returns the keys that a short form may mean, or an empty list if there are more than four.

    If no key matches, looks for keys that end in the same name: returns those in the same top-level block, or
    the only one in the other blocks.
    """
    all_keys = list(leaves(root))
    parent, _, name = key.rpartition(".")
    suggestions = [full_key for full_key in all_keys if full_key.endswith(f".{key}")]
    suggestions = suggestions or keys_matching(key, all_keys)
    if not suggestions and key.split(".")[0] not in hints(root):  # the final name may be misspelled
        parent_names = set(filter(None, parent.split(".")))
        paths = [full_key.split(".") for full_key in all_keys]
        final_names = [path[-1] for path in paths if parent_names.issubset(path[:-1])]
        suggestions = keys_matching(f"{parent}.{nearest(name, final_names)}", all_keys)
    elif not suggestions and is_last:
        top_block = key.split(".")[0]
        same_name = [full_key for full_key in all_keys if full_key.split(".")[-1] == name]
        suggestions = [full_key for full_key in same_name if full_key.startswith(f"{top_block}.")]
        # Several other blocks: most of them configure another model, such as the critic.
        suggestions = suggestions or (same_name if len(same_name) == 1 else [])
    return suggestions if len(suggestions) <= 4 else []


def keys_matching(short: str, keys: Iterable[str]) -> list[str]:
    """Returns the keys that a short form may mean: `actor.lr` matches `actor_rollout_ref.actor.optim.lr`,
    because the final names are equal and the key contains the other names of the short form."""
    *parent_names, final_name = short.lstrip(".").split(".")
    paths = ((key, key.split(".")) for key in keys)
    return [
        key
        for key, path in paths
        if path[-1] == final_name and set(parent_names).issubset(path[:-1])
    ]


def omega_conf_to_dataclass(
    config: DictConfig | Settings | T | None, dataclass_type: type[T] | None = None
) -> T | None:
    """Creates a dataclass of the given type or of the type that `_target_` names, as verl does."""
    if dataclasses.is_dataclass(config):
        return config
    block: T | None = _create_block(dataclass_type, plain_containers(config or {}))  # type: ignore[arg-type]
    return block


def plain_containers(config: DictConfig | Settings) -> Fields:
    """Converts a config to nested dicts and lists, with references resolved."""
    from omegaconf import OmegaConf

    omega_config = config if OmegaConf.is_config(config) else OmegaConf.create(dict(config))
    tree: Value = OmegaConf.to_container(omega_config, resolve=True)
    return {str(key): value for key, value in tree.items()}


def _create_block(cls: Hint, tree: Settings) -> Config:
    """Creates a block of `cls`, or of the class that `_target_` names (under hone's or verl's path); returns
    None if there is neither."""
    target = re.sub(r"^verl(?=\.)", "hone", str(tree.get("_target_") or ""))
    module, _, name = target.rpartition(".")
    if cls is None and not module:
        return None
    cls = cls or getattr(importlib.import_module(module), name)
    values = {key: value for key, value in tree.items() if key != "_target_"}
    field_names = [field.name for field in dataclasses.fields(cls)]
    for key, value in values.items():
        if key not in field_names:
            hint = suggestion(key, field_names)
            raise TypeError(f"{cls.__name__} has no field {key!r}.{hint}")
        if isinstance(value, Mapping):
            block = _create_block(block_type(hints(cls)[key]), value)
            values[key] = value if block is None else block
    return cls(**values)


def resolve(values: JsonObject) -> JsonObject:
    """Returns the values by dotted key, with every reference resolved."""
    try:
        return {key: resolve_value(value, values) for key, value in values.items()}
    except KeyError:
        return resolve_with_omegaconf(values)


def resolve_value(value: Value, values: JsonObject, depth: int = 0) -> Value:
    """Returns a value with its references to `values` resolved; raises KeyError if only OmegaConf can
    resolve one of them."""
    if isinstance(value, dict):
        return {name: resolve_value(item, values, depth) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [resolve_value(item, values, depth) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    if "\\${" in value:  # an escaped reference is text
        raise KeyError(value)
    if depth > _MAX_REFERENCE_CHAIN:
        raise ConfigError(f"the reference {value} leads back to itself")

    def look_up(key: str) -> Value:
        return resolve_value(values[key], values, depth + 1)

    if reference := PLAIN_REFERENCE.fullmatch(value):
        return look_up(reference[1])
    if minimum := MIN_REFERENCE.fullmatch(value):
        other = look_up(minimum[2])
        return min(int(minimum[1]), other) if isinstance(other, int) else other
    text = PLAIN_REFERENCE.sub(lambda match: str(look_up(match[1])), value)
    if "${" in text:
        raise KeyError(value)
    return text


def resolve_default(default: Value, values: JsonObject) -> Value:
    """Returns a default of the schema with its references resolved.

    If only OmegaConf can resolve one of the references, returns the default unchanged.
    """
    with contextlib.suppress(KeyError):
        return resolve_value(default, values)
    return default


def referenced_keys(value: JsonValue) -> list[str]:
    """Returns the keys that a value references."""
    return [match[2] for match in _REFERENCE.finditer(value)] if isinstance(value, str) else []


def rename_references(value: JsonValue, rename: Callable[[str], str]) -> JsonValue:
    """Renames the keys in the references of a value."""
    if isinstance(value, list):
        return [rename_references(item, rename) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    return _REFERENCE.sub(lambda match: match[1] + rename(match[2]), value)


def resolve_with_omegaconf(values: JsonObject) -> JsonObject:
    """Returns the values by dotted key, with every reference resolved by OmegaConf and Hydra."""
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
        failed_key = getattr(error, "full_key", None)
        where = f" (in {failed_key})" if failed_key else ""
        reason = str(error).splitlines()[0]
        raise ConfigError(f"a reference does not resolve: {reason}{where}") from None

    def get_child(node: Value, name: str) -> Value:
        return node.get(name) if isinstance(node, dict) else None

    return {key: functools.reduce(get_child, key.split("."), plain) for key in values}
