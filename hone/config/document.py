"""Writes docs/config.md from the schema: `python -m hone.config.document > docs/config.md`.

One table a block, each key with type, default, state and docstring; the alias table; counts by state.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

from hone.config.absent import ABSENT_RULES
from hone.config.commands import state_in_words
from hone.config.describe import KeyInfo, default_in_words, describe_keys, find_blocks, old_names
from hone.config.states import State
from hone.config.trees import TREES, Tree

STATES: tuple[State, ...] = ("works", "neutral", "refused")


def document() -> str:
    """The whole page."""
    return "\n".join(_page()) + "\n"


def counts() -> dict[str, Counter[str]]:
    """Keys by state for each tree."""
    return {
        name: Counter(info.state for info in describe_keys(tree)) for name, tree in TREES.items()
    }


def _page() -> Iterator[str]:
    yield "# Configuration"
    yield ""
    yield "Generated from `hone/config` by `python -m hone.config.document`; do not edit."
    yield ""
    yield "A key **works**, is **neutral** (its value asks for nothing that differs here; a run lists the"
    yield "neutral keys that were set once at start, of a file's only those that differ from the default),"
    yield "or is **refused** with the sentence in its row."
    yield "`hone config explain KEY` prints a key's rows (`--tree NAME` those of one tree),"
    yield "`hone config show` a resolved tree with origins,"
    yield "`hone config check FILE` every problem of a YAML file."
    yield ""
    yield "| tree | works | neutral | refused | all |"
    yield "|---|---|---|---|---|"
    for name, count in counts().items():
        cells = [str(count[state]) for state in STATES]
        yield f"| [`{name}`](#{name}) | {' | '.join(cells)} | {sum(count.values())} |"
    yield ""
    for tree in TREES.values():
        yield from _tree(tree)
    yield from _absent()


def _tree(tree: Tree) -> Iterator[str]:
    yield f"## {tree.name}"
    yield ""
    yield f"{tree.purpose[0].upper()}{tree.purpose[1:]}."
    yield ""
    blocks: dict[str, list[KeyInfo]] = {}
    for info in describe_keys(tree):
        blocks.setdefault(info.key.rpartition(".")[0], []).append(info)
    for block, infos in blocks.items():
        found = find_blocks(block, [tree]) if block else []
        yield f"### {tree.name}: {block or 'root'}"
        yield ""
        if found and found[0][2]:
            yield found[0][2]
            yield ""
        yield "| key | takes | default | state | what it does |"
        yield "|---|---|---|---|---|"
        yield from (_row(info) for info in infos)
        yield ""
    yield f"### {tree.name}: other names"
    yield ""
    yield "| written | means |"
    yield "|---|---|"
    yield from (f"| `{old}` | {_cell(new)} |" for old, new in old_names(tree.name).items())
    yield ""


def _row(info: KeyInfo) -> str:
    takes = info.takes + (f" ({info.bounds})" if info.bounds else "")
    name = info.key.rpartition(".")[2]
    default = default_in_words(info.default)
    cells = [
        f"`{name}`",
        _cell(takes),
        f"`{_cell(default)}`",
        _cell(state_in_words(info.rule)),
        _cell(info.doc),
    ]
    return "| " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _absent() -> Iterator[str]:
    yield "## Keys of the family outside these trees"
    yield ""
    yield "`*` stands for one name, `**` for any number. A refused key may still be written with a value"
    yield "that says it is off (null, false, 0, empty)."
    yield ""
    yield "| key | state | why, or what to use |"
    yield "|---|---|---|"
    for rule in ABSENT_RULES:
        yield f"| `{rule.pattern}` | {rule.state} | {_cell(rule.why)} |"


if __name__ == "__main__":
    sys.stdout.write(document())
