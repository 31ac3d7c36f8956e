"""Writes docs/config.md from the schema: `python -m hone.config.document > docs/config.md`.

One table per block with the keys that work; an appendix with the neutral and refused keys and other names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from hone.config.aliases import other_names
from hone.config.convert import show_value
from hone.config.keys import Leaf, find_block, leaves
from hone.config.states import Rule, replacements, rules
from hone.config.trees import TREES, Tree


def document() -> str:
    """The whole page."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield "# Configuration"
    yield ""
    yield "Generated from `hone/config` by `python -m hone.config.document`; do not edit."
    yield ""
    yield "These keys work. The [appendix](#other-keys-and-values) lists the keys of verl that are neutral (a"
    yield "run says in one line per topic what it does instead) or refused with a sentence."
    yield "`hone config explain KEY` explains any of them (`--tree NAME` in one tree), `hone config show`"
    yield "prints a resolved tree with origins, `hone config check FILE` every problem of a YAML file."
    yield ""
    yield "| tree | keys | for |"
    yield "|---|---|---|"
    for name, tree in TREES.items():
        yield f"| [`{name}`](#{name}) | {len(leaves(tree.root))} | {tree.purpose} |"
    yield ""
    for tree in TREES.values():
        yield from _tree(tree)
    yield from _appendix()


def _tree(tree: Tree) -> Iterator[str]:
    yield f"## {tree.name}"
    yield ""
    yield f"{tree.purpose[0].upper()}{tree.purpose[1:]}."
    yield ""
    blocks: dict[str, list[Leaf]] = {}
    for leaf in leaves(tree.root).values():
        blocks.setdefault(leaf.key.rpartition(".")[0], []).append(leaf)
    for name, inside in blocks.items():
        yield f"### {tree.name}: {name or 'root'}"
        yield ""
        block = find_block(tree.root, name) if name else None
        if block and block[1]:
            yield block[1]
            yield ""
        yield "| key | takes | default | what it does |"
        yield "|---|---|---|---|"
        yield from (_row(leaf) for leaf in inside)
        yield ""


def _row(leaf: Leaf) -> str:
    name, default = leaf.key.rpartition(".")[2], leaf.default_in_words
    return f"| `{name}` | {_cell(leaf.takes)} | `{_cell(default)}` | {_cell(leaf.doc)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _values(rule: Rule) -> str:
    return "" if "any" in rule.values else ", ".join(f"`{show_value(v)}`" for v in rule.values)


def _appendix() -> Iterator[str]:
    yield "## Other keys and values"
    yield ""
    yield "`*` stands for one name, `**` for any number. A neutral key runs with every value, and is noted"
    yield "where the value is not one of those named (`off`: null, false, 0, empty); a refused key stops"
    yield "the run there."
    yield ""
    yield "| key | state | values without a word | why, or what to use |"
    yield "|---|---|---|---|"
    for rule in rules():
        tree = f"{rule.tree}: " if rule.tree else ""
        yield f"| {tree}`{rule.pattern}` | {rule.state} | {_values(rule)} | {_cell(rule.why)} |"
    yield ""
    yield "| key | written | becomes | note |"
    yield "|---|---|---|---|"
    for value in replacements():
        written = ", ".join(f"`{show_value(v)}`" for v in value.values)
        becomes = show_value(value.becomes)
        yield f"| `{value.pattern}` | {written} | `{becomes}` | {_cell(value.why)} |"
    yield ""
    yield "| tree | written | means |"
    yield "|---|---|---|"
    for name in TREES:
        yield from (
            f"| {name} | `{old}` | {_cell(new)} |" for old, new in other_names(name).items()
        )


if __name__ == "__main__":
    sys.stdout.write(document())
