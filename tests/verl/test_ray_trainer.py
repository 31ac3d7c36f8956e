"""The steps a trainer written for verl calls."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from omegaconf import OmegaConf

from hone.agents.collate import TRAJECTORY_ROW
from hone.algorithms.kl import AdaptiveKLController, FixedKLController
from hone.config import ConfigError
from hone.config.algorithm import AlgorithmConfig
from hone.data.samplers import AbstractSampler
from hone.protocol import DataProto, object_array
from hone.verl.core_algos import AdvantageEstimator
from hone.verl.ray_trainer import (
    TaskRunner,
    apply_kl_penalty,
    compose_config,
    compute_advantage,
    compute_response_mask,
    create_rl_sampler,
    need_critic,
    need_reference_policy,
    need_reward_model,
    run_ppo,
    validate_config,
)

ONE = torch.ones(2, 1, dtype=torch.float64)


def scored(**columns: torch.Tensor) -> DataProto:
    rewards = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    tensors = {"token_level_rewards": rewards, "response_mask": ONE, **columns}
    return DataProto.from_dict(tensors, {"uid": ["p", "p"], "acc": [1.0, 0.0]})


def test_the_response_mask_is_the_end_of_the_attention_mask() -> None:
    attention = torch.tensor([[0, 1, 1, 1, 0]])
    data = DataProto.from_dict({"responses": torch.zeros(1, 3), "attention_mask": attention})
    assert compute_response_mask(data).tolist() == [[1, 1, 0]]


def test_the_kl_leaves_the_reward_and_moves_the_controller() -> None:
    data = DataProto.from_dict(
        {
            "token_level_scores": torch.tensor([[0.0, 1.0, 9.0]]),
            "old_log_probs": torch.tensor([[-1.0, -1.0, -1.0]]),
            "ref_log_prob": torch.tensor([[-2.0, -1.5, -9.0]]),
            "response_mask": torch.tensor([[1, 1, 0]]),
        }
    )
    data, metrics = apply_kl_penalty(data, FixedKLController(0.5))
    assert data.batch["token_level_rewards"].tolist() == [[-0.5, 0.75, 0.0]]
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.75)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    adaptive = AdaptiveKLController(0.5, target_kl=0.1, horizon=10)
    apply_kl_penalty(data, adaptive)
    assert adaptive.value == pytest.approx(0.5 * (1 + 0.2 * 1 / 10))


def test_the_horizon_of_the_kl_coefficient_counts_trajectories() -> None:
    """Three rows of two trajectories."""
    ones = torch.ones(3, 2)
    tensors = dict.fromkeys(("token_level_scores", "old_log_probs", "response_mask"), ones)
    rows = DataProto.from_dict(
        tensors | {"ref_log_prob": ones - 1}, {TRAJECTORY_ROW: object_array([None, 1, None])}
    )
    adaptive = AdaptiveKLController(0.5, target_kl=0.1, horizon=10)
    apply_kl_penalty(rows, adaptive)
    assert adaptive.value == pytest.approx(0.5 * (1 + 0.2 * 2 / 10))


def test_advantages_by_enum_and_by_name() -> None:
    data = compute_advantage(scored(), AdvantageEstimator.GRPO)
    assert data.batch["advantages"][0, 0].item() == pytest.approx(math.sqrt(0.5), abs=1e-5)
    plain = compute_advantage(scored(), "grpo", norm_adv_by_std_in_grpo=False)
    assert plain.batch["advantages"][:, 0].tolist() == [0.5, -0.5]
    values = compute_advantage(scored(values=ONE * 0.25), "gae", gamma=0.5, lam=1.0)
    assert values.batch["returns"][:, 0].tolist() == [1.0, 0.0]
    parts = compute_advantage(scored(), "gdpo", config=AlgorithmConfig(gdpo_reward_keys=("acc",)))
    assert parts.batch["advantages"][0, 0] > 0 > parts.batch["advantages"][1, 0]
    remax = compute_advantage(scored(reward_baselines=torch.tensor([0.5, 0.5])), "remax")
    assert remax.batch["advantages"][:, 0].tolist() == [0.5, -0.5]


def test_a_missing_column_is_named() -> None:
    with pytest.raises(KeyError, match="'values'"):
        compute_advantage(scored(), "gae")


def test_pf_ppo_draws_the_rows_again() -> None:
    torch.manual_seed(0)
    data = scored(values=ONE, token_level_scores=torch.tensor([[3.0], [0.0]]))
    drawn = compute_advantage(data, "gae", config=AlgorithmConfig(use_pf_ppo=True))
    assert drawn.non_tensor_batch["acc"].tolist() == [1.0, 1.0]


class Once(TaskRunner):
    configs: ClassVar[list[object]] = []

    def run(self, config: object) -> None:
        self.configs.append(config)


def test_a_program_runs_its_own_task_runner() -> None:
    run_ppo({"trainer": {"total_epochs": 1}}, Once)
    assert Once.configs == [{"trainer": {"total_epochs": 1}}]


def test_a_tree_is_composed_and_a_composed_one_stays() -> None:
    tree = OmegaConf.create({"algorithm": {"gamma": 0.5, "lam": "${algorithm.gamma}"}})
    composed = compose_config(tree)
    assert (composed.config.algorithm.lam, composed.origins["algorithm.lam"]) == (
        0.5,
        "the given config",
    )
    assert compose_config(composed.config).config is composed.config
    with pytest.raises(ConfigError, match="gama"):
        compose_config({"algorithm": {"gama": 1.0}})


def test_the_sampler_of_verls_data_block_is_made() -> None:
    def config(name: str) -> object:
        class_config = {"class_path": f"{__file__}", "class_name": name}
        return OmegaConf.create({"sampler": class_config, "dataloader_num_workers": 0})

    assert list(create_rl_sampler(config("Backwards"), range(3)) or ()) == [2, 1, 0]
    assert create_rl_sampler({}, range(3)) is None
    with pytest.raises(AssertionError, match="needs __iter__"):
        create_rl_sampler(config("NoSampler"), range(3))


def test_what_a_config_needs_follows_from_its_algorithm() -> None:
    paths = {"data": {"train_files": "x.parquet"}, "actor_rollout_ref": {"model": {"path": "m"}}}
    gae = {**paths, "algorithm": {"adv_estimator": "gae"}}
    grpo = {**paths, "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": True}}
    assert (need_critic(gae), need_reference_policy(gae)) == (True, False)
    assert (need_critic(grpo), need_reference_policy(grpo)) == (False, True)
    assert not need_reward_model(grpo)
    validate_config(grpo, use_reference_policy=True, use_critic=False)
    with pytest.raises(ConfigError, match="adv_estmator"):
        validate_config({"algorithm": {"adv_estmator": "x"}}, False, False)


class Backwards(AbstractSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self))[::-1])


class NoSampler:
    def __init__(self, data_source: object, data_config: object) -> None:
        pass
