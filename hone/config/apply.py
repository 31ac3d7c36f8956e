"""Settings on a tree: translated, looked up, resolved, typed and checked, with all problems in one error.

Each stage goes on with the default where a value does not fit, so that one run tells every mistake; what a
later check says about a key that is wrong already is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from hone.config.block import Value
from hone.config.convert import (
    NoFit,
    describe_kind,
    describe_type,
    fit,
    show_value,
    takes_null,
    to_plain,
)
from hone.config.errors import ConfigError, nearest
from hone.config.keys import block_type, find_block, get, hints, leaves, replace
from hone.config.references import named_keys, rename_references, resolve, value_at, value_in
from hone.config.sources import COMMAND_LINE, GROUPS, Setting
from hone.config.states import replacements_of, rule_of, topics
from hone.config.trees import Tree
from hone.types import JsonObject, JsonValue

T = TypeVar("T")

_SUGGESTED = re.compile(r"Did you mean '([^']+)'")
_MOST_SUGGESTED = 4

Further = Callable[[Value, dict[str, str]], tuple[list[str], list[str]]]
"""From a tree and the keys that were set to problems and notes."""


@dataclass(frozen=True)
class Composed:
    """A checked tree, the origin of each value that was set, and what to say at start."""

    config: Value
    origins: dict[str, str]
    notes: tuple[str, ...] = ()
    """One line per topic: keys that were set and do nothing, or not what they say, in this run."""

    def origin(self, key: str) -> str:
        """Where the value of a dotted key came from."""
        return self.origins.get(key, "default")


@dataclass
class _Findings:
    """What the stages say."""

    problems: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    """Keys with a problem of their own: the default stands in for them."""
    answers: list[tuple[str, str]] = field(default_factory=list)
    """(key=value, sentence) for the notes."""

    def answer(self, key: str, value: Value, sentence: str) -> None:
        self.answers.append((f"{key}={show_value(value)}", sentence))

    def add_checks(self, sentences: Iterable[str]) -> None:
        """Problems of several keys, but those that may only be there because another key was left at its
        default."""
        suggested = {word for told in self.problems for word in _SUGGESTED.findall(told)}
        wrong = [f"{key}=" for key in self.broken | suggested]
        self.problems += [s for s in sentences if not any(key in s for key in wrong)]


def compose_settings(
    schema: Tree, settings: Sequence[Setting], further: Further | None = None
) -> Composed:
    """Apply settings to the schema's defaults and check the result."""
    findings = _Findings()
    tree, origins, others = _place(schema, settings, findings)
    try:
        resolved = resolve(tree)
    except ConfigError as error:
        raise ConfigError([*findings.problems, *error.problems]) from None
    _answer_others(schema, others, resolved, findings)
    values = _typed(schema.root, resolved, origins, findings)
    config = _built(schema.root, values)
    asked = _asked_for(config, origins)
    for key, value, sentence in schema.settle(config):
        if key in asked:
            findings.answer(key, get(config, key), sentence)
        config = replace(config, key, value)
    findings.add_checks(schema.find_problems(config))
    for prefix, why in schema.find_idle(config):
        for key in asked:
            if key == prefix or key.startswith(prefix + "."):
                findings.answer(key, get(config, key), why)
    notes: list[str] = []
    if further is not None:
        more_problems, notes = further(config, asked)
        findings.add_checks(more_problems)
    if findings.problems:
        raise ConfigError(list(dict.fromkeys(findings.problems)))
    return Composed(config, origins, (*topics(findings.answers), *dict.fromkeys(notes)))


def build(cls: type[T], tree: JsonObject) -> T:
    """The frozen dataclass tree for a plain one that has every key; every misfit is reported."""
    root: type = cls
    missing = [key for key in leaves(root) if value_at(tree, key, NoFit) is NoFit]
    findings = _Findings([f"{cls.__name__} has no {', '.join(missing)}"] if missing else [])
    values = _typed(cls, to_plain(tree), {}, findings)
    if findings.problems:
        raise ConfigError(findings.problems)
    built: T = _built(cls, values)
    return built


