"""The rows of checks.txt: conditions are read as written, and every key in them exists."""

from __future__ import annotations

import re
from functools import partial

import pytest

from hone.config import load_config
from hone.config.checks import rows_of
from hone.config.keys import blocks, get, leaves
from hone.config.states import holds
from hone.config.trees import TREES

PROBLEMS = list(rows_of("problems"))


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
        ("world_size=1 and data.shuffle=true", True),
        ("world_size=1 and data.shuffle=false", False),
    ],
)
def test_a_condition_compares_keys_with_values(condition: str, true: bool) -> None:
    assert holds(condition, partial(get, load_config())) is true


@pytest.mark.parametrize("row", [*PROBLEMS, *rows_of("idle")], ids=lambda row: row[1])
def test_every_key_of_a_row_exists_in_its_tree(row: list[str]) -> None:
    tree = TREES[row[0]]
    keys = [re.split(r"!=|<=|=|>", term)[0] for term in row[1].split(" and ")]
    keys += re.findall(r"\{([\w.]+)\}", row[-1])
    config = load_config(config_name=tree.name)
    for key in keys:
        get(config, key)
    for key in row[2].split() if len(row) == 4 else ():
        assert key in leaves(tree.root) or key in blocks(tree.root), key


def test_no_row_speaks_of_the_defaults() -> None:
    for owner, condition, *_ in PROBLEMS:
        assert not holds(condition, partial(get, load_config(config_name=owner))), condition
