"""Writes docs/config.md from the schema: `python -m hone.config.document > docs/config.md`.

`python -m hone.config.document rollout > hone/trainer/config/rollout/rollout.yaml` writes verl's file.
One table per block with the keys that work; an appendix with the neutral and refused keys and other names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from hone.config import Composed, PPOTrainerConfig
from hone.config.commands import as_yaml
from hone.config.convert import show_value
from hone.config.keys import blocks, leaves
from hone.config.states import Rule, other_names, rules
from hone.config.trees import TREES, Tree

_START = """# Configuration

Generated from `hone/config` by `python -m hone.config.document`; do not edit.

These keys work. The [appendix](#other-keys-and-values) lists the keys of verl that are neutral (a
run says in one line per topic what it does instead) or refused with a sentence.
`hone config explain KEY` explains any of them (`--tree NAME` in one tree), `hone config show`
prints a resolved tree with origins, `hone config check FILE` every problem of a YAML file.
"""
_APPENDIX = """## Other keys and values

`*` stands for one name, `**` for any number. A neutral key runs with every value, and is noted
where the value is not one of those named (`off`: null, false, 0, empty); a refused key stops
the run there. Of other names, `where KEY` means that it was set, `!KEY` that it was not, and `=*`
takes the value that was written.
"""


def rollout_yaml() -> str:
    """Returns the rollout's defaults, with references, for code that reads verl's YAML file."""
    return as_yaml(Composed(PPOTrainerConfig(), {}), "actor_rollout_ref.rollout")


def document() -> str:
    """Returns the whole page."""
    trees = TREES.values()
    counts = ((f"[`{t.name}`](#{t.name})", str(len(leaves(t.root))), t.purpose) for t in trees)
    parts = [_START, _table("tree | keys | for", counts), *map(_tree, trees), _APPENDIX]
    states = ((_key(r), r.state, _values(r), r.why) for r in rules("refused", "neutral"))
    parts += [_table("key | state | values without a word | why, or what to use", states)]
    replaced = ((_key(r), _values(r), f"`{r.becomes}`", r.why) for r in rules("values"))
    parts += [_table("key | written | becomes | note", replaced)]
    names = ((name, f"`{old}`", new) for name in TREES for old, new in other_names(name).items())
    return "\n".join([*parts, _table("tree | written | means", names)])


def _table(heading: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Formats a Markdown table."""
    lines = [f"| {heading} |", "|" + "---|" * (heading.count("|") + 1)]
    for row in rows:
        cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _tree(tree: Tree) -> str:
    parts = [f"## {tree.name}\n\n{tree.purpose[0].upper()}{tree.purpose[1:]}.\n"]
    by_block: dict[str, list[tuple[str, ...]]] = {}
    for leaf in leaves(tree.root).values():
        block, _, name = leaf.key.rpartition(".")
        row = (f"`{name}`", leaf.takes, f"`{leaf.default_in_words}`", leaf.doc)
        by_block.setdefault(block, []).append(row)
    for block, rows in by_block.items():
        doc = f"\n{blocks(tree.root)[block].__doc__}\n" if block else ""
        parts += [f"### {tree.name}: {block or 'root'}\n{doc}"]
        parts += [_table("key | takes | default | what it does", rows)]
    return "\n".join(parts)


def _key(rule: Rule) -> str:
    return ("" if rule.tree == "*" else f"{rule.tree}: ") + f"`{rule.pattern}`"


def _values(rule: Rule) -> str:
    return ", ".join(f"`{show_value(value)}`" for value in rule.values if value != "any")


if __name__ == "__main__":
    sys.stdout.write(rollout_yaml() if sys.argv[1:] == ["rollout"] else document())
