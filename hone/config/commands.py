"""`hone config show | explain | check`, as functions that return text.

The command line is wired in `hone.cli`; nothing here prints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from hone.config import config_to_dict
from hone.config.apply import Composed, ExtraChecks, compose_settings
from hone.config.convert import show_value, to_plain
from hone.config.errors import ConfigError, did_you_mean, nearest
from hone.config.keys import blocks, fitting, get, leaves
from hone.config.sources import read_config
from hone.config.states import names, new_name, other_names, rules, rules_of, translate
from hone.config.trees import TREES, Tree

_TREE_NAMES = "\0"
"""Placeholder for the names of the trees that a text applies to."""


def with_origins(composed: Composed, only_set: bool = False) -> str:
    """Formats a configuration as YAML, with the origin of each value and the notes at the end."""
    notes = [f"#   {note}" for note in composed.notes]
    head = ["", "# set, but without effect here:"] if notes else []
    return "\n".join([*_tree_lines(composed, only_set), *head, *notes]) + "\n"


def as_yaml(composed: Composed, block: str = "") -> str:
    """Formats a configuration, or one block, as plain YAML that composes to the same configuration."""
    import yaml

    tree = config_to_dict(get(composed.config, block) if block else composed.config)
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return f"# @package {block}\n{text}" if block else text


def _tree_lines(composed: Composed, only_set: bool) -> Iterator[str]:
    import yaml

    root: type = type(composed.config)
    before: list[str] = []
    for key, leaf in leaves(root).items():
        origin = composed.origins.get(key)
        if origin is None and any(k.startswith(key + ".") for k in composed.origins):
            origin = "partly set"
        if only_set and origin is None:
            continue
        *way, name = key.split(".")
        for depth, part in enumerate(way):
            if way[: depth + 1] != before[: depth + 1]:
                yield f"{'  ' * depth}{part}:"
        before = way
        value = to_plain(get(composed.config, key))
        written = json.dumps(value) if isinstance(value, str | dict | list) else show_value(value)
        if isinstance(value, str) and "\n" not in value:
            written = yaml.safe_dump(value, width=1000, allow_unicode=True).splitlines()[0]
        text = f"{'  ' * len(way)}{name}: {written}"
        by_default = f"follows {leaf.followed}" if leaf.followed else "default"
        yield f"{text:<52}  # {origin or by_default}"


def explain(key: str, tree: str | None = None) -> str:
    """Describes a key (effect, values, default) in one tree or in all; also handles old names, blocks
    and misspelled keys."""
    trees = list(TREES.values()) if tree is None else [TREES[tree]]
    by_text: dict[str, list[str]] = {}
    for owner in trees:
        if text := _explain_known(key, owner):
            by_text.setdefault(text, []).append(owner.name)
    if by_text:
        texts = (text.replace(_TREE_NAMES, ", ".join(n)) for text, n in by_text.items())
        return "\n".join(texts)
    table = key.rpartition(".")[0]  # a user-defined name inside a mapping
    if any(
        isinstance(leaves(t.root)[table].default, dict) for t in trees if table in leaves(t.root)
    ):
        return explain(table, tree)
    for name in (t.name for t in trees):
        new = other_names(name).get(key) or new_name(key, name)
        if new != key:
            leaf = any(new in leaves(t.root) for t in trees)
            return f"{key} is another name: {new}\n" + (f"\n{explain(new, tree)}" if leaf else "")
    for rule in rules("refused", "neutral"):
        mine = rule.tree == tree or (tree is None and not rule.pattern.endswith("**"))
        if (rule.tree == "*" or mine) and names(rule.pattern, key):
            silent = "" if "any" in rule.values else ", ".join(map(show_value, rule.values))
            values = f" with other values than {silent}" if silent else ""
            return f"{key}: {rule.state}{values}\n  {rule.why}\n"
    where = f" in {tree}" if tree else ""
    every = list(dict.fromkeys(name for owner in trees for name in leaves(owner.root)))
    if same := [name for name in every if name.rpartition(".")[2] == key]:
        return "\n  ".join([f"{len(same)} keys end in '{key}'{where}:", *same]) + "\n"
    hint = did_you_mean(*(fitting(key, every) or [nearest(key, every) or ""]))
    raise ConfigError(f"there is no key '{key}'{where}.{hint}")


def _explain_known(key: str, tree: Tree) -> str | None:
    """Returns the text about a leaf or a block of a tree."""
    every = leaves(tree.root)
    if leaf := every.get(key):
        lines = [key, f"  {leaf.doc}", ""]
        lines += [f"  takes    {leaf.takes}", f"  default  {leaf.default_in_words}"]
        replaced = rules_of(key, "values")
        lines += [f"           {show_value(list(r.values))} becomes {r.becomes}" for r in replaced]
        if old := [old for old, new in other_names(tree.name).items() if new == key]:
            lines.append(f"  also     {', '.join(old)}")
        return "\n".join([*lines, f"  tree     {_TREE_NAMES}"]) + "\n"
    if not key or key not in blocks(tree.root):
        return None
    inside = {name[len(key) + 1 :]: every[name] for name in every if name.startswith(key + ".")}
    width = max(map(len, inside))
    lines = [f"{key}: a block of {_TREE_NAMES}", f"  {blocks(tree.root)[key].__doc__}", ""]
    lines += [f"  {name:<{width}}  {leaf.default_in_words}" for name, leaf in inside.items()]
    return "\n".join(lines) + "\n"


def check(path: str | Path, extra_checks: ExtraChecks | None = None) -> tuple[int, str]:
    """Composes a YAML file and returns (0, what it sets) or (1, every problem)."""
    file = Path(path).expanduser()

    def known_keys(tree: Tree) -> int:
        return sum(s.key in leaves(tree.root) for s in translate(settings, [], tree.name))

    if file.suffix not in (".yaml", ".yml"):
        return 1, f"{file} is no YAML file\n"
    try:
        schema, settings = read_config(file.stem, [file.parent], [])
        if not file.is_file():
            return 1, f"there is no file {file}\n"
        # Otherwise the tree with most of the keys; `ppo_trainer` in a tie.
        tree = TREES[schema] if schema in TREES else max(TREES.values(), key=known_keys)
        composed = compose_settings(tree, settings, extra_checks)
    except ConfigError as error:
        lines = [f"{file}: {len(error.problems)} problem(s)", *(f"- {p}" for p in error.problems)]
        return 1, "\n".join(lines) + "\n"
    lines = [f"{file}: fine, a {tree.name} config that sets {len(composed.origins)} keys"]
    lines += [f"- {note}" for note in composed.notes]
    return 0, "\n".join(lines) + "\n"
