"""From what the user wrote to the frozen tree: aliases, unknown keys, interpolation, types, checks.

The order of precedence is schema, files in the order of their defaults list, command line.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from hone.config.absent import absent_rule
from hone.config.convert import (
    build,
    build_anyway,
    show_value,
    takes_null,
    to_plain,
    told_misfits,
)
from hone.config.errors import ConfigError, did_you_mean, nearest
from hone.config.evaluation import EvaluationConfig
from hone.config.generation import GenerationConfig
from hone.config.keys import block_type, hints, walk_fields
from hone.config.references import look_up, rename_references, resolve, value_in
from hone.config.schema import PPOTrainerConfig
from hone.config.sft import SFTConfig
from hone.config.sources import COMMAND_LINE, GROUPS, Setting, flatten, read_config
from hone.config.states import Rule, rule_of
from hone.config.trees import BUILT_IN, TREES, Tree
from hone.types import JsonObject

T = TypeVar("T")

_SUGGESTED = re.compile(r"Did you mean '([^']+)'")
_MOST_SUGGESTED = 4

Further = Callable[[Any, dict[str, str]], tuple[list[str], list[str]]]
"""From a tree and the keys that were set to problems and notes."""


@dataclass(frozen=True)
class Composed:
    """A checked tree, the origin of each value that someone set, and what to say at start."""

    config: Any
    origins: dict[str, str]
    notes: tuple[str, ...] = ()
    """Neutral keys that were set, and keys without effect: the run lists them once."""

    def origin(self, key: str) -> str:
        """Where the value of a dotted key came from."""
        return self.origins.get(key, "default")


def compose(
    overrides: Sequence[str] = (),
    *,
    config_name: str = "ppo_trainer",
    config_path: str | Path | None = None,
    config_dir: str | Path | None = None,
    schema: str | None = None,
    starting: Callable[[dict[str, Any]], list[Setting]] | None = None,
    further: Further | None = None,
) -> Composed:
    """Resolve a configuration and remember where each value came from.

    `config_path` and `config_dir` are folders of the user's own YAML files. `starting` gives values for
    keys that were not set, from those that were, by dotted key. `further` are checks of what the tree
    asks for beyond its values: which columns an algorithm reads.
    """
    name = config_name.removesuffix(".yaml").removesuffix(".yml")
    folders = [folder for folder in (config_path, config_dir) if folder]
    named, settings = read_config(name, folders, overrides, BUILT_IN)
    tree = TREES[schema or named or "ppo_trainer"]
    if starting is not None:
        given = {s.key: s.value for s in tree.translate(settings, [])}
        settings = [*starting(given), *settings]
    return compose_settings(tree, settings, further)


def compose_settings(
    schema: Tree, settings: Sequence[Setting], further: Further | None = None
) -> Composed:
    """Apply settings to the schema's defaults and check the result; all defects are reported at once."""
    root = schema.root
    tree = copy.deepcopy(to_plain(root()))
    origins: dict[str, str] = {}
    problems: list[str] = []
    notes: list[str] = []
    for setting in _settled(schema, schema.translate(settings, problems), tree):
        rule = absent_rule(setting.key) if _owner(root, setting.key) is None else None
        if rule is not None:
            answer = _answer(setting.key, setting.value, None, rule, setting.origin)
            (notes if rule.lets_through(setting.value, None) else problems).append(answer)
            continue
        problem = _apply(tree, root, setting)
        if problem:
            problems.append(problem)
        else:
            origins[setting.key] = setting.origin
    try:
        config: Any
        config, misfits = build_anyway(root, resolve(tree), origins)
    except ConfigError as error:  # a reference that leads nowhere
        raise ConfigError([*problems, *error.problems]) from None
    problems += told_misfits(misfits, origins) if misfits else []
    for key in misfits:
        config = replace(config, key, default_values(root)[key])
    more, more_notes = _checked(config, schema, origins, further)
    problems += [text for text in more if not _follows_from(text, misfits, problems)]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return Composed(config, origins, tuple(dict.fromkeys([*notes, *more_notes])))


def _checked(
    config: Any, schema: Tree, origins: dict[str, str], further: Further | None
) -> tuple[list[str], list[str]]:
    """Problems and notes of a tree whose values all have their types."""
    problems: list[str] = []
    notes: list[str] = []
    asked = {key: origins[key] for key in _asked_for(config, origins)}
    _answer_states(config, schema, asked, problems, notes)
    problems.extend(schema.find_problems(config, origins))
    notes.extend(schema.find_idle(config, asked))
    if further is not None:
        more_problems, more_notes = further(config, asked)
        problems.extend(more_problems)
        notes.extend(more_notes)
    return problems, notes


