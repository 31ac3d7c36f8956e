"""Settings on a tree: translated, looked up, resolved, typed and checked, with all problems in one error.

Each stage goes on with the default where a value does not fit, so that one run tells every mistake; what a
later check says about a key that is wrong already is left out.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hone.config.convert import build_anyway, show_value, takes_null, to_plain, told_misfits
from hone.config.errors import ConfigError, nearest
from hone.config.keys import Value, block_type, get, hints, replace, walk_fields
from hone.config.ranges import out_of_range
from hone.config.references import named_keys, rename_references, resolve, value_in
from hone.config.sources import COMMAND_LINE, GROUPS, Setting
from hone.config.states import replacement_of, rule_of, topics
from hone.config.trees import Tree
from hone.types import JsonObject, JsonValue

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
    _complete(schema.root, resolved, origins, findings)
    config: Value
    config, misfits = build_anyway(schema.root, resolved, origins)
    findings.problems += told_misfits(misfits, origins)
    for key in misfits:
        findings.broken.add(key)
        config = replace(config, key, default_values(schema.root)[key])
    config = _in_range(schema, config, origins, findings)
    asked = dict(_asked_for(config, origins))
    for key, value, sentence in schema.settle(config):
        if key in asked:
            findings.answers.append((f"{key}={show_value(get(config, key))}", sentence))
        config = replace(config, key, value)
    findings.add_checks(schema.find_problems(config))
    for prefix, why in schema.find_idle(config):
        findings.answers += [
            (f"{key}={show_value(get(config, key))}", why)
            for key in asked
            if key == prefix or key.startswith(prefix + ".")
        ]
    notes: list[str] = []
    if further is not None:
        more_problems, notes = further(config, asked)
        findings.add_checks(more_problems)
    if findings.problems:
        raise ConfigError(list(dict.fromkeys(findings.problems)))
    return Composed(config, origins, (*topics(findings.answers), *dict.fromkeys(notes)))


def _place(
    schema: Tree, settings: Sequence[Setting], findings: _Findings
) -> tuple[JsonObject, dict[str, str], list[Setting]]:
    """The defaults with every setting written into them, origins, and the keys that have no field.

    Keys without a field stand in the tree too, under the name that was written: references name them.
    """
    root = schema.root
    tree: JsonObject = copy.deepcopy(to_plain(root()))
    origins: dict[str, str] = {}
    others: dict[str, Setting] = {}
    for setting in settings:
        if owner_of(root, setting.key) is None and not setting.delete:
            _insert(tree, setting.key, setting.value)
    for written in schema.translate(settings, findings.problems):
        setting = dataclasses.replace(
            written, value=rename_references(written.value, schema.new_name)
        )
        if owner_of(root, setting.key) is None:
            if rule_of(setting.key, schema.name) is None:
                findings.problems.append(unknown_key(root, setting))
            else:
                others[setting.key] = setting
                _insert(tree, setting.key, setting.value)
            continue
        from_file = not setting.origin.startswith(COMMAND_LINE)
        if (
            setting.value is None
            and from_file
            and _file(origins.get(setting.key)) == _file(setting.origin)
        ):
            continue  # the same file gave a value under another name
        problem = _apply(tree, root, setting)
        if problem:
            findings.problems.append(problem)
        else:
            origins[setting.key] = setting.origin
    for key in {key for s in settings for key in named_keys(s.value)} - {s.key for s in settings}:
        rule = rule_of(key, schema.name)
        if owner_of(root, key) is None and rule is not None:
            _insert(tree, key, rule.usual)
    return tree, origins, list(others.values())


def _file(origin: str | None) -> str | None:
    return origin and origin.partition(", written ")[0]


def _insert(tree: JsonObject, key: str, value: JsonValue) -> None:
    """Write a key that no field declares, where nothing declared is in its way."""
    *way, last = key.split(".")
    node: JsonValue = tree
    for name in way:
        node = node.setdefault(name, {}) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node[last] = value


def _at(resolved: JsonObject, setting: Setting) -> JsonValue:
    """What a key without a field comes to, references followed."""
    node: JsonValue = resolved
    for name in setting.key.split("."):
        if not isinstance(node, dict) or name not in node:
            return setting.value
        node = node[name]
    return node


def _answer_others(
    schema: Tree, others: Sequence[Setting], resolved: JsonObject, findings: _Findings
) -> None:
    """Say of every key without a field whether it is neutral or refused."""
    refused: list[tuple[str, str]] = []
    for setting in others:
        rule, value = rule_of(setting.key, schema.name), _at(resolved, setting)
        if rule is None or rule.is_silent(value):
            continue
        written = f"{setting.key}={show_value(value)}"
        if rule.state == "refused":
            refused.append((written, f"{rule.why} ({setting.origin})"))
        else:
            findings.answers.append((written, rule.why))
    findings.problems += topics(refused, " is refused", " are refused")


def _complete(
    root: type, resolved: JsonObject, origins: dict[str, str], findings: _Findings
) -> None:
    """Values that stand for others, blocks given as null, and null where a field has no null."""
    defaults = default_values(root)
    for key, owner, _, default in walk_fields(root):
        *way, name = key.split(".")
        node = resolved
        for part in way:
            inner = node.get(part)
            node[part] = inner = inner if isinstance(inner, dict) else {}
            node = inner
        value = node.get(name)
        rule = replacement_of(key, value)
        if rule is not None:
            node[name] = rule.becomes
            if rule.why and key in origins:
                findings.answers.append((f"{key}={show_value(value)}", rule.why))
        meant = origins.get(key) == COMMAND_LINE
        if node.get(name) is None and not meant and not takes_null(hints(owner)[name]):
            node[name] = value_in(to_plain(default), resolved)
            if node[name] is None:
                node[name] = to_plain(defaults[key])


def _in_range(schema: Tree, config: Value, origins: dict[str, str], findings: _Findings) -> Value:
    """The tree with the default in place of every number out of its range."""
    for key, sentence in out_of_range(config, origins).items():
        findings.problems.append(f"{sentence} ({origins[key]})")
        findings.broken.add(key)
        config = replace(config, key, default_values(schema.root)[key])
    return config


@functools.cache
def default_values(root: type) -> dict[str, Value]:
    """The value of every leaf where nothing is set, references followed."""
    config: Value
    config, _ = build_anyway(root, resolve(to_plain(root())), {})
    return {key: get(config, key) for key, *_ in walk_fields(root)}


def _asked_for(config: Value, origins: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The keys that were set and their origins, in a file only where that changes something: a run's
    saved config writes every default out."""
    values = to_plain(config)
    defaults = {key: to_plain(default) for key, _, _, default in walk_fields(type(config))}
    for key, origin in origins.items():
        leaf = owner_of(type(config), key)
        if leaf not in defaults:
            continue
        usual = value_in(defaults[leaf], values)
        if origin.startswith(COMMAND_LINE) or to_plain(get(config, leaf)) != usual:
            yield leaf, origin


def owner_of(root: type, key: str) -> str | None:
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


def _apply(tree: JsonObject, root: type, setting: Setting) -> str | None:
    """Write one setting into the tree; returns the problem, if there is one."""
    node: Value = tree
    cls, walked = root, ""
    names = setting.key.split(".")
    for depth, name in enumerate(names):
        walked = f"{walked}.{name}" if walked else name
        inner = block_type(hints(cls)[name])
        if inner is None:
            return _set_leaf(node, name, names[depth + 1 :], walked, setting)
        if depth == len(names) - 1:
            break
        node, cls = node[name], inner
        if not isinstance(node, dict):
            return f"{walked} is given as a whole and key by key ({setting.origin})"
    if setting.value is None or setting.value == {}:
        return None
    if isinstance(setting.value, str) and "${" in setting.value:
        node[name] = setting.value
        return None
    choices = f"choose {', '.join(GROUPS[walked])}, or " if walked in GROUPS else ""
    return f"{setting.key} is a block of keys; {choices}set the keys inside it ({setting.origin})"


def _set_leaf(
    node: dict[str, Value], name: str, rest: list[str], key: str, setting: Setting
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
