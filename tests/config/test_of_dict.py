"""Dataclasses from dicts and OmegaConf trees, as verl makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from omegaconf import OmegaConf

from hone.config.algorithm import AlgorithmConfig, KLControlConfig
from hone.config.keys import omega_conf_to_dataclass

if TYPE_CHECKING:
    from pathlib import Path

TREE = {
    "_target_": "verl.trainer.config.AlgoConfig",
    "gamma": 0.9,
    "lam": "${gamma}",
    "kl_ctrl": {"_target_": "verl.trainer.config.KLControlConfig", "kl_coef": 0.5},
    "pf_ppo": {"weight_pow": 3.0},
}


@dataclass
class Inner:
    size: int


@dataclass
class Outer:
    inner: Inner
    rate: float = 0.1


@dataclass
class WithCheckersType:
    path: Path


@pytest.mark.parametrize("tree", [TREE, OmegaConf.create(TREE)], ids=["dict", "omegaconf"])
def test_the_target_names_our_block_and_references_are_followed(tree: dict) -> None:
    block = omega_conf_to_dataclass(tree)
    assert isinstance(block, AlgorithmConfig)
    assert (block.gamma, block.lam, block.adv_estimator) == (0.9, 0.9, "gae")
    assert block.kl_ctrl == KLControlConfig(kl_coef=0.5)
    assert block.pf_ppo.weight_pow == 3.0


def test_a_users_own_dataclass_is_made_with_its_inner_ones() -> None:
    assert omega_conf_to_dataclass({"inner": {"size": 2}}, Outer) == Outer(Inner(2))
    assert omega_conf_to_dataclass(None, AlgorithmConfig) == AlgorithmConfig()
    assert omega_conf_to_dataclass({"path": "a"}, WithCheckersType) == WithCheckersType("a")
    made = Outer(Inner(1))
    assert omega_conf_to_dataclass(made, Outer) is made
    assert omega_conf_to_dataclass({}) is None


def test_an_unknown_field_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match=r"Outer has no field 'rat'.*'rate'"):
        omega_conf_to_dataclass({"inner": {"size": 2}, "rat": 1}, Outer)