def _follows_from(text: str, misfits: Iterable[str], problems: Sequence[str]) -> bool:
    """Whether a problem may only be there because another left a key at its default."""
    suggested = (word for told in problems for word in _SUGGESTED.findall(told))
    return any(f"{key}=" in text for key in (*misfits, *suggested))


def _settled(schema: Tree, settings: Sequence[Setting], defaults: JsonObject) -> Iterator[Setting]:
    """The settings that give a value. References get the names that keys have here, and those to a
    whole block are replaced by what they name. Null in a file is no value where a key takes none."""

    def renamed(key: str) -> str:
        moved = schema.translate([Setting(key, None, "")], [])
        return moved[0].key if len(moved) == 1 else key

    settings = [dataclasses.replace(s, value=rename_references(s.value, renamed)) for s in settings]
    types = {key: hints(cls)[key.rpartition(".")[2]] for key, cls, *_ in walk_fields(schema.root)}
    for setting in settings:
        owner, value = _owner(schema.root, setting.key), setting.value
        from_file = not setting.origin.startswith(COMMAND_LINE)
        if value is None and from_file and owner in types and not takes_null(types[owner]):
            continue
        if isinstance(value, str) and value.startswith("${") and owner not in types:
            # A key that is not declared takes what was written; defaults ask for nothing.
            tree = _nested(settings, {} if owner is None else defaults)
            yield from flatten(look_up(value, tree), setting.key, setting.origin)
        else:
            yield setting


def _nested(settings: Sequence[Setting], defaults: JsonObject) -> JsonObject:
    """The defaults with every setting written into them, declared or not."""
    tree = copy.deepcopy(defaults)
    for setting in settings:
        node = tree
        *way, last = setting.key.split(".")
        for name in way:
            inner = node.get(name)
            node[name] = node = inner if isinstance(inner, dict) else {}
        node[last] = setting.value
    return tree


@functools.cache
def default_values(root: type) -> dict[str, Any]:
    """The value of every leaf where nothing is set, references followed."""
    config: Any = build(root, resolve(to_plain(root())), {})
    return {key: get(config, key) for key, *_ in walk_fields(root)}


def _asked_for(config: Any, origins: dict[str, str]) -> Iterator[str]:
    """The keys that someone set, in a file only where that changes something: a run's saved config
    writes every default out."""
    values = config_to_dict(config)
    defaults = {key: to_plain(default) for key, _, _, default in walk_fields(type(config))}
    for key, origin in origins.items():
        leaf = _owner(type(config), key)
        usual = value_in(defaults[leaf], values) if leaf in defaults else None
        if (
            origin.startswith(COMMAND_LINE)
            or leaf not in defaults
            or to_plain(get(config, leaf)) != usual
        ):
            yield key


def _owner(root: type, key: str) -> str | None:
    """The declared leaf or block that holds the key, or None."""
    cls, walked = root, ""
    for name in key.split("."):
        if name not in hints(cls):
            return None
        walked = f"{walked}.{name}" if walked else name
        inner = block_type(hints(cls)[name])
        if inner is None:
            return walked
        cls = inner
    return walked


def _answer(key: str, value: Any, default: Any, rule: Rule, origin: str) -> str:
    if rule.lets_through(value, default):
        return f"{key}={show_value(value)}: {rule.why} ({origin})"
    return f"{key}={show_value(value)} is refused: {rule.why} ({origin})"


def _answer_states(
    config: Any, schema: Tree, origins: dict[str, str], problems: list[str], notes: list[str]
) -> None:
    """Say of every key that someone set whether it is neutral or refused."""
    defaults = default_values(schema.root)
    for key, origin in origins.items():
        leaf = _owner(schema.root, key)
        if leaf not in defaults:
            continue
        rule, value = rule_of(leaf, schema.rules), get(config, leaf)
        if not rule.lets_through(value, defaults[leaf]):
            problems.append(_answer(leaf, value, defaults[leaf], rule, origin))
        elif rule.state == "neutral":
            notes.append(_answer(leaf, value, defaults[leaf], rule, origin))


def _apply(tree: dict[str, Any], root: type, setting: Setting) -> str | None:
    """Write one setting into the tree; returns the problem, if there is one."""
    node, cls, walked = tree, root, ""
    names = setting.key.split(".")
    for depth, name in enumerate(names):
        annotations = hints(cls)
        if name not in annotations:
            return unknown_key(root, cls, walked, name, setting)
        walked = f"{walked}.{name}" if walked else name
        inner = block_type(annotations[name])
        if inner is None:
            return _set_leaf(node, name, names[depth + 1 :], walked, setting)
        node, cls = node[name], inner
    if setting.value is None or setting.value == {}:
        return None
    choices = f"choose {', '.join(GROUPS[walked])}, or " if walked in GROUPS else ""
    return f"{setting.key} is a block of keys; {choices}set the keys inside it ({setting.origin})"


