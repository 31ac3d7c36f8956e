"""bypass_mode: correction with the current log-probs inside the loss."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from hone.algorithms.policy_losses import get_policy_loss_fn
from hone.algorithms.policy_losses.policy_loss import BatchCounts, batch_counts

CFG = {"clip_ratio": 0.2, "clip_ratio_c": 3.0}
OLD = torch.zeros(2, 2, dtype=torch.float64)
RATIO = torch.tensor([[1.0, 4.0], [0.9, 1.1]], dtype=torch.float64)
ADV = torch.ones(2, 2, dtype=torch.float64)
MASK = torch.ones(2, 2)


def call(rows=slice(None), old=OLD, mode="token-mean", **options):
    new = (old + RATIO.log())[rows].clone().requires_grad_()
    settings = {"rollout_is": None, "rollout_rs": None, "rollout_rs_threshold": None, **options}
    loss, metrics = get_policy_loss_fn("bypass_mode")(
        old[rows], new, ADV[rows], MASK[rows], mode, CFG, rollout_correction=settings
    )
    loss.backward()
    return loss.item(), new.grad, {k: float(v) for k, v in metrics.items()}


def test_without_options_it_is_vanilla():
    loss, _, metrics = call()
    assert loss == pytest.approx(-(1.0 + 1.2 + 0.9 + 1.1) / 4)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0
    assert "rollout_corr/rollout_is_mean" not in metrics  # there are no weights


def test_ppo_clip_rejects_tokens_but_takes_no_weights():
    loss, gradient, metrics = call(
        rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0"
    )
    assert loss == pytest.approx(-(1.0 + 0.9 + 1.1) / 4)
    assert gradient[0, 1] == 0
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.25
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((1 + 2 + 0.9 + 1.1) / 4)


def test_a_token_below_the_veto_threshold_takes_its_row_out_of_the_loss():
    loss, gradient, metrics = call(rollout_token_veto_threshold=0.95)
    assert loss == pytest.approx(-(1.0 + 1.2) / 4)
    assert (gradient[1] == 0).all()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.5


def test_settings_in_the_policy_loss_config_are_honoured():
    """verl's trainer puts them there; they must not fall back to the defaults in silence."""
    settings = {"loss_type": "reinforce", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"}
    by_keyword, gradient, _ = call(**settings)
    for place in (settings, SimpleNamespace(**settings)):
        new = (OLD + RATIO.log()).requires_grad_()
        config = SimpleNamespace(**CFG, policy_loss={"rollout_correction": place})
        loss, metrics = get_policy_loss_fn("bypass_mode")(OLD, new, ADV, MASK, "token-mean", config)
        loss.backward()
        assert loss.item() == by_keyword
        torch.testing.assert_close(new.grad, gradient)
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.25


def test_two_places_that_disagree_are_refused():
    config = {**CFG, "policy_loss": {"rollout_correction": {"loss_type": "reinforce"}}}
    with pytest.raises(ValueError, match="two different rollout_correction"):
        get_policy_loss_fn("bypass_mode")(
            OLD, OLD, ADV, MASK, "token-mean", config, rollout_correction={"loss_type": "ppo_clip"}
        )


def test_rejection_looks_at_train_over_rollout():
    """The ratio 4 of the policy to the rollout is above 3; the mirrored ratio 1/4 is not."""
    loss, _, _ = call(rollout_rs="token_k1", rollout_rs_threshold="0.1_3")
    assert loss == pytest.approx(-(1.0 + 0.9 + 1.1) / 4)
    loss, _, _ = call(rollout_rs="token_k1", rollout_rs_threshold="0.3_10")
    assert loss == pytest.approx(-(1.0 + 1.2 + 0.9 + 1.1) / 4)


def test_reinforce_weighs_by_the_truncated_ratio_without_its_gradient():
    loss, gradient, metrics = call(
        loss_type="reinforce", rollout_is="token", rollout_is_threshold=2.0, mode="token-sum"
    )
    logs = RATIO.log()
    assert loss == pytest.approx(-float(2 * logs[0, 1] + 0.9 * logs[1, 0] + 1.1 * logs[1, 1]))
    torch.testing.assert_close(gradient, -RATIO.clamp(max=2.0))
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((1 + 2 + 0.9 + 1.1) / 4)


def test_reinforce_without_weights_is_the_plain_gradient():
    _, gradient, _ = call(loss_type="reinforce", mode="token-sum")
    torch.testing.assert_close(gradient, -torch.ones_like(gradient))


@pytest.mark.parametrize("kind", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_rejection_keeps_the_normalisation_law(kind, mode):
    options = {
        "loss_type": kind, "mode": mode, "rollout_is": "sequence", "rollout_is_threshold": 2.0,
        "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0",
    }  # fmt: skip
    old = torch.full_like(OLD, -1.0)
    whole, gradient, _ = call(old=old, **options)
    with batch_counts(BatchCounts.from_mask(MASK)):
        parts = [call(slice(i, i + 1), old=old, **options) for i in range(2)]
    assert math.fsum(part[0] for part in parts) == pytest.approx(whole)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient)
    assert (gradient[0] == 0).all()


def test_unsupported_settings_are_refused():
    with pytest.raises(ValueError, match="rollout_is_batch_normalize"):
        call(rollout_is_batch_normalize=True)
    with pytest.raises(ValueError, match="ppo_clip or reinforce"):
        call(loss_type="trpo")
