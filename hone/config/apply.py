"""Applies settings to a tree: translates, resolves, types and checks them, with all problems in one error.

Each stage continues with the default if a value does not fit, so that one run reports every mistake.
Later checks do not report a key that already has a problem.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hone.config import keys
from hone.config.checks import find_idle, find_problems, settle
from hone.config.convert import NoFit, Value, describe_type, fit, scalar, show_value, to_plain
from hone.config.errors import ConfigError
from hone.config.keys import block_type, blocks, get, hints, leaves, owner_of
from hone.config.sources import COMMAND_LINE, GROUPS, Setting
from hone.config.states import new_name, rule_of, rules_of, topics, translate
from hone.config.trees import Tree
from hone.types import JsonObject, JsonValue

_SUGGESTED = re.compile(r"Did you mean '([^']+)'")

ExtraChecks = Callable[[Value, dict[str, str]], tuple[list[str], list[str]]]
"""Takes a tree and the keys that were set, and returns problems and notes."""


@dataclass(frozen=True)
class Composed:
    """A checked tree, the origin of each value that was set, and the notes to print at start."""

    config: Value
    origins: dict[str, str]
    notes: tuple[str, ...] = ()
    """One line per topic about keys that have no effect, or another effect, in this run."""


def compose_settings(
    schema: Tree, settings: Sequence[Setting], extra_checks: ExtraChecks | None = None
) -> Composed:
    """Applies settings to the schema's defaults and checks the result."""
    run = _Composition(schema)
    others = run.place(settings)
    try:
        run.values = keys.resolve(run.values)
    except ConfigError as error:
        raise ConfigError([*run.problems, *error.problems]) from None
    run.judge(others)
    config = run.typed()
    requested = _requested(config, run.origins)
    config, changes = settle(schema.name, config)
    for key, value, sentence in changes:
        if key in requested:
            run.answer(key, value, sentence)
    run.add_checks(find_problems(schema.name, config))
    for key, why in find_idle(schema.name, config):
        if key in requested:
            run.answer(key, get(config, key), why)
    notes: list[str] = []
    if extra_checks is not None:
        more_problems, notes = extra_checks(config, requested)
        run.add_checks(more_problems)
    if run.problems:
        raise ConfigError(list(dict.fromkeys(run.problems)))
    return Composed(config, run.origins, (*topics(run.answers), *dict.fromkeys(notes)))


