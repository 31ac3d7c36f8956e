"""Text about configurations: `hone config show | explain | check`, and docs/config.md.

`python -m hone.config.document > docs/config.md` writes the page from the schema, with one table of working
keys per block, and an appendix of neutral, refused and other keys; `python -m hone.config.document rollout >
hone/trainer/config/rollout/rollout.yaml` writes verl's file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from hone.config import PPOTrainerConfig, config_to_dict
from hone.config.apply import ComposedConfig, ExtraChecks, compose_settings
from hone.config.convert import show_value, to_plain
from hone.config.dialect import OWN_KEYS, Dialect, Rule
from hone.config.errors import ConfigError
from hone.config.foreign_names import COUNTERPARTS
from hone.config.keys import blocks, get, keys_matching, leaves
from hone.config.short_keys import SHORT_KEYS, short_keys_of
from hone.config.sources import built_in_tree, read_config
from hone.config.trees import TREES, Tree
from hone.redaction import redact
from hone.suggestions import did_you_mean, nearest

_TREE_NAMES_PLACEHOLDER = "\0"
"""Placeholder in a text of `_explain_in_tree`; `explain` replaces it by the names of the trees."""
_INTRODUCTION = """# Configuration

Generated from `hone/config` by `python -m hone.config.document`; do not edit.