def _place(
    schema: Tree, settings: Sequence[Setting], findings: _Findings
) -> tuple[JsonObject, dict[str, str], dict[str, Setting]]:
    """The defaults with every setting written into them, origins, and the keys that have no field.

    Keys without a field stand in the tree too, under the name that was written: references name them.
    """
    root = schema.root
    tree: JsonObject = to_plain(root())
    origins: dict[str, str] = {}
    others: dict[str, Setting] = {}
    for setting in settings:
        if owner_of(root, setting.key) is None and not setting.delete:
            _insert(tree, setting.key, setting.value)
    for written in schema.translate(settings, findings.problems):
        value = rename_references(written.value, schema.new_name)
        setting = dataclasses.replace(written, value=value)
        if owner_of(root, setting.key) is None:
            if rule_of(setting.key, schema.name) is None:
                findings.problems.append(unknown_key(root, setting))
            else:
                others[setting.key] = setting
                _insert(tree, setting.key, setting.value)
            continue
        file = _file(setting.origin)
        if value is None and file != COMMAND_LINE and _file(origins.get(setting.key, "")) == file:
            continue  # the same file gave a value under another name
        problem = _apply(tree, root, setting)
        if problem:
            findings.problems.append(f"{problem} ({setting.origin})")
        else:
            origins[setting.key] = setting.origin
    for key in {key for s in settings for key in named_keys(s.value)} - {s.key for s in settings}:
        rule = rule_of(key, schema.name)
        if owner_of(root, key) is None and rule is not None:
            _insert(tree, key, rule.usual)
    return tree, origins, others


def _file(origin: str) -> str:
    return origin.partition(", written ")[0]


def _insert(tree: JsonObject, key: str, value: JsonValue) -> None:
    """Write a key into a plain tree, where no value is in its way."""
    *way, last = key.split(".")
    node: JsonValue = tree
    for name in way:
        if not isinstance(node, dict):
            return
        if node.get(name) is None:
            node[name] = {}
        node = node[name]
    if isinstance(node, dict):
        node[last] = value


def _answer_others(
    schema: Tree, others: Mapping[str, Setting], resolved: JsonObject, findings: _Findings
) -> None:
    """Say of every key without a field whether it is neutral or refused."""
    refused: list[tuple[str, str]] = []
    for key, setting in others.items():
        rule, value = rule_of(key, schema.name), value_at(resolved, key, setting.value)
        if rule is None or rule.is_silent(value):
            continue
        if rule.state == "refused":
            refused.append((f"{key}={show_value(value)}", f"{rule.why} ({setting.origin})"))
        else:
            findings.answer(key, value, rule.why)
    findings.problems += topics(refused, " is refused", " are refused")


def _typed(
    root: type, tree: JsonObject, origins: Mapping[str, str], findings: _Findings
) -> dict[str, Value]:
    """Every leaf in its field's type and range; the default stands in where a value is not, and for a
    null that the field does not take. A key that only follows a misfit is not reported beside it."""
    values: dict[str, Value] = {}
    misfits: dict[str, str] = {}
    outside: dict[str, str] = {}
    for key, leaf in leaves(root).items():
        value, origin = value_at(tree, key), origins.get(key, "default")
        rule = next((r for r in replacements_of(key) if r.takes(value)), None)
        if rule is not None:
            if rule.why and key in origins:
                findings.answer(key, value, rule.why)
            value = rule.becomes
        if value is None and origin != COMMAND_LINE and not takes_null(leaf.hint):
            value = value_in(leaf.default, tree)
            value = to_plain(default_values(root)[key]) if value is None else value
        _insert(tree, key, value)  # for the keys that follow this one
        try:
            values[key] = value = fit(value, leaf.hint)
        except NoFit:
            what = key if value is None else f"{key}={show_value(value)}"
            wanted = f"is {describe_kind(value)}; expected {describe_type(leaf.hint)}"
            misfits[key] = f"{what} {wanted} ({origin})"
            continue
        number = key in origins and isinstance(value, int | float)
        if number and leaf.bounds is not None and not leaf.bounds.holds(value):
            wanted = f"is out of range; use {leaf.bounds}"
            outside[key] = f"{key}={show_value(value)} {wanted} ({origin})"
    told = [text for key, text in misfits.items() if key in origins] or list(misfits.values())
    findings.problems += [*told, *outside.values()]
    for key in (*misfits, *outside):
        findings.broken.add(key)
        values[key] = default_values(root)[key]
    return values