class _Composition:
    """The values of a tree by dotted key while they are composed, and the problems and notes so far."""

    def __init__(self, schema: Tree) -> None:
        self.schema, self.root = schema, schema.root
        self.values: JsonObject = {key: leaf.default for key, leaf in leaves(self.root).items()}
        self.origins: dict[str, str] = {}
        self.problems: list[str] = []
        self.broken: set[str] = set()
        """Keys with a problem, replaced by their defaults."""
        self.answers: list[tuple[str, str]] = []
        """(key=value, sentence) for the notes."""

    def answer(self, key: str, value: Value, sentence: str) -> None:
        self.answers.append((f"{key}={show_value(value)}", sentence))

    def add_checks(self, sentences: Iterable[str]) -> None:
        """Adds problems between keys, except those that may be caused by a key replaced by its default."""
        suggested = {word for problem in self.problems for word in _SUGGESTED.findall(problem)}
        wrong = [f"{key}=" for key in self.broken | suggested]
        self.problems += [s for s in sentences if not any(key in s for key in wrong)]

    def place(self, settings: Sequence[Setting]) -> dict[str, Setting]:
        """Writes the settings over the defaults, and returns those whose key has no field.

        Those keys are added to the values too, also under their original names, for references to them.
        """
        root, tree = self.root, self.schema.name
        others: dict[str, Setting] = {}
        unknown = (s for s in settings if not s.delete and owner_of(root, s.key) is None)
        self.values |= {setting.key: setting.value for setting in unknown}
        for written in translate(settings, self.problems, tree):
            value = keys.rename_references(written.value, lambda key: new_name(key, tree))
            setting = dataclasses.replace(written, value=value)
            key, origin, owner = setting.key, setting.origin, owner_of(root, setting.key)
            file, before = (o.split(", written ")[0] for o in (origin, self.origins.get(key, "")))
            if owner is None:
                others[key] = setting
                self.values[key] = value
            elif value is None and file == before != COMMAND_LINE:
                continue  # the same file already set the key under another name
            elif problem := self._write(owner, setting):
                self.problems.append(f"{problem} ({origin})")
            else:
                self.origins[key] = origin
        referenced = {key for s in settings for key in keys.named_keys(s.value)}
        for key in referenced - {s.key for s in settings}:
            if owner_of(root, key) is None and (rule := rule_of(key, tree)):
                self.values[key] = rule.usual
        return others

    def _write(self, owner: str, setting: Setting) -> str | None:
        """Writes one setting to its leaf or block, and returns the problem, if any."""
        value, inside = setting.value, setting.key[len(owner) + 1 :]
        if owner in blocks(self.root):
            sources = keys.named_keys(value)
            if not sources and value is not None and value != {}:
                choices = f"choose {', '.join(GROUPS[owner])}, or " if owner in GROUPS else ""
                return f"{owner} is a block of keys; {choices}set the keys inside it"
            for key in leaves(self.root):  # a reference to another block is expanded key by key
                other = sources[0] + key[len(owner) :] if sources else ""
                if key.startswith(f"{owner}.") and other in self.values:
                    self.values[key] = "${" + other + "}"
        elif inside:
            before = self.values[owner]
            if before is not None and not isinstance(before, dict):
                return f"{owner} is a value, it has no key '{inside.split('.')[0]}'"
            self.values[owner] = _with(before, inside.split("."), setting)
        elif setting.delete:
            return f"{owner} cannot be removed; give it a value or null"
        else:
            self.values[owner] = value
        return None

    def judge(self, others: Mapping[str, Setting]) -> None:
        """Reports for every key without a field whether it is neutral, refused, or unknown."""
        refused: list[tuple[str, str]] = []
        for key, setting in others.items():
            rule, value = rule_of(key, self.schema.name), self.values[key]
            if rule is None and (sentence := keys.unknown_key(self.root, key, setting.added)):
                self.problems.append(f"{sentence} ({setting.origin})")
            elif rule is None:
                self.answer(key, value, "a key of your own; nothing here reads it")
            elif rule.has(value):
                continue
            elif rule.state == "refused":
                refused.append((f"{key}={show_value(value)}", f"{rule.why} ({setting.origin})"))
            else:
                self.answer(key, value, rule.why)
        self.problems += topics(refused, " is refused", " are refused")

    def typed(self) -> Value:
        """Returns the frozen tree, with every leaf in its field's type and range.

        The default replaces a value that does not fit, and a null that the field does not accept. A key
        that merely follows such a value is not reported.
        """
        typed: dict[str, Value] = {}
        misfits: dict[str, str] = {}
        outside: dict[str, str] = {}
        for key, leaf in leaves(self.root).items():
            origin = self.origins.get(key, "default")
            self.values[key] = value = self._replaced(key)
            try:
                typed[key] = value = fit(value, leaf.hint)
            except NoFit:
                what = key if value is None else f"{key}={show_value(value)}"
                kind = "a truth value" if isinstance(value, bool) else describe_type(type(value))
                expected = f"is {kind}; expected {describe_type(leaf.hint)}"
                misfits[key] = f"{what} {expected} ({origin})"
                continue
            number = key in self.origins and isinstance(value, int | float)
            if number and leaf.bounds is not None and not leaf.bounds.holds(value):
                advice = f"is out of range; use {leaf.bounds}"
                outside[key] = f"{key}={show_value(value)} {advice} ({origin})"
        own = [text for key, text in misfits.items() if key in self.origins]
        self.problems += [*(own or misfits.values()), *outside.values()]
        self.broken = {*misfits, *outside}
        return _built(self.root, typed | {key: _defaults(self.root)[key] for key in self.broken})

    def _replaced(self, key: str) -> JsonValue:
        """Returns the value of a leaf or its replacement from the table; a null in a file becomes the
        default if the field does not accept null."""
        leaf, value = leaves(self.root)[key], self.values[key]
        for rule in rules_of(key, "values"):
            if rule.has(value):
                if rule.why and key in self.origins:
                    self.answer(key, value, rule.why)
                value = scalar(rule.becomes)
                break
        takes_null = type(None) in typing.get_args(leaf.hint)
        if value is None and self.origins.get(key) != COMMAND_LINE and not takes_null:
            value = keys.value_in(leaf.default, self.values)
            return to_plain(_defaults(self.root)[key]) if value is None else value
        return value


def _with(node: JsonValue, names: Sequence[str], setting: Setting) -> JsonObject:
    """Returns a copy of a mapping with a setting written at a nested key."""
    name, *rest = names
    new = dict(node) if isinstance(node, dict) else {}
    new[name] = _with(new.get(name), rest, setting) if rest else setting.value
    if setting.delete and not rest:
        del new[name]
    return new


def _built(cls: Value, values: Mapping[str, Value], prefix: str = "") -> Value:
    def inside(name: str, hint: Value) -> Value:
        inner, key = block_type(hint), f"{prefix}{name}"
        return values[key] if inner is None else _built(inner, values, key + ".")

    return cls(**{name: inside(name, hint) for name, hint in hints(cls).items()})


@functools.cache
def _defaults(root: type) -> dict[str, Value]:
    """Returns the default of every leaf, with references resolved."""
    values = keys.resolve({key: leaf.default for key, leaf in leaves(root).items()})
    return {key: fit(value, leaves(root)[key].hint) for key, value in values.items()}


def _requested(config: Value, origins: Mapping[str, str]) -> dict[str, str]:
    """Returns the keys that were set and their origins; a file's key counts only if it changes the value,
    because the saved config of a run contains every default."""
    root: type = type(config)
    values = {key: to_plain(get(config, key)) for key in leaves(root)}
    requested: dict[str, str] = {}
    for key, origin in origins.items():
        leaf = leaves(root).get(owner_of(root, key) or "")
        changed = leaf and values[leaf.key] != keys.value_in(leaf.default, values)
        if leaf and (changed or origin.startswith(COMMAND_LINE)):
            requested[leaf.key] = origin
    return requested
