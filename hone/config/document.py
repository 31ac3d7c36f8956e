"""Writes docs/config.md from the schema: `python -m hone.config.document > docs/config.md`.

`python -m hone.config.document rollout > hone/trainer/config/rollout/rollout.yaml` writes verl's file.
The page has one table of working keys per block, and an appendix of neutral, refused and other keys.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from hone.config import ComposedConfig, PPOTrainerConfig
from hone.config.commands import as_yaml
from hone.config.convert import show_value
from hone.config.keys import blocks, leaves
from hone.config.states import Rule, other_names, rules
from hone.config.trees import TREES, Tree

_INTRODUCTION = """# Configuration

Generated from `hone/config` by `python -m hone.config.document`; do not edit.

The tables list the working keys. The [appendix](#other-keys-and-values) lists the keys of verl that are
neutral (the run prints a note about what it does instead) or refused (the run stops with a message).
`hone config explain KEY` explains any key (`--tree NAME`: in one tree), `hone config show` prints a
resolved tree with the origin of each value, and `hone config check FILE` prints every problem of a YAML
file.
"""
_APPENDIX = """## Other keys and values

`*` stands for one name, `**` for any number of names. The first table lists, for each key, the values that
need no message (`off` is null, false, 0 or empty). With any other value, a neutral key prints a note, and a
refused key stops the run. In the last table, `where KEY` means that the key is set, `!KEY` that it is not
set, and `=*` that the new key gets the value that was written.
"""


def rollout_yaml() -> str:
    """Returns the rollout's defaults, with references, for code that reads verl's YAML file."""
    return as_yaml(ComposedConfig(PPOTrainerConfig(), {}), "actor_rollout_ref.rollout")


def document() -> str:
    """Returns the whole page."""
    trees = TREES.values()
    tree_rows = ((f"[`{t.name}`](#{t.name})", str(len(leaves(t.root))), t.purpose) for t in trees)
    rule_rows = (
        (key, r.state, values, r.why)
        for r in rules("refused", "neutral")
        for key, values in [_rule_cells(r)]
    )
    value_rows = ((*_rule_cells(r), f"`{r.becomes}`", r.why) for r in rules("values"))
    name_rows = ((t, f"`{old}`", new) for t in TREES for old, new in other_names(t).items())
    parts = [
        _INTRODUCTION,
        _table("tree | keys | for", tree_rows),
        *map(_tree_section, trees),
        _APPENDIX,
        _table("key | state | values without a message | why, or what to use", rule_rows),
        _table("key | written | becomes | note", value_rows),
        _table("tree | written | means", name_rows),
    ]
    return "\n".join(parts)


def _table(heading: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Formats a Markdown table."""
    lines = [f"| {heading} |", "|" + "---|" * (heading.count("|") + 1)]
    for row in rows:
        cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _tree_section(tree: Tree) -> str:
    parts = [f"## {tree.name}\n\n{tree.purpose[0].upper()}{tree.purpose[1:]}.\n"]
    by_block: dict[str, list[tuple[str, ...]]] = {}
    for leaf in leaves(tree.root).values():
        block, _, name = leaf.key.rpartition(".")
        row = (f"`{name}`", leaf.accepted_values, f"`{leaf.default_in_words}`", leaf.doc)
        by_block.setdefault(block, []).append(row)
    for block, rows in by_block.items():
        doc = f"\n{blocks(tree.root)[block].__doc__}\n" if block else ""
        parts += [f"### {tree.name}: {block or 'root'}\n{doc}"]
        parts += [_table("key | takes | default | what it does", rows)]
    return "\n".join(parts)


def _rule_cells(rule: Rule) -> tuple[str, str]:
    """Returns the key and the values of a rule."""
    tree = "" if rule.tree == "*" else f"{rule.tree}: "
    values = ", ".join(f"`{show_value(value)}`" for value in rule.values if value != "any")
    return f"{tree}`{rule.pattern}`", values


if __name__ == "__main__":
    sys.stdout.write(rollout_yaml() if sys.argv[1:] == ["rollout"] else document())
