"""Applies settings to a tree: translates, resolves, converts and checks them; one error lists all problems.

If a value does not fit its field, each later stage uses the default and does not report the key again.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hone.config import keys
from hone.config.checks import adjust_values, find_problems, keys_without_effect
from hone.config.conditions import lines_per_sentence
from hone.config.convert import (
    Config,
    Hint,
    NoFit,
    Value,
    describe_type,
    fit,
    parse_scalar,
    show_value,
    to_plain,
)
from hone.config.dialect import DEFAULT_OF, OWN_KEYS, Dialect
from hone.config.errors import ConfigError
from hone.config.foreign_names import foreign_hint
from hone.config.keys import block_type, blocks, get, hints, leaves, owner_of
from hone.config.short_keys import expand_short_keys, short_keys_of
from hone.config.sources import COMMAND_LINE, NAME_DOT, Setting
from hone.config.trees import Tree
from hone.redaction import is_redacted, redact
from hone.types import JsonObject, JsonValue

_KEY_IN_MESSAGE = re.compile(r"[\w.]+(?==)")
"""A key before `=value`."""
_NAME = re.compile(r"\w+")
_SUGGESTED_KEY = re.compile(r"(\S+) has no key .* Did you mean '([^']+)'")
"""The block and the suggested key in the message about an unknown key."""

ExtraChecks = Callable[[Config, dict[str, str]], tuple[list[str], list[str]]]
"""Takes a config and the origins of the keys that were set, and returns problems and notes."""
StartingValues = Callable[[JsonObject], list[Setting]]
"""Takes the values that were set, by dotted key, and returns settings of lower precedence."""


@dataclass(frozen=True)
class ComposedConfig:
    """A checked config, the origin of each value that was set, and the notes to print at the start."""

    config: Config
    origins: dict[str, str]
    notes: tuple[str, ...] = ()
    """One line per topic about keys whose value is ignored or replaced in this run."""
    tree_line: str = ""
    """The line that names the tree that the command was written for."""


def compose_settings(
    tree: Tree,
    settings: Sequence[Setting],
    extra_checks: ExtraChecks | None = None,
    *,
    dialect: Dialect = OWN_KEYS,
    starting_values: StartingValues | None = None,
) -> ComposedConfig:
    """Applies settings to the defaults of a tree and checks the config.

    `starting_values` takes the values that were set, by dotted key, and returns settings of lower precedence.
    """
    settings = expand_short_keys(tree.root, settings)
    composition = _Composition(tree, dialect)
    reading = dialect.read(settings, tree.name, has_starting_values=starting_values is not None)
    composition.problems += reading.problems
    settings = reading.settings
    if starting_values is not None:
        values = {s.key: s.value for s in dialect.translate(settings, [], tree.name)}
        settings = [*starting_values(values), *settings]
    settings = [*reading.defaults, *settings]
    settings_without_field = composition.write_settings(settings)
    try:
        composition.values = keys.resolve(composition.values)
    except ConfigError as error:
        raise ConfigError([*composition.problems, *error.problems]) from None
    composition.check_keys_without_field(settings_without_field)
    composition.check_secrets()
    config = composition.build_config()
    requested_keys = _requested_keys(config, composition.origins)
    config, notes = adjust_values(tree.name, config)
    composition.add_problems(find_problems(tree.name, config))
    notes += [(key, get(config, key), why) for key, why in keys_without_effect(tree.name, config)]
    for key, value, sentence in notes:
        if key in requested_keys:
            composition.add_note(key, value, sentence)
    extra_notes: list[str] = []
    if extra_checks is not None:
        extra_problems, extra_notes = extra_checks(config, requested_keys)
        composition.add_problems(extra_problems)
    if composition.problems:
        raise ConfigError(list(dict.fromkeys(composition.problems)))
    lines = (*lines_per_sentence(composition.notes), *dict.fromkeys(extra_notes))
    return ComposedConfig(config, composition.origins, lines, reading.line)


class _Composition:
    """The values of a tree by dotted key while they are composed, and the problems and notes so far."""

    def __init__(self, tree: Tree, dialect: Dialect) -> None:
        self.dialect = dialect
        self.tree_name, self.root = tree.name, tree.root
        self.values: JsonObject = {key: leaf.default for key, leaf in leaves(self.root).items()}
        self.origins: dict[str, str] = {}
        self.problems: list[str] = []
        self.invalid_keys: set[str] = set()
        """Keys whose value was invalid and replaced by the default."""
        self.notes: list[tuple[str, str]] = []
        """(key=value, sentence) of each note."""

    def add_note(self, key: str, value: Value, sentence: str) -> None:
        self.notes.append((f"{key}={show_value(redact(value, key))}", sentence))

    def add_problems(self, sentences: Iterable[str]) -> None:
        """Adds problems that concern several keys, unless one of these keys already has a problem."""
        reported_keys = set(self.invalid_keys)
        for block, key in _SUGGESTED_KEY.findall("\n".join(self.problems)):
            # A suggestion is a full key, or a name in the block.
            reported_keys |= {key, f"{block}.{key}"}
        # A sentence may omit the blocks that contain a key, as in `rollout.n=1`.
        endings = {key[match.start() :] for key in reported_keys for match in _NAME.finditer(key)}
        for sentence in sentences:
            if endings.isdisjoint(_KEY_IN_MESSAGE.findall(sentence)):
                self.problems.append(sentence)

    def check_secrets(self) -> None:
        """Adds a problem for each value that the config of a run folder has without its secret."""
        for key, value in self.values.items():
            if is_redacted(value):
                where = self.origins.get(key, "the config of a run")
                self.problems.append(
                    f"{key} holds a secret that is not stored in {where}; set it on the command line"
                )

    def write_settings(self, settings: Sequence[Setting]) -> dict[str, Setting]:
        """Writes the settings over the defaults, and returns those whose key has no field.

        Their values are stored too, under old and new names, because other values may refer to them.
        """
        root, tree_name, dialect = self.root, self.tree_name, self.dialect
        settings_without_field: dict[str, Setting] = {}
        settings = [_split_names(root, setting) for setting in settings]
        for setting in settings:
            if not setting.delete and owner_of(root, setting.key) is None:
                self.values[setting.key] = setting.value
        for translated in dialect.translate(settings, self.problems, tree_name):
            value = keys.rename_references(
                translated.value, lambda key: dialect.new_name(key, tree_name)
            )
            setting = dataclasses.replace(translated, value=value)
            key, origin, owner = setting.key, setting.origin, owner_of(root, setting.key)
            previous_file = _file_of(self.origins.get(key, ""))
            is_set_twice_in_file = _file_of(origin) == previous_file != COMMAND_LINE
            if owner is None:
                settings_without_field[key] = setting
                self.values[key] = value
            elif value is None and is_set_twice_in_file:
                continue  # a null does not replace the value that the same file set under another name
            elif problem := self._write(owner, setting):
                self.problems.append(f"{problem} ({origin})")
            else:
                self.origins[key] = origin
        set_keys = {setting.key for setting in settings}
        referenced_keys = {key for s in settings for key in keys.referenced_keys(s.value)}
        for key in referenced_keys - set_keys:
            if owner_of(root, key) is None and (rule := dialect.rule_of(key, tree_name)):
                # A reference to an unset key without a field gets the first value that needs no message.
                accepted_values = (value for value in rule.values if value not in ("off", "any"))
                self.values[key] = next(accepted_values, None)
        return settings_without_field

    def _write(self, owner: str, setting: Setting) -> str | None:
        """Writes a setting to `owner`, the leaf or block that contains its key; returns a problem, if any."""
        value, nested_key = setting.value, setting.key[len(owner) + 1 :]
        if setting.delete and not nested_key:
            return f"{owner} cannot be removed; give it a value or null"
        if owner in blocks(self.root):
            referenced_keys = keys.referenced_keys(value)
            if not referenced_keys and value is not None and value != {}:
                groups = self.dialect.groups
                choices = f"choose {', '.join(groups[owner])}, or " if owner in groups else ""
                return f"{owner} is a block of keys; {choices}set the keys inside it"
            for key in leaves(self.root):  # a reference to another block is expanded key by key
                source_key = referenced_keys[0] + key[len(owner) :] if referenced_keys else ""
                if key.startswith(f"{owner}.") and source_key in self.values:
                    self.values[key] = "${" + source_key + "}"
        elif nested_key:
            mapping = self.values[owner]
            if mapping is not None and not isinstance(mapping, dict):
                return f"{owner} is a value, it has no key '{nested_key.split('.')[0]}'"
            try:
                self.values[owner] = _set_nested(mapping, nested_key.split("."), setting)
            except KeyError:
                return f"{owner} has no key '{nested_key}' to remove"
        else:
            self.values[owner] = value
        return None

    def check_keys_without_field(self, settings: Mapping[str, Setting]) -> None:
        """Adds a problem for each key that is unknown or refused, and a note for each neutral one."""
        refused: list[tuple[str, str]] = []
        for key, setting in settings.items():
            rule, value = self.dialect.rule_of(key, self.tree_name), self.values[key]
            if rule is None:
                sentence = keys.unknown_key_message(
                    self.root,
                    key,
                    setting.added,
                    hint=foreign_hint(self.root, key),
                    short_names=short_keys_of(self.root),
                )
                if sentence:
                    self.problems.append(f"{sentence} ({setting.origin})")
                else:
                    self.add_note(key, value, "a key of your own; nothing here reads it")
            elif rule.matches(value):
                continue
            elif rule.state == "refused":
                refused.append((f"{key}={show_value(value)}", f"{rule.why} ({setting.origin})"))
            else:
                self.add_note(key, value, rule.why)
        self.problems += lines_per_sentence(refused, " is refused", " are refused")

    def build_config(self) -> Config:
        """Returns the frozen tree; the default replaces a value that its field does not accept."""
        converted: dict[str, Value] = {}
        type_problems: dict[str, str] = {}
        range_problems: dict[str, str] = {}
        following_keys: set[str] = set()  # unset keys that refer to a value out of range
        for key, leaf in leaves(self.root).items():
            origin = self.origins.get(key, "default")
            self.values[key] = value = self._replace_value(key)
            try:
                converted[key] = value = fit(value, leaf.hint)
            except NoFit:
                subject = key if value is None else f"{key}={show_value(value)}"
                type_words = "a boolean" if isinstance(value, bool) else describe_type(type(value))
                expected = describe_type(leaf.hint)
                type_problems[key] = f"{subject} is {type_words}; expected {expected} ({origin})"
                continue
            is_number = isinstance(value, int | float)
            if not is_number or leaf.bounds is None or leaf.bounds.holds(value):
                continue
            if key in self.origins:
                advice = f"is out of range; use {leaf.bounds}"
                range_problems[key] = f"{key}={show_value(value)} {advice} ({origin})"
            else:
                following_keys.add(key)
        problems_of_set_keys = [text for key, text in type_problems.items() if key in self.origins]
        self.problems += [
            *(problems_of_set_keys or type_problems.values()),
            *range_problems.values(),
        ]
        self.invalid_keys = {*type_problems, *range_problems}
        self.invalid_keys |= following_keys if range_problems else set()
        defaults = {key: _defaults(self.root)[key] for key in self.invalid_keys}
        return _build_block(self.root, converted | defaults)

    def _replace_value(self, key: str) -> JsonValue:
        """Returns the value of a leaf, or its replacement from `rules.txt`, and adds the rule's note; for a
        null in a file, returns the default if the field does not accept null."""
        leaf, value = leaves(self.root)[key], self.values[key]
        for rule in self.dialect.replacements(key):
            if rule.matches(value):
                if rule.why and key in self.origins:
                    self.add_note(key, value, rule.why)
                value = parse_scalar(rule.becomes)
                break
        accepts_null = type(None) in typing.get_args(leaf.hint)
        if (
            value is None
            and _file_of(self.origins.get(key, "")) != COMMAND_LINE
            and not accepts_null
        ):
            value = keys.resolve_default(leaf.default, self.values)
            return to_plain(_defaults(self.root)[key]) if value is None else value
        return value


def _file_of(origin: str) -> str:
    """Returns the file of an origin, or COMMAND_LINE; an origin may also contain the old name of the key."""
    return origin.split(", written ")[0]


def _split_names(root: type, setting: Setting) -> Setting:
    """Returns the setting with a dot for each NAME_DOT of its key, except in the names inside a leaf."""
    key = setting.key.replace(NAME_DOT, ".")
    owner = owner_of(root, key)
    if owner is not None and owner not in blocks(root):
        key = owner + setting.key[len(owner) :]
    return dataclasses.replace(setting, key=key)


def _set_nested(node: JsonValue, names: Sequence[str], setting: Setting) -> JsonObject:
    """Returns a copy of a mapping with a setting written at a nested key, or with the key deleted."""
    name, *rest = names
    name = name.replace(NAME_DOT, ".")
    copy = dict(node) if isinstance(node, dict) else {}
    if setting.delete and not rest:
        del copy[name]
    else:
        copy[name] = _set_nested(copy.get(name), rest, setting) if rest else setting.value
    return copy


def _build_block(cls: Hint, values: Mapping[str, Value], prefix: str = "") -> Config:
    """Creates a block, and the blocks inside it, from values by dotted key."""

    def field_value(name: str, hint: Hint) -> Value:
        block_class, key = block_type(hint), f"{prefix}{name}"
        return values[key] if block_class is None else _build_block(block_class, values, key + ".")

    return cls(**{name: field_value(name, hint) for name, hint in hints(cls).items()})


@functools.cache
def _defaults(root: type) -> dict[str, Value]:
    """Returns the default of every leaf, with references resolved."""
    values = keys.resolve({key: leaf.default for key, leaf in leaves(root).items()})
    return {key: fit(value, leaves(root)[key].hint) for key, value in values.items()}


def _requested_keys(config: Config, origins: Mapping[str, str]) -> dict[str, str]:
    """Returns the keys that the user set, and their origins; a key from a file counts only if its value is
    not the default, because the saved config of a run contains every default."""
    root: type = type(config)
    values = {key: to_plain(get(config, key)) for key in leaves(root)}
    requested: dict[str, str] = {}
    for key, origin in origins.items():
        if origin.startswith(DEFAULT_OF):
            continue
        leaf = leaves(root).get(owner_of(root, key) or "")
        is_changed = leaf and values[leaf.key] != keys.resolve_default(leaf.default, values)
        if leaf and (is_changed or origin.startswith(COMMAND_LINE)):
            requested[leaf.key] = origin
    return requested
