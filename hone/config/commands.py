"""`hone config show | explain | check`, as functions that return text.

The command line is wired in `hone.cli`; nothing here prints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from hone.config import config_to_dict
from hone.config.apply import ComposedConfig, ExtraChecks, compose_settings
from hone.config.convert import show_value, to_plain
from hone.config.errors import ConfigError, did_you_mean, nearest
from hone.config.keys import blocks, get, keys_matching, leaves
from hone.config.sources import BUILT_IN_TREES, read_config
from hone.config.states import matches_pattern, new_name, other_names, rules, rules_of, translate
from hone.config.trees import TREES, Tree

_TREE_NAMES = "\0"
"""Stands for the names of the trees to which a text applies."""


def format_with_origins(composed: ComposedConfig, only_set: bool = False) -> str:
    """Formats a configuration as YAML, with the origin of each value; the notes are at the end."""
    notes = [f"#   {note}" for note in composed.notes]
    heading = ["", "# set, but without effect here:"] if notes else []
    return "\n".join([*_tree_lines(composed, only_set), *heading, *notes]) + "\n"


def as_yaml(composed: ComposedConfig, block: str = "") -> str:
    """Formats a configuration, or one block, as plain YAML that composes to the same configuration."""
    import yaml

    tree = config_to_dict(get(composed.config, block) if block else composed.config)
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return f"# @package {block}\n{text}" if block else text


def _tree_lines(composed: ComposedConfig, only_set: bool) -> Iterator[str]:
    import yaml

    root: type = type(composed.config)
    previous_parents: list[str] = []
    for key, leaf in leaves(root).items():
        origin = composed.origins.get(key)
        if origin is None and any(k.startswith(key + ".") for k in composed.origins):
            origin = "partly set"
        if only_set and origin is None:
            continue
        *parents, name = key.split(".")
        for depth, parent in enumerate(parents):
            if parents[: depth + 1] != previous_parents[: depth + 1]:
                yield f"{'  ' * depth}{parent}:"
        previous_parents = parents
        value = to_plain(get(composed.config, key))
        value_text = (
            json.dumps(value) if isinstance(value, str | dict | list) else show_value(value)
        )
        if isinstance(value, str) and "\n" not in value:
            value_text = yaml.safe_dump(value, width=1000, allow_unicode=True).splitlines()[0]
        text = f"{'  ' * len(parents)}{name}: {value_text}"
        default_origin = f"follows {leaf.followed_key}" if leaf.followed_key else "default"
        yield f"{text:<52}  # {origin or default_origin}"


def explain(key: str, tree: str | None = None) -> str:
    """Describes a key (effect, values, default) in one tree or in all trees; the key may also be an old
    name, a block or a misspelled name."""
    trees = list(TREES.values()) if tree is None else [TREES[tree]]
    trees_by_text: dict[str, list[str]] = {}
    for candidate in trees:
        if text := _explain_known(key, candidate):
            trees_by_text.setdefault(text, []).append(candidate.name)
    if trees_by_text:
        texts = (text.replace(_TREE_NAMES, ", ".join(n)) for text, n in trees_by_text.items())
        return "\n".join(texts)
    mapping = key.rpartition(".")[0]  # the user may choose the names inside a mapping
    parents = (leaves(t.root).get(mapping) for t in trees)
    if any(leaf is not None and isinstance(leaf.default, dict) for leaf in parents):
        return explain(mapping, tree)
    for name in (t.name for t in trees):
        new = other_names(name).get(key) or new_name(key, name)
        if new != key:
            is_leaf = any(new in leaves(t.root) for t in trees)
            explanation = f"\n{explain(new, tree)}" if is_leaf else ""
            return f"{key} is another name: {new}\n{explanation}"
    for rule in rules("refused", "neutral"):
        is_of_tree = rule.tree == tree or (tree is None and not rule.pattern.endswith("**"))
        if (rule.tree == "*" or is_of_tree) and matches_pattern(rule.pattern, key):
            exceptions = "" if "any" in rule.values else ", ".join(map(show_value, rule.values))
            values = f" with other values than {exceptions}" if exceptions else ""
            return f"{key}: {rule.state}{values}\n  {rule.why}\n"
    where = f" in {tree}" if tree else ""
    all_keys = list(dict.fromkeys(name for t in trees for name in leaves(t.root)))
    if matches := [name for name in all_keys if name.rpartition(".")[2] == key]:
        return "\n  ".join([f"{len(matches)} keys end in '{key}'{where}:", *matches]) + "\n"
    hint = did_you_mean(*(keys_matching(key, all_keys) or [nearest(key, all_keys) or ""]))
    raise ConfigError(f"there is no key '{key}'{where}.{hint}")


def _explain_known(key: str, tree: Tree) -> str | None:
    """Returns the text about a leaf or a block of a tree, or None if the tree has no such key."""
    tree_leaves = leaves(tree.root)
    if leaf := tree_leaves.get(key):
        lines = [key, f"  {leaf.doc}", ""]
        lines += [f"  takes    {leaf.accepted_values}", f"  default  {leaf.default_in_words}"]
        for rule in rules_of(key, "values"):
            lines.append(f"           {show_value(list(rule.values))} becomes {rule.becomes}")
        if old_names := [old for old, new in other_names(tree.name).items() if new == key]:
            lines.append(f"  also     {', '.join(old_names)}")
        return "\n".join([*lines, f"  tree     {_TREE_NAMES}"]) + "\n"
    if not key or key not in blocks(tree.root):
        return None
    block_leaves = [leaf for name, leaf in tree_leaves.items() if name.startswith(key + ".")]
    names = [leaf.key[len(key) + 1 :] for leaf in block_leaves]
    width = max(map(len, names))
    lines = [f"{key}: a block of {_TREE_NAMES}", f"  {blocks(tree.root)[key].__doc__}", ""]
    for name, leaf in zip(names, block_leaves, strict=True):
        lines.append(f"  {name:<{width}}  {leaf.default_in_words}")
    return "\n".join(lines) + "\n"


def check(path: str | Path, extra_checks: ExtraChecks | None = None) -> tuple[int, str]:
    """Composes a YAML file and returns (0, a summary with notes) or (1, every problem)."""
    file = Path(path).expanduser()

    def num_known_keys(tree: Tree) -> int:
        return sum(s.key in leaves(tree.root) for s in translate(settings, [], tree.name))

    if file.suffix not in (".yaml", ".yml"):
        return 1, (
            f"{file} is no YAML file; `hone train --dry-run key=value …` checks the overrides of a run\n"
        )
    try:
        schema, settings = read_config(file.stem, [file.parent], [])
        schema = schema or BUILT_IN_TREES.get(file.stem)
        if not file.is_file():
            return 1, f"there is no file {file}\n"
        # If the file names no tree, use the tree with most of the keys; in a tie, `ppo_trainer`.
        tree = TREES[schema] if schema in TREES else max(TREES.values(), key=num_known_keys)
        composed = compose_settings(tree, settings, extra_checks)
    except ConfigError as error:
        lines = [f"{file}: {len(error.problems)} problem(s)", *(f"- {p}" for p in error.problems)]
        return 1, "\n".join(lines) + "\n"
    lines = [f"{file}: fine, a {tree.name} config that sets {len(composed.origins)} keys"]
    lines += [f"- {note}" for note in composed.notes]
    return 0, "\n".join(lines) + "\n"