def _built(cls: Value, values: Mapping[str, Value], prefix: str = "") -> Value:
    def inside(name: str, hint: Value) -> Value:
        inner, key = block_type(hint), f"{prefix}{name}"
        return values[key] if inner is None else _built(inner, values, key + ".")

    return cls(**{name: inside(name, hint) for name, hint in hints(cls).items()})


@functools.cache
def default_values(root: type) -> dict[str, Value]:
    """The value of every leaf where nothing is set, references followed."""
    tree = resolve(to_plain(root()))
    return {key: fit(value_at(tree, key), leaf.hint) for key, leaf in leaves(root).items()}


def _asked_for(config: Value, origins: Mapping[str, str]) -> dict[str, str]:
    """The keys that were set and their origins, in a file only where that changes something: a run's
    saved config writes every default out."""
    root: type = type(config)
    values, known = to_plain(config), leaves(root)
    asked: dict[str, str] = {}
    for key, origin in origins.items():
        leaf = known.get(owner_of(root, key) or "")
        if leaf is None:
            continue
        changed = value_at(values, leaf.key) != value_in(leaf.default, values)
        if changed or origin.startswith(COMMAND_LINE):
            asked[leaf.key] = origin
    return asked


def owner_of(root: type, key: str) -> str | None:
    """The declared leaf or block that holds the key, or None."""
    parts = key.split(".")
    for end in range(1, len(parts) + 1):
        leaf = ".".join(parts[:end])
        if leaf in leaves(root):
            return leaf
    return key if find_block(root, key) is not None else None


def _apply(tree: JsonObject, root: type, setting: Setting) -> str | None:
    """Write one setting into the tree; returns the problem, if there is one."""
    key, value = owner_of(root, setting.key) or "", setting.value
    *way, name = key.split(".")
    node: Value = tree
    for depth, part in enumerate(way, 1):
        node = node[part]
        if not isinstance(node, dict):
            return f"{'.'.join(way[:depth])} is given as a whole and key by key"
    if key not in leaves(root):
        choices = f"choose {', '.join(GROUPS[key])}, or " if key in GROUPS else ""
        if isinstance(value, str) and "${" in value:
            node[name] = value
        elif value is not None and value != {}:
            return f"{key} is a block of keys; {choices}set the keys inside it"
        return None
    rest = setting.key[len(key) + 1 :].split(".") if setting.key != key else []
    if setting.delete and not rest:
        return f"{key} cannot be removed; give it a value or null"
    for part in rest:
        node[name] = {} if node[name] is None else node[name]
        if not isinstance(node[name], dict):
            return f"{key} is a value, it has no key '{rest[0]}'"
        node, name = node[name], part
        node.setdefault(name, None)
    if setting.delete:
        node.pop(name, None)
    else:
        node[name] = value
    return None


def unknown_key(root: type, setting: Setting) -> str:
    """The sentence for a key that does not exist, with the key that was meant where one fits."""
    cls, walked, name = root, "", ""
    for name in setting.key.split("."):
        inner = block_type(hints(cls).get(name))
        if inner is None:
            break
        cls, walked = inner, f"{walked}.{name}" if walked else name
    is_last = setting.key.rpartition(".")[2] == name
    sibling = nearest(name, hints(cls), cutoff=0.6 if is_last else 0.75)
    meant = [sibling] if sibling else keys_meant(root, setting.key, is_last)
    suggestion = f" Did you mean {' or '.join(map(repr, meant))}?" if meant else ""
    return f"{walked or 'the config'} has no key '{name}'.{suggestion} ({setting.origin})"


def keys_meant(root: type, key: str, is_last: bool = True) -> list[str]:
    """The keys that a short form stands for, else those of that name in the same block, or the only
    one anywhere: a suggestion must not set another model's key."""
    every = list(leaves(root))
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
