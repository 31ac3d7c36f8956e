"""`hone config show | explain | check`, as functions that return text.

The command line is wired in `hone.cli`; nothing here prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.config.absent import absent_rule
from hone.config.compose import Composed, compose, compose_settings, config_to_dict
from hone.config.convert import show_value
from hone.config.describe import (
    KeyInfo,
    default_in_words,
    describe_keys,
    find_block,
    find_key,
    follows_key,
    old_names,
)
from hone.config.errors import ConfigError, did_you_mean, nearest
from hone.config.keys import walk_fields
from hone.config.sources import Setting, read_config
from hone.config.states import Accepts, Rule
from hone.config.trees import TREES, Tree


def show(
    overrides: Sequence[str] = (),
    *,
    config_name: str = "ppo_trainer",
    config_path: str | Path | None = None,
    schema: str | None = None,
    only_set: bool = False,
) -> str:
    """The resolved tree as YAML, each value with its origin; `only_set` leaves defaults out.

    `schema` is the tree of a YAML that names none in its defaults list.
    """
    composed = compose(overrides, config_name=config_name, config_path=config_path, schema=schema)
    lines = list(_tree_lines(composed, only_set))
    if composed.notes:
        lines += ["", "# set, but without effect here:"]
        lines += [f"#   {note}" for note in composed.notes]
    return "\n".join(lines) + "\n"


def _tree_lines(composed: Composed, only_set: bool) -> Iterator[str]:
    defaults = {key: default for key, _, _, default in walk_fields(type(composed.config))}

    def origin(key: str) -> str:
        if key in composed.origins:
            return composed.origins[key]
        if any(k.startswith(key + ".") for k in composed.origins):
            return "partly set"
        followed = follows_key(defaults.get(key))
        return f"follows {followed}" if followed else "default"

    def walk(node: Mapping[str, Any], prefix: str, depth: int) -> Iterator[str]:
        for name, value in node.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and key not in defaults:
                inner = list(walk(value, key + ".", depth + 1))
                if inner:
                    yield f"{'  ' * depth}{name}:"
                    yield from inner
            elif not only_set or (
                origin(key) not in ("default",) and not origin(key).startswith("follows")
            ):
                text = f"{'  ' * depth}{name}: {_yaml_value(value)}"
                yield f"{text:<52}  # {origin(key)}"

    yield from walk(config_to_dict(composed.config), "", 0)


def _yaml_value(value: Any) -> str:
    import json

    if isinstance(value, str):
        plain = value and value == value.strip() and not set(value) & set(":#{}[],&*!|>'\"%@`\n\\")
        reserved = value.lower() in ("null", "true", "false", "yes", "no", "on", "off", "~")
        numeric = value.replace(".", "", 1).replace("-", "", 1).isdigit()
        return (
            value
            if plain and not reserved and not numeric
            else json.dumps(value, ensure_ascii=False)
        )
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return show_value(value)


def explain(key: str) -> str:
    """What a key does, takes and defaults to; old names, blocks and near misses too."""
    found = find_key(key)
    if found:
        return _explain_leaf(*found)
    block = find_block(key)
    if block:
        return _explain_block(key, *block)
    for name in TREES:
        names = old_names(name)
        new = names.get(key) or _renamed_block(key, names)
        if new:
            return f"{key} is another name: {new}\n" + (
                f"\n{explain(new)}" if find_key(new) else ""
            )
    rule = absent_rule(key)
    if rule:
        return f"{key}: {rule.state}\n  {rule.why}\n"
    every = [info.key for tree in TREES.values() for info in describe_keys(tree)]
    same_leaf = [k for k in every if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    if same_leaf and "." not in key:
        return (
            "\n".join([f"{len(same_leaf)} keys end in '{key}':", *(f"  {k}" for k in same_leaf)])
            + "\n"
        )
    suggestion = nearest(key, [*every, *same_leaf]) or (same_leaf[0] if same_leaf else None)
    raise ConfigError(f"there is no key '{key}'.{did_you_mean(suggestion)}")


def _renamed_block(key: str, names: Mapping[str, str]) -> str | None:
    for old, new in names.items():
        if old.endswith(".*") and key.startswith(old[:-1]):
            return new[:-1] + key[len(old) - 1 :]
    return None


def _explain_leaf(tree: Tree, info: KeyInfo) -> str:
    lines = [info.key, f"  {info.doc}", ""]
    lines.append(f"  takes    {info.takes}" + (f" ({info.bounds})" if info.bounds else ""))
    lines.append(f"  default  {default_in_words(info.default)}")
    lines.append(f"  state    {state_in_words(info.rule)}")
    if info.old_names:
        lines.append(f"  also     {', '.join(info.old_names)}")
    lines.append(f"  tree     {tree.name}")
    return "\n".join(lines) + "\n"


def _explain_block(key: str, tree: Tree, cls: type, doc: str) -> str:
    lines = [f"{key}: a block of {tree.name}", f"  {doc}", ""]
    inside = [info for info in describe_keys(tree) if info.key.startswith(key + ".")]
    width = max(len(info.key) for info in inside) - len(key) - 1
    lines += [f"  {i.key[len(key) + 1 :]:<{width}}  {default_in_words(i.default)}" for i in inside]
    return "\n".join(lines) + "\n"


def state_in_words(rule: Rule) -> str:
    """A rule as one reads it."""
    if not rule.why:
        return rule.state
    if isinstance(rule.accepts, Accepts):
        return f"{rule.state}: {rule.why}"
    return (
        f"{rule.state} with {', '.join(show_value(v) for v in rule.accepts)}; otherwise: {rule.why}"
    )


def check(path: str | Path) -> tuple[int, str]:
    """Compose a YAML file and report: 0 and what it sets, or 1 and every problem."""
    file = Path(path).expanduser()
    if file.suffix not in (".yaml", ".yml"):
        return 1, f"{file} is no YAML file\n"
    try:
        schema, settings = read_config(file.stem, file.parent, tuple(TREES))
        if not file.is_file():
            return 1, f"there is no file {file}\n"
        tree = TREES[schema] if schema in TREES else _likely_tree(settings)
        composed = compose_settings(tree, settings)
    except ConfigError as error:
        return 1, "\n".join(
            [f"{file}: {len(error.problems)} problem(s)", *(f"- {p}" for p in error.problems)]
        ) + "\n"
    lines = [f"{file}: fine, a {tree.name} config that sets {len(composed.origins)} keys"]
    lines += [f"- {note}" for note in composed.notes]
    return 0, "\n".join(lines) + "\n"


def _likely_tree(settings: Sequence[Setting]) -> Tree:
    """The tree with most of the settings' keys; `ppo_trainer` where two have as many."""

    def known(tree: Tree) -> int:
        leaves = {key for key, *_ in walk_fields(tree.root)}
        return sum(s.key in leaves for s in tree.translate(settings, []))

    return max(TREES.values(), key=known)
