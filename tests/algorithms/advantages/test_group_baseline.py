"""RLOO, pass@k, OPO, ReMax, GPG, MaxRL, Lite-PPO and REINFORCE++ by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.algorithms.advantages import get_adv_estimator_fn


def estimate(name, rewards, mask=None, **kw):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    mask = torch.ones_like(rewards) if mask is None else torch.tensor(mask)
    fn = get_adv_estimator_fn(name)
    return [x.numpy() for x in fn(token_level_rewards=rewards, response_mask=mask, **kw)]


@pytest.mark.parametrize("name", ["rloo", "rloo_vectorized"])
def test_rloo_compares_with_the_mean_of_the_others_and_keeps_a_lone_score(name):
    advantages, _ = estimate(name, [[1.0], [2], [6], [5]], index=["p", "p", "p", "alone"])
    np.testing.assert_allclose(advantages[:, 0], [1 - 4, 2 - 3.5, 6 - 1.5, 5])


def test_passk_rewards_only_the_best_by_its_margin():
    config = {"norm_adv_by_std_in_grpo": False}
    advantages, _ = estimate("grpo_passk", [[1.0], [4], [2.5]], index=["p"] * 3, config=config)
    np.testing.assert_allclose(advantages[:, 0], [0, 1.5, 0])
    advantages, _ = estimate(
        "grpo_passk", [[1.0], [4], [2.5]], index=["p"] * 3, norm_adv_by_std_in_grpo=True
    )
    np.testing.assert_allclose(advantages[1, 0], 1.5 / (1.5 + 1e-6))


def test_passk_is_normalised_by_default_and_a_tie_for_the_best_gives_0():
    advantages, _ = estimate("grpo_passk", [[3.0], [3], [1]], index=["p"] * 3)
    assert (advantages == 0).all()
    advantages, _ = estimate("grpo_passk", [[1.0], [0]], index=["p"] * 2)
    assert advantages[0, 0] == pytest.approx(np.sqrt(2), abs=1e-5)


def test_passk_refuses_a_batch_of_groups_of_one():
    with pytest.raises(ValueError, match=r"rollout\.n"):
        estimate("grpo_passk", [[1.0], [0]], index=["p", "q"])


def test_opo_weighs_the_baseline_by_length():
    mask = [[1, 0, 0], [1, 1, 1]]
    advantages, _ = estimate("opo", [[1.0, 0, 0], [0, 0, 3.0]], mask, index=["p", "p"])
    np.testing.assert_allclose(advantages, [[1 - 2.5, 0, 0], [0.5, 0.5, 0.5]])


def test_remax_subtracts_the_greedy_reward_from_the_reward_to_go():
    advantages, returns = estimate(
        "remax",
        [[1.0, 9, 2, 0]],
        [[1, 0, 1, 1]],
        reward_baselines=torch.tensor([0.5]),
    )
    np.testing.assert_allclose(returns, [[3, 0, 2, 0]])
    np.testing.assert_allclose(advantages, [[2.5, 0, 1.5, -0.5]])


def test_gpg_scales_by_the_share_of_scores_other_than_0():
    advantages, _ = estimate("gpg", [[1.0], [0], [0], [0]], index=["p", "p", "q", "q"])
    np.testing.assert_allclose(advantages[:, 0], [4 * 0.5, 4 * -0.5, 0, 0])
    halved, _ = estimate("gpg", [[1.0], [0]], index=["p", "p"], f_norm=2.0)
    np.testing.assert_allclose(halved[:, 0], [0.5, -0.5])


def test_maxrl_divides_by_the_success_rate():
    advantages, _ = estimate("maxrl", [[1.0], [0], [0], [0]], index=["p"] * 4)
    np.testing.assert_allclose(advantages[:, 0], [3, -1, -1, -1], rtol=1e-5)
    np.testing.assert_allclose(advantages[1, 0], -0.25 / (0.25 + 1e-6), rtol=1e-12)


def test_maxrl_refuses_negative_scores_with_advice():
    with pytest.raises(ValueError, match="use_kl_loss"):
        estimate("maxrl", [[1.0], [-0.5]], index=["p"] * 2)
    advantages, _ = estimate("maxrl", [[0.0], [0.0]], index=["p"] * 2)
    assert (advantages == 0).all()


def test_lite_ppo_divides_by_the_deviation_of_the_whole_batch():
    scores = [[1.0], [0], [3], [5]]
    advantages, _ = estimate("lite_ppo", scores, index=["p", "p", "q", "q"])
    batch_std = np.std([1, 0, 3, 5], ddof=1) + 1e-6
    np.testing.assert_allclose(advantages[:, 0], np.array([0.5, -0.5, -1, 1]) / batch_std)
    alone, _ = estimate("lite_ppo", [[7.0]], index=["p"])
    assert alone[0, 0] == 0


def test_reinforce_plus_plus_carries_the_return_across_tool_tokens():
    _, returns = estimate(
        "reinforce_plus_plus", [[0.0, 0, 0, 1.0]], [[1, 0, 0, 1]], config={"gamma": 0.5}
    )
    np.testing.assert_allclose(returns, [[0.5, 0, 0, 1]])


def test_reinforce_plus_plus_takes_gamma_from_the_defaults_too():
    _, returns = estimate("reinforce_plus_plus", [[0.0, 2.0]])
    np.testing.assert_allclose(returns, [[2, 2]])


def test_reinforce_plus_plus_whitens_by_tokens_so_long_responses_weigh_more():
    mask = [[1, 0, 0], [1, 1, 1]]
    advantages, _ = estimate(
        "reinforce_plus_plus_baseline", [[1.0, 0, 0], [0, 0, 0.0]], mask, index=["p", "p"]
    )
    tokens = np.array([0.5, -0.5, -0.5, -0.5])
    white = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(advantages[np.array(mask) == 1], white)