The tables list the working keys. The [appendix](#other-keys-and-values) lists the keys of verl that are
neutral (without effect; a value that requests another behaviour prints a note about what is done instead) or
refused (the run stops with a message).
`hone config explain KEY` explains any key (`--tree NAME`: in one tree), `hone config show` prints a
resolved tree with the origin of each value, and `hone config check FILE` prints every problem of a YAML
file.
"""
_APPENDIX = """## Other keys and values

`*` stands for one name, `**` for any number of names. The first table lists, for each key, the values that
need no message (`off` is null, false, 0 or empty). With any other value, a neutral key prints a note, and a
refused key stops the run.

The last table lists other names. `any where a and !b is c=*` means: if the key `a` is set and `b` is not,
the key `c` gets the value that was written. `any` stands for every value; `true` in its place is for true
only, `number` for numbers, and `count` for integers of 1 or more.
"""


def format_with_origins(composed: ComposedConfig, only_set: bool = False) -> str:
    """Formats a configuration as YAML, with the origin of each value; the notes are at the end."""
    import yaml

    root: type = type(composed.config)
    lines: list[str] = []
    previous_parents: list[str] = []
    for key, leaf in leaves(root).items():
        origin = composed.origins.get(key)
        if origin is None and any(set_key.startswith(f"{key}.") for set_key in composed.origins):
            origin = "partly set"
        if only_set and origin is None:
            continue
        *parents, name = key.split(".")
        for depth, parent in enumerate(parents):
            if parents[: depth + 1] != previous_parents[: depth + 1]:
                lines.append(f"{'  ' * depth}{parent}:")
        previous_parents = parents
        value = redact(to_plain(get(composed.config, key)), key)
        value_text = (
            json.dumps(value) if isinstance(value, str | dict | list) else show_value(value)
        )
        if isinstance(value, str) and "\n" not in value:
            value_text = yaml.safe_dump(value, width=1000, allow_unicode=True).splitlines()[0]
        text = f"{'  ' * len(parents)}{name}: {value_text}"
        default_origin = f"follows {leaf.followed_key}" if leaf.followed_key else "default"
        lines.append(f"{text:<52}  # {origin or default_origin}")
    heading = ["", "# set, but without effect here:"] if composed.notes else []
    if composed.tree_line:
        lines = [f"# {composed.tree_line}", *lines]
    return "\n".join([*lines, *heading, *(f"#   {note}" for note in composed.notes)]) + "\n"


def as_yaml(composed: ComposedConfig, block: str = "") -> str:
    """Formats a configuration, or one block, as plain YAML that composes to the same configuration."""
    import yaml

    tree = redact(config_to_dict(get(composed.config, block) if block else composed.config))
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return f"# @package {block}\n{text}" if block else text


def explain(key: str, tree: str | None = None, dialect: Dialect = OWN_KEYS) -> str:
    """Describes a key (effect, values, default) in one tree or in all trees; the key may also be an old
    name, a block or a misspelled name."""
    trees = list(TREES.values()) if tree is None else [TREES[tree]]
    if short_key_text := _explain_short_key(key, trees, tree, dialect):
        return short_key_text
    trees_by_text: dict[str, list[str]] = {}
    for candidate in trees:
        if text := _explain_in_tree(key, candidate, dialect):
            trees_by_text.setdefault(text, []).append(candidate.name)
    if trees_by_text:
        texts = (
            text.replace(_TREE_NAMES_PLACEHOLDER, ", ".join(names))
            for text, names in trees_by_text.items()
        )
        return "\n".join(texts)
    parent_key = key.rpartition(".")[0]  # the user may choose the names inside a mapping
    parents = (leaves(candidate.root).get(parent_key) for candidate in trees)
    if any(leaf is not None and isinstance(leaf.default, dict) for leaf in parents):
        return explain(parent_key, tree, dialect)
    for candidate in trees:
        current_name = dialect.new_name(key, candidate.name)
        if current_name != key:
            is_leaf = any(current_name in leaves(other.root) for other in trees)
            explanation = f"\n{explain(current_name, tree, dialect)}" if is_leaf else ""
            return f"{key} is another name of {current_name}\n{explanation}"
        if replacement := dialect.other_names(candidate.name).get(key):
            return f"{key} is replaced by other keys: {replacement}\n"
    full_keys = [name for candidate in trees for name in leaves(candidate.root)]
    full_keys = list(dict.fromkeys(name for name in full_keys if name.endswith(f".{key}")))
    if len(full_keys) == 1 and "." in key:
        return f"{key} is short for {full_keys[0]}\n\n{explain(full_keys[0], tree, dialect)}"
    for rule in dialect.rules():
        # A rule for a whole block of one tree (`x.**`) explains a key only if that tree was requested.
        explains_without_tree = tree is None and not rule.pattern.endswith("**")
        applies_to_tree = rule.tree in ("*", tree) or explains_without_tree
        if applies_to_tree and dialect.applies(rule, key):
            exceptions = "" if "any" in rule.values else ", ".join(map(show_value, rule.values))
            values = f" with other values than {exceptions}" if exceptions else ""
            return f"{key}: {rule.state}{values}\n  {rule.why}\n"
    where = f" in {tree}" if tree else ""
    all_keys = list(dict.fromkeys(name for candidate in trees for name in leaves(candidate.root)))
    if matches := [name for name in all_keys if name.rpartition(".")[2] == key]:
        return "\n  ".join([f"{len(matches)} keys end in '{key}'{where}:", *matches]) + "\n"
    hint = did_you_mean(*(keys_matching(key, all_keys) or [nearest(key, all_keys) or ""]))
    raise ConfigError(f"there is no key '{key}'{where}.{hint}")


def _explain_short_key(key: str, trees: list[Tree], tree: str | None, dialect: Dialect) -> str:
    """Describes a short name, or a foreign name of one, with its key; an empty string for other names."""
    name = next(iter(COUNTERPARTS.get(key, ())), key)
    tree_names: dict[str, list[str]] = {}
    for candidate in trees:
        if full_key := short_keys_of(candidate.root).get(name):
            tree_names.setdefault(full_key, []).append(candidate.name)
    if not tree_names or any(key in blocks(candidate.root) for candidate in trees):
        return ""
    meanings = (f"{full_key} ({', '.join(names)})" for full_key, names in tree_names.items())
    line = f"{name}: {SHORT_KEYS[name].doc}; short for {', '.join(meanings)}\n"
    return f"{line}\n{explain(next(iter(tree_names)), tree, dialect)}"


def _explain_in_tree(key: str, tree: Tree, dialect: Dialect) -> str | None:
    """Returns the text about a leaf or a block of a tree, or None if the tree has no such key."""
    tree_leaves = leaves(tree.root)
    if leaf := tree_leaves.get(key):
        lines = [key, f"  {leaf.doc}", ""]
        lines += [f"  takes    {leaf.accepted_values}", f"  default  {leaf.default_in_words}"]
        for rule in dialect.replacements(key):
            lines.append(f"           {show_value(list(rule.values))} becomes {rule.becomes}")
        short_names = [name for name, full in short_keys_of(tree.root).items() if full == key]
        if short_names:
            lines.append(f"  short    {', '.join(short_names)}")
        if old_names := [old for old, new in dialect.other_names(tree.name).items() if new == key]:
            lines.append(f"  also     {', '.join(old_names)}")
        return "\n".join([*lines, f"  tree     {_TREE_NAMES_PLACEHOLDER}"]) + "\n"
    if not key or key not in blocks(tree.root):
        return None
    block_leaves = [leaf for name, leaf in tree_leaves.items() if name.startswith(key + ".")]
    names = [leaf.key[len(key) + 1 :] for leaf in block_leaves]
    width = max(map(len, names))
    lines = [
        f"{key}: a block of {_TREE_NAMES_PLACEHOLDER}",
        f"  {blocks(tree.root)[key].__doc__}",
        "",
    ]
    for name, leaf in zip(names, block_leaves, strict=True):
        lines.append(f"  {name:<{width}}  {leaf.default_in_words}")
    return "\n".join(lines) + "\n"


def check(
    path: str | Path, extra_checks: ExtraChecks | None = None, dialect: Dialect = OWN_KEYS
) -> tuple[int, str]:
    """Composes a YAML file and returns (0, a summary with notes) or (1, every problem)."""
    file = Path(path).expanduser()

    def num_known_keys(tree: Tree) -> int:
        return sum(s.key in leaves(tree.root) for s in dialect.translate(settings, [], tree.name))

    if file.suffix not in (".yaml", ".yml"):
        return 1, (
            f"{file} is no YAML file; `hone train --dry-run key=value …` checks the overrides of a run\n"
        )
    try:
        schema, settings = read_config(file.stem, [file.parent], [], dialect)
        schema = schema or built_in_tree(file.stem, dialect)
        if not file.is_file():
            return 1, f"there is no file {file}\n"
        # If the file names no tree, use the tree with most of the keys; in a tie, `ppo_trainer`.
        tree = TREES[schema] if schema in TREES else max(TREES.values(), key=num_known_keys)
        composed = compose_settings(tree, settings, extra_checks, dialect=dialect)
    except ConfigError as error:
        lines = [
            f"{file}: {len(error.problems)} problem(s)",
            *(f"- {problem}" for problem in error.problems),
        ]
        return 1, "\n".join(lines) + "\n"
    lines = [f"{file}: fine, a {tree.name} config that sets {len(composed.origins)} keys"]
    lines += [f"- {note}" for note in (composed.tree_line, *composed.notes) if note]
    return 0, "\n".join(lines) + "\n"


def rollout_yaml() -> str:
    """Returns the defaults of the block `rollout` as YAML, for code that reads verl's file.

    A default that follows another key is written as a reference, as in `${trainer.seed}`.
    """
    return as_yaml(ComposedConfig(PPOTrainerConfig(), {}), "actor_rollout_ref.rollout")


def document(dialect: Dialect) -> str:
    """Returns the whole page."""
    trees = TREES.values()
    tree_rows = [
        (f"[`{tree.name}`](#{tree.name})", str(len(leaves(tree.root))), tree.purpose)
        for tree in trees
    ]
    rule_rows: list[tuple[str, ...]] = []
    for rule in dialect.rules():
        key, values = _rule_cells(rule)
        rule_rows.append((key, rule.state, values, rule.why))
    value_rows = [
        (*_rule_cells(rule), f"`{rule.becomes}`", rule.why) for rule in dialect.replacements()
    ]
    name_rows = [
        (tree.name, f"`{old_name}`", meaning)
        for tree in trees
        for old_name, meaning in dialect.other_names(tree.name).items()
    ]
    sections = [
        _INTRODUCTION,
        _table("tree | keys | for", tree_rows),
        *map(_tree_section, trees),
        _APPENDIX,
        _table("key | state | values without a message | why, or what to use", rule_rows),
        _table("key | written | becomes | note", value_rows),
        _table("tree | written | means", name_rows),
    ]
    return "\n".join(sections)


def _table(heading: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Formats a Markdown table."""
    lines = [f"| {heading} |", "|" + "---|" * (heading.count("|") + 1)]
    for row in rows:
        cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _tree_section(tree: Tree) -> str:
    parts = [f"## {tree.name}\n\n{tree.purpose[0].upper()}{tree.purpose[1:]}.\n"]
    rows_by_block: dict[str, list[tuple[str, ...]]] = {}
    for leaf in leaves(tree.root).values():
        block, _, name = leaf.key.rpartition(".")
        row = (f"`{name}`", leaf.accepted_values, f"`{leaf.default_in_words}`", leaf.doc)
        rows_by_block.setdefault(block, []).append(row)
    for block, rows in rows_by_block.items():
        doc = f"\n{blocks(tree.root)[block].__doc__}\n" if block else ""
        parts += [f"### {tree.name}: {block or 'root'}\n{doc}"]
        parts += [_table("key | takes | default | what it does", rows)]
    return "\n".join(parts)


def _rule_cells(rule: Rule) -> tuple[str, str]:
    """Returns the key and the values of a rule, as cells of a table."""
    tree = "" if rule.tree == "*" else f"{rule.tree}: "
    values = ", ".join(f"`{show_value(value)}`" for value in rule.values if value != "any")
    return f"{tree}`{rule.pattern}`", values


if __name__ == "__main__":
    from hone import program_dialect

    is_rollout = sys.argv[1:] == ["rollout"]
    sys.stdout.write(rollout_yaml() if is_rollout else document(program_dialect()))