def _set_leaf(
    node: dict[str, Any], name: str, rest: list[str], key: str, setting: Setting
) -> str | None:
    if not rest:
        if setting.delete:
            return f"{key} cannot be removed; give it a value or null ({setting.origin})"
        node[name] = setting.value
        return None
    if node[name] is None:
        node[name] = {}
    if not isinstance(node[name], dict):
        return f"{key} is a value, it has no key '{rest[0]}' ({setting.origin})"
    inner = node[name]
    for part in rest[:-1]:
        inner = inner.setdefault(part, {})
    if setting.delete:
        inner.pop(rest[-1], None)
    else:
        inner[rest[-1]] = setting.value
    return None


def unknown_key(root: type, cls: type, walked: str, name: str, setting: Setting) -> str:
    """The sentence for a key that does not exist, with the key that was meant where one fits."""
    is_last = setting.key.rpartition(".")[2] == name
    sibling = nearest(name, hints(cls), cutoff=0.6 if is_last else 0.75)
    meant = [sibling] if sibling else keys_meant(root, setting.key, is_last)
    suggestion = f" Did you mean {' or '.join(map(repr, meant))}?" if meant else ""
    return f"{walked or 'the config'} has no key '{name}'.{suggestion} ({setting.origin})"


def keys_meant(root: type, key: str, is_last: bool = True) -> list[str]:
    """The keys that a short form stands for, else those of that name in the same block, or the only
    one anywhere: a suggestion must not set another model's key."""
    every = [known for known, *_ in walk_fields(root)]
    top, name = key.split(".")[0], key.split(".")[-1]
    meant = [known for known in every if known.endswith(f".{key}")]
    meant = meant or [known for known in every if abbreviates(key, known)]
    if not meant and top not in hints(root):  # a short form with its last word misspelt
        way = key.removesuffix(name)
        last = {end for known in every if abbreviates(way + (end := known.split(".")[-1]), known)}
        meant = [known for known in every if abbreviates(f"{way}{nearest(name, last)}", known)]
    elif not meant and is_last:
        same = [known for known in every if known.rpartition(".")[2] == name]
        inside = [known for known in same if known.startswith(f"{top}.")]
        meant = inside or (same if len(same) == 1 else [])
    return meant if len(meant) <= _MOST_SUGGESTED else []


def abbreviates(short: str, key: str) -> bool:
    """`actor.lr` for `actor_rollout_ref.actor.optim.lr`: the same last word, the others on the way."""
    *wanted, last = short.split(".")
    *way, end = key.split(".")
    return last == end and set(wanted) <= set(way)


@overload
def load_config(  # type: ignore[overload-overlap]
    overrides: Sequence[str] = (),
    *,
    config_name: Literal["sft_trainer"],
    config_path: str | Path | None = None,
    schema: None = None,
) -> SFTConfig: ...
@overload
def load_config(  # type: ignore[overload-overlap]
    overrides: Sequence[str] = (),
    *,
    config_name: Literal["generation"],
    config_path: str | Path | None = None,
    schema: None = None,
) -> GenerationConfig: ...
@overload
def load_config(  # type: ignore[overload-overlap]
    overrides: Sequence[str] = (),
    *,
    config_name: Literal["evaluation"],
    config_path: str | Path | None = None,
    schema: None = None,
) -> EvaluationConfig: ...
@overload
def load_config(
    overrides: Sequence[str] = (),
    *,
    config_name: str = "ppo_trainer",
    config_path: str | Path | None = None,
    schema: str | None = None,
) -> PPOTrainerConfig: ...
def load_config(
    overrides: Sequence[str] = (),
    *,
    config_name: str = "ppo_trainer",
    config_path: str | Path | None = None,
    schema: str | None = None,
) -> Any:
    """The frozen config tree for a list of Hydra overrides and, optionally, a user's YAML.

    `schema` says which tree a user's own config is for; without it the defaults list does.
    """
    return compose(
        overrides, config_name=config_name, config_path=config_path, schema=schema
    ).config


def config_to_dict(config: Any) -> dict[str, Any]:
    """Plain nested dict of a config tree or block, ready for YAML or JSON."""
    plain = to_plain(config)
    assert isinstance(plain, dict)
    return plain


def get(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def replace(config: T, key: str, value: Any) -> T:
    """A copy of the tree with one dotted key changed; the key must exist."""
    name, _, rest = key.partition(".")
    names = [f.name for f in dataclasses.fields(config)]  # type: ignore[arg-type]
    if name not in names:
        raise ConfigError(
            f"{type(config).__name__} has no key '{name}'.{did_you_mean(nearest(name, names))}"
        )
    changed = replace(getattr(config, name), rest, value) if rest else value
    return dataclasses.replace(config, **{name: changed})  # type: ignore[type-var]
