"""`hone config show | explain | check`, as functions that return text.

The command line is wired in `hone.cli`; nothing here prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hone.config.aliases import new_name, other_names
from hone.config.apply import Composed, Further, abbreviates, compose_settings
from hone.config.block import Value
from hone.config.compose import config_to_dict
from hone.config.convert import show_value
from hone.config.errors import ConfigError, did_you_mean, nearest
from hone.config.keys import Leaf, find_block, get, leaves
from hone.config.sources import Setting, read_config
from hone.config.states import Rule, names, replacements_of, rules
from hone.config.trees import TREES, Tree
from hone.types import Settings

_TREE_NAMES = "\0"
"""Where a text names the trees it is true of."""


def with_origins(composed: Composed, only_set: bool = False) -> str:
    """A configuration as YAML, each value with its origin, the notes at the end."""
    lines = list(_tree_lines(composed, only_set))
    if composed.notes:
        lines += ["", "# set, but without effect here:"]
        lines += [f"#   {note}" for note in composed.notes]
    return "\n".join(lines) + "\n"


def as_yaml(composed: Composed, block: str = "") -> str:
    """A configuration, or a block of it, as plain YAML that composes to the same again."""
    import yaml

    tree = config_to_dict(get(composed.config, block) if block else composed.config)
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return f"# @package {block}\n{text}" if block else text


def _tree_lines(composed: Composed, only_set: bool) -> Iterator[str]:
    root: type = type(composed.config)
    known = leaves(root)

    def origin(key: str) -> str:
        if key in composed.origins:
            return composed.origins[key]
        if any(k.startswith(key + ".") for k in composed.origins):
            return "partly set"
        followed = known[key].followed
        return f"follows {followed}" if followed else "default"

    def walk(node: Settings, prefix: str, depth: int) -> Iterator[str]:
        for name, value in node.items():
            key = f"{prefix}{name}"
            if key not in known:
                inner = list(walk(value, key + ".", depth + 1))
                if inner:
                    yield f"{'  ' * depth}{name}:"
                    yield from inner
            elif not only_set or not origin(key).startswith(("default", "follows")):
                text = f"{'  ' * depth}{name}: {_yaml_value(value)}"
                yield f"{text:<52}  # {origin(key)}"

    yield from walk(config_to_dict(composed.config), "", 0)


def _yaml_value(value: Value) -> str:
    import json

    if isinstance(value, str):
        plain = value and value == value.strip() and not set(value) & set(":#{}[],&*!|>'\"%@`\n\\")
        reserved = value.lower() in ("null", "true", "false", "yes", "no", "on", "off", "~")
        numeric = value.replace(".", "", 1).replace("-", "", 1).isdigit()
        if plain and not reserved and not numeric:
            return value
    return (
        json.dumps(value, ensure_ascii=False)
        if isinstance(value, str | dict | list)
        else show_value(value)
    )


def explain(key: str, tree: str | None = None) -> str:
    """What a key does, takes and defaults to in every tree that has it, or in the one named; old
    names, blocks and near misses too."""
    trees = list(TREES.values()) if tree is None else [TREES[tree]]
    if texts := [(t, text) for t in trees if (text := _explain_known(key, t))]:
        return _joined(texts)
    for name in (t.name for t in trees):
        new = other_names(name).get(key) or new_name(key, name)
        if new != key:
            leaf = any(new in leaves(t.root) for t in trees)
            return f"{key} is another name: {new}\n" + (f"\n{explain(new, tree)}" if leaf else "")
    for rule in rules():
        mine = rule.tree == tree or (tree is None and not rule.pattern.endswith("**"))
        if (rule.tree is None or mine) and names(rule.pattern, key):
            return f"{key}: {state_in_words(rule)}\n"
    return _near(key, trees, f" in {tree}" if tree else "")


def _near(key: str, trees: Sequence[Tree], where: str) -> str:
    """The keys that a bare last word may mean; for any other key that does not exist, an error."""
    every = list(dict.fromkeys(known for tree in trees for known in leaves(tree.root)))
    if "." not in key and (same := [k for k in every if k.rsplit(".", 1)[-1] == key]):
        return "\n  ".join([f"{len(same)} keys end in '{key}'{where}:", *same]) + "\n"
    fitting = [k for k in every if abbreviates(key, k)]
    if len(fitting) > 1:
        raise ConfigError(
            f"there is no key '{key}'{where}. Did you mean one of {', '.join(fitting)}?"
        )
    suggestion = fitting[0] if fitting else nearest(key, every)
    raise ConfigError(f"there is no key '{key}'{where}.{did_you_mean(suggestion)}")


def _joined(texts: Sequence[tuple[Tree, str]]) -> str:
    """One text for all trees that say the same."""
    by_text: dict[str, list[str]] = {}
    for tree, text in texts:
        by_text.setdefault(text, []).append(tree.name)
    return "\n".join(t.replace(_TREE_NAMES, ", ".join(names)) for t, names in by_text.items())


def _explain_known(key: str, tree: Tree) -> str | None:
    """The text about a leaf or a block of a tree."""
    known = leaves(tree.root)
    if key in known:
        return _explain_leaf(known[key], tree)
    block = find_block(tree.root, key)
    if block is None:
        return None
    inside = [leaf for name, leaf in known.items() if name.startswith(key + ".")]
    width = max(len(leaf.key) for leaf in inside) - len(key) - 1
    lines = [f"{key}: a block of {_TREE_NAMES}", f"  {block[1]}", ""]
    lines += [f"  {i.key[len(key) + 1 :]:<{width}}  {i.default_in_words}" for i in inside]
    return "\n".join(lines) + "\n"


def _explain_leaf(leaf: Leaf, tree: Tree) -> str:
    lines = [leaf.key, f"  {leaf.doc}", ""]
    lines += [f"  takes    {leaf.takes}", f"  default  {leaf.default_in_words}"]
    lines += [
        f"           {show_value(list(r.values))} becomes {show_value(r.becomes)}"
        for r in replacements_of(leaf.key)
    ]
    if old := [old for old, new in other_names(tree.name).items() if new == leaf.key]:
        lines.append(f"  also     {', '.join(old)}")
    return "\n".join([*lines, f"  tree     {_TREE_NAMES}"]) + "\n"


def state_in_words(rule: Rule) -> str:
    """A rule as one reads it."""
    fine = ", ".join(show_value(v) for v in rule.values)
    asked = "" if "any" in rule.values or not fine else f" with other values than {fine}"
    return f"{rule.state}{asked}\n  {rule.why}"


def check(path: str | Path, further: Further | None = None) -> tuple[int, str]:
    """Compose a YAML file and report: 0 and what it sets, or 1 and every problem."""
    file = Path(path).expanduser()
    if file.suffix not in (".yaml", ".yml"):
        return 1, f"{file} is no YAML file\n"
    try:
        schema, settings = read_config(file.stem, [file.parent], [])
        if not file.is_file():
            return 1, f"there is no file {file}\n"
        tree = TREES[schema] if schema in TREES else _likely_tree(settings)
        composed = compose_settings(tree, settings, further)
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
        return sum(s.key in leaves(tree.root) for s in tree.translate(settings, []))

    return max(TREES.values(), key=known)
