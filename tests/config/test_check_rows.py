"""Every key in the rows of rules.txt about keys that depend on each other exists."""

from __future__ import annotations

import re
from functools import partial

import pytest

from hone.config.checks import rows_of
from hone.config.conditions import condition_holds
from hone.config.convert import parse_scalar
from hone.config.keys import blocks, get, leaves
from hone.config.trees import TREES
from hone.verl.dialect import load_config

PROBLEMS = list(rows_of("problems"))
ADJUSTED = list(rows_of("adjusted"))


@pytest.mark.parametrize(
    ("condition", "true"),
    [
        ("trainer.nnodes=1", True),
        ("trainer.nnodes=true", False),
        ("trainer.nnodes!=1", False),
        ("trainer.nnodes=2,1", True),
        ("trainer.device!=cpu,cuda", True),
        ("trainer.nnodes>1", False),
        ("trainer.nnodes<=1", True),
        ("data.seed=null", True),
        ("data.seed=off", True),
        ("data.seed<=0", False),
        ("trainer.nnodes>{data.train_batch_size}", False),
        ("trainer.nnodes={trainer.n_gpus_per_node}", True),
        ("world_size=1 and data.shuffle=true", True),
        ("world_size=1 and data.shuffle=false", False),
    ],
)
def test_a_condition_compares_keys_with_values(condition: str, true: bool) -> None:
    assert condition_holds(condition, partial(get, load_config())) is true


@pytest.mark.parametrize("row", [*PROBLEMS, *ADJUSTED, *rows_of("idle")], ids=lambda row: row[1])
def test_every_key_of_a_row_exists_in_its_tree(row: list[str]) -> None:
    tree = TREES[row[0]]
    keys = [re.split(r"!=|<=|=|>", term)[0] for term in row[1].split(" and ")]
    keys += re.findall(r"\{([\w.]+)\}", " ".join(row))
    config = load_config(config_name=tree.name)
    for key in keys:
        assert key.startswith("installed.") or get(config, key) is not config
    for key in row[2].partition("=")[0].split() if len(row) == 4 else ():
        assert key in leaves(tree.root) or key in blocks(tree.root), key


def test_an_adjusted_value_is_in_its_condition() -> None:
    """The rows are applied until none holds, so each must end its own condition."""
    for _, condition, setting, _ in ADJUSTED:
        key, _, text = setting.partition("=")
        values = {key: parse_scalar(re.sub(r"\{.*\}", "7", text))}
        term = next(term for term in condition.split(" and ") if re.match(rf"{key}[=!>]", term))
        assert not condition_holds(term, lambda name, values=values: values.get(name, 7)), condition


def test_no_row_applies_to_the_defaults() -> None:
    defaults = {name: load_config(config_name=name) for name in TREES}
    for owner, condition, *_ in [*PROBLEMS, *ADJUSTED]:
        known = condition.partition(" and installed.")[0]
        assert not condition_holds(known, partial(get, defaults[owner])), condition
