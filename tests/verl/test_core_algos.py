"""verl's functions, called with positional arguments in verl's order."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch

from hone.algorithms import advantages, policy_losses
from hone.algorithms.policy_losses.policy_loss import BatchCounts, agg_loss, batch_counts
from hone.protocol import DataProto
from hone.verl import core_algos
from hone.verl.dialect import load_config
from tests.algorithms.advantages.batches import CONFIG, batch
from tests.algorithms.advantages.references import REFERENCES

RANDOM = np.random.default_rng(5)
MASK = RANDOM.uniform(size=(6, 4)) < 0.8
B = batch(RANDOM.uniform(0, 1, (6, 4)), MASK, list("aabbbc"))
R, M = torch.from_numpy(np.where(MASK, B.rewards, 0.0)), torch.from_numpy(MASK).long()
COLUMN = {name: torch.from_numpy(np.nan_to_num(x)) for name, x in B.columns.items()}
INDEX = B.index

CALLS = {
    "gae": lambda: core_algos.compute_gae_advantage_return(R, COLUMN["values"], M, 0.9, 0.8),
    "grpo": lambda: core_algos.compute_grpo_outcome_advantage(R, M, INDEX, 1e-6, True),
    "grpo_passk": lambda: core_algos.compute_grpo_passk_outcome_advantage(
        R, M, INDEX, 1e-6, True, B.config
    ),
    "rloo": lambda: core_algos.compute_rloo_outcome_advantage(R, M, INDEX, 1e-6, B.config),
    "opo": lambda: core_algos.compute_opo_outcome_advantage(R, M, INDEX, 1e-6, B.config),
    "gpg": lambda: core_algos.compute_gpg_outcome_advantage(R, M, INDEX, 1e-6, 1.0, 1.0, None),
    "reinforce_plus_plus": lambda: core_algos.compute_reinforce_plus_plus_outcome_advantage(
        R, M, B.config
    ),
    "reinforce_plus_plus_baseline": lambda: (
        core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(R, M, INDEX, 1e-6, None)
    ),
    "remax": lambda: core_algos.compute_remax_outcome_advantage(R, COLUMN["reward_baselines"], M),
    "optimal_token_baseline": lambda: core_algos.compute_optimal_token_baseline_advantage(
        R, M, INDEX, COLUMN["old_log_probs"], COLUMN["sum_pi_squared"],
        COLUMN["rollout_is_weights"],
    ),
    "tir_optimal_token_baseline": lambda: (
        core_algos.compute_multi_turn_optimal_token_baseline_advantage(
            R, M, INDEX, COLUMN["old_log_probs"], COLUMN["sum_pi_squared"],
            COLUMN["rollout_is_weights"],
        )
    ),
    "gdpo": lambda: core_algos.compute_gdpo_outcome_advantage(
        R, M, INDEX, 1e-6, True, B.config,
        {key: (np.nan_to_num(B.columns[f"reward/{key}"])).sum(-1) for key in ("rule", "style")}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_positional_call_equals_the_estimator(name):
    for actual, expected in zip(CALLS[name](), REFERENCES[name](B), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


def test_every_estimator_of_verls_enum_is_in_the_table():
    for member in core_algos.AdvantageEstimator:
        assert advantages.get_adv_estimator_fn(member) is advantages.get_adv_estimator_fn(
            member.value
        )
        assert member in core_algos.ADV_ESTIMATOR_REGISTRY
    assert core_algos.AdvantageEstimator.GAE == "gae"
    assert advantages.get_estimator(core_algos.AdvantageEstimator.GAE).requires == ("values",)


def test_a_positional_epsilon_is_used():
    rewards, mask = torch.tensor([[1.0], [0.0]]), torch.ones(2, 1)
    actual, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, ["p", "p"], 0.5)
    assert actual[0, 0].item() == pytest.approx(0.5 / (math.sqrt(0.5) + 0.5))
    off, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, ["p", "p"], 0.5, False)
    assert off[0, 0].item() == 0.5


def test_gdpo_without_a_config_takes_the_rewards_as_the_only_part():
    from_rewards, _ = core_algos.compute_gdpo_outcome_advantage(R, M, INDEX)
    grpo, _ = core_algos.compute_grpo_outcome_advantage(R, M, INDEX)
    tokens = grpo[M.bool()]
    white = (tokens - tokens.mean()) / torch.sqrt(tokens.var() + 1e-8)
    torch.testing.assert_close(from_rewards[M.bool()], white)


def test_an_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match="takes no argument 'gama'"):
        core_algos.compute_reinforce_plus_plus_outcome_advantage(R, M, B.config, gama=1.0)


def test_compute_policy_loss_returns_the_loss_and_three_metrics():
    old = torch.zeros(1, 3, dtype=torch.float64)
    new = torch.tensor([[math.log(1.5), math.log(0.5), math.log(5)]], dtype=torch.float64)
    adv = torch.tensor([[1.0, 1.0, -1.0]], dtype=torch.float64)
    mask = torch.ones(1, 3)
    loss, clipped, kl, below = core_algos.compute_policy_loss(old, new, adv, mask, 0.2)
    assert loss.item() == pytest.approx((-1.2 - 0.5 + 3.0) / 3)
    assert clipped.item() == pytest.approx(1 / 3)
    assert kl.item() == pytest.approx(-(math.log(1.5) + math.log(0.5) + math.log(5)) / 3)
    assert below.item() == pytest.approx(1 / 3)
    wide, *_ = core_algos.compute_policy_loss(old, new, adv, mask, None, 0.2, 0.4)
    assert wide.item() == pytest.approx((-1.4 - 0.5 + 3.0) / 3)
    with pytest.raises(ValueError, match="needs cliprange"):
        core_algos.compute_policy_loss(old, new, adv, mask)


def test_reinforce_accepts_verls_argument_names():
    new = torch.tensor([[-1.0, -2.0]])
    loss, metrics = core_algos.compute_policy_loss_reinforce(
        rollout_log_prob=torch.zeros(1, 2), log_prob=new, advantages=torch.ones(1, 2),
        response_mask=torch.ones(1, 2), config={},
    )  # fmt: skip
    assert loss.item() == 3
    assert metrics["actor/ppo_kl"].item() == 1.5


def test_compute_rewards_subtracts_the_kl():
    actual = core_algos.compute_rewards(
        torch.tensor([[1.0]]), torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), 0.25
    )
    assert actual.item() == 0.5


def test_pf_ppo_resamples_rows_with_their_columns():
    torch.manual_seed(0)
    data = DataProto.from_dict(
        {"token_level_scores": torch.tensor([[0.0], [0.0], [3.0]])},
        {"name": ["a", "b", "c"]},
        {"notes": ["x", "y", "z"], "step": 4},
    )
    drawn = core_algos.compute_pf_ppo_reweight_data(data, "pow", 2.0)
    assert drawn.non_tensor_batch["name"].tolist() == ["c"] * 3
    assert drawn.meta_info == {"notes": ["z"] * 3, "step": 4}
    assert data.meta_info["notes"] == ["x", "y", "z"]


def test_a_registry_is_the_table():
    registry = core_algos.POLICY_LOSS_REGISTRY
    assert registry["gspo"] is policy_losses.get_policy_loss_fn("gspo")
    assert set(registry) == set(policy_losses.TABLE.names())
    assert len(registry) == len(policy_losses.TABLE.names())
    registry["mine"] = registry["gspo"]
    try:
        assert policy_losses.get_policy_loss_fn("mine") is registry["gspo"]
    finally:
        del registry["mine"]
    assert "mine" not in registry
    with pytest.raises(KeyError):
        registry["math:sqrt"]


def test_an_enum_member_registers_under_its_value():
    class Mine(str, core_algos.Enum):
        OWN = "own_estimator"

    advantages.register_adv_est(Mine.OWN, needs=("values",))(CALLS["gae"])
    try:
        assert advantages.get_adv_estimator_fn("own_estimator") is CALLS["gae"]
        assert advantages.get_estimator("own_estimator").requires == ("values",)
    finally:
        del core_algos.ADV_ESTIMATOR_REGISTRY["own_estimator"]


def verls_policy_loss(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
    rollout_is_weights=None,
):  # fmt: skip
    """A user's loss as it is written for verl."""
    assert config.get("clip_ratio_c", 3.0) == 3.0
    assert config["clip_ratio"] == 0.2
    assert config.policy_loss.get("no_such_key", 5) == 5
    loss = agg_loss(
        -advantages * log_prob, response_mask, loss_agg_mode, **config.global_batch_info
    )
    return loss, {}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_a_loss_written_for_verl_is_normalised_by_the_mini_batch(mode):
    config = load_config().actor_rollout_ref.actor
    adv, new = torch.from_numpy(np.nan_to_num(B.columns["values"])), COLUMN["old_log_probs"]
    whole, _ = verls_policy_loss(new, new, adv, M, mode, config)
    with batch_counts(BatchCounts.from_mask(M)):
        info = config.global_batch_info
        parts = [
            verls_policy_loss(new[i : i + 2], new[i : i + 2], adv[i : i + 2], M[i : i + 2], mode,
                              config)[0]
            for i in (0, 2, 4)
        ]  # fmt: skip
    assert sum(parts).item() == pytest.approx(whole.item())
    assert info == {
        "dp_size": 1, "batch_num_tokens": float(M.sum()),
        "global_batch_size": float(M.bool().any(-1).sum()), "loss_scale_factor": None,
    }  # fmt: skip
    assert config.global_batch_info == {"dp_size": 1, "loss_scale_factor": None}


def test_signatures_start_with_verls_arguments():
    first = {
        "compute_gae_advantage_return": ["token_level_rewards", "values", "response_mask", "gamma"],
        "compute_grpo_outcome_advantage": ["token_level_rewards", "response_mask", "index"],
        "compute_remax_outcome_advantage": ["token_level_rewards", "reward_baselines"],
    }
    for name, arguments in first.items():
        parameters = list(inspect.signature(getattr(core_algos, name)).parameters)
        assert parameters[: len(arguments)] == arguments
    assert CONFIG["gamma"] == 0.9
