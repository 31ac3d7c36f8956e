"""verl's correction functions equal the correction of this package."""

from __future__ import annotations

import math

import pytest
import torch

from hone.algorithms.correction import correct
from hone.config.algorithm import RolloutCorrectionConfig
from hone.protocol import DataProto
from hone.verl import rollout_correction as functions

OLD = torch.tensor([[-1.0, -0.5, -2.0], [-1.0, -1.0, -1.0]], dtype=torch.float64)
ROLLOUT = torch.tensor([[-2.0, -0.4, -1.0], [-1.1, -1.0, -3.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
SETTINGS = {
    "rollout_is": "token",
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": "token_k1,seq_mean_k3",
    "rollout_rs_threshold": "0.5_2.0,2.0",
}


def test_the_combined_function_equals_the_correction():
    batch, mask, metrics = functions.compute_rollout_correction_and_rejection_mask(
        OLD, ROLLOUT, MASK, **SETTINGS
    )
    weights, loss_mask, expected = correct(OLD, ROLLOUT, MASK, SETTINGS)
    assert torch.equal(batch.batch["rollout_is_weights"], weights)
    assert torch.equal(mask, loss_mask)
    assert metrics == expected
    no_weights, same, _ = functions.compute_rollout_correction_and_rejection_mask(
        OLD, ROLLOUT, MASK
    )
    assert no_weights is None
    assert torch.equal(same, MASK)


def test_one_token_below_the_veto_threshold_rejects_its_whole_row():
    settings = {"rollout_token_veto_threshold": 0.95}
    _, mask, metrics = correct(OLD, ROLLOUT, MASK, settings)
    assert mask.tolist() == [[0, 0, 0], [1, 1, 1]]  # exp(-0.1) = 0.905
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == 0.5
    assert metrics["rollout_corr/rollout_is_catastrophic_token_fraction"] == pytest.approx(1 / 5)
    _, untouched, _ = correct(OLD, ROLLOUT, MASK, {"rollout_token_veto_threshold": 0.9})
    assert torch.equal(untouched, MASK)


def test_weights_and_rejection_mask_from_a_log_ratio():
    weights, metrics = functions.compute_rollout_correction_weights(OLD - ROLLOUT, MASK, "token", 2)
    assert weights[0, 0] == 2.0
    assert weights[0, 1].item() == pytest.approx(math.exp(-0.1))
    assert metrics["rollout_is_max"] == 2.0
    assert all(name.startswith("rollout_is_") for name in metrics)
    mask, metrics = functions.compute_rollout_rejection_mask(
        OLD - ROLLOUT, MASK, "token_k1", "0.5_2.0"
    )
    assert mask.tolist() == [[0, 1, 0], [1, 1, 0]]
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(2 / 5)
    with pytest.raises(ValueError, match="needs algorithm"):
        functions.compute_rollout_rejection_mask(OLD - ROLLOUT, MASK, "token_k1")
    with pytest.raises(ValueError, match="rollout_rs is empty"):
        functions.compute_rollout_rejection_mask(OLD - ROLLOUT, MASK, "", 2.0)


def test_offpolicy_metrics_with_and_without_rollout_log_probs():
    metrics = functions.compute_offpolicy_metrics(OLD, ROLLOUT, MASK)
    assert metrics["kl"] == pytest.approx((-1.0 + 0.1 - 0.1 + 0.0 - 2.0) / 5)
    alone = functions.compute_offpolicy_metrics(OLD, None, MASK)
    assert set(alone) == {"training_ppl", "training_log_ppl"}
    assert alone["training_log_ppl"] == pytest.approx((0.75 + 1.0) / 2)
    named = functions.compute_rollout_corr_metrics_from_logprobs(OLD, ROLLOUT, MASK)
    assert named == {f"rollout_corr/{key}": value for key, value in metrics.items()}


def test_mask_and_weights_are_added_to_the_batch():
    columns = {"old_log_probs": OLD, "rollout_log_probs": ROLLOUT, "response_mask": MASK}
    for config in (SETTINGS, RolloutCorrectionConfig(**SETTINGS)):
        data = DataProto.from_dict(dict(columns))
        out, metrics = functions.compute_rollout_correction_and_add_to_batch(data, config)
        assert out.batch["response_mask"].tolist() == [[0, 1, 0], [1, 1, 0]]
        assert out.batch["rollout_is_weights"][0, 0] == 2.0
        assert "rollout_corr/kl" in metrics


def test_metrics_of_weights_count_ratios_before_truncation():
    raw = torch.tensor([[1.0, 6.0], [0.9, 1.1]])
    token = functions.compute_is_metrics(
        raw.clamp(max=2.0), raw, raw.log(), torch.ones(2, 2), "token", 2.0
    )
    assert token["rollout_is_seq_fraction_high"] == 0.5
    assert token["rollout_is_max"] == 2.0
    assert token["rollout_is_mean"] == pytest.approx((1 + 2 + 0.9 + 1.1) / 4)
    of_row = torch.tensor([[3.0], [0.4]])  # one ratio per sequence
    icepop = functions.compute_is_metrics(
        torch.zeros(2, 2), of_row.expand(2, 2), of_row.log(), torch.ones(2, 2), "sequence", 2.0, 0.5
    )
    assert (icepop["rollout_is_max"], icepop["rollout_is_min"]) == pytest.approx((3.0, 0.4))
    assert icepop["rollout_is_oob_ratio"] == 1.0


def test_bypass_mode_uses_the_rollouts_log_probs_and_stores_its_settings():
    batch = DataProto.from_dict({"rollout_log_probs": ROLLOUT})
    policy_loss = {"loss_mode": "vanilla"}
    functions.apply_bypass_mode(batch, SETTINGS, policy_loss)
    assert torch.equal(batch.batch["old_log_probs"], ROLLOUT)
    assert policy_loss == {"loss_mode": "bypass_mode", "rollout_correction": SETTINGS}
    with pytest.raises(ValueError, match="needs rollout_log_probs"):
        functions.apply_bypass_mode(DataProto.from_dict({"x": ROLLOUT}))


def test_a_boolean_bound_is_refused():
    with pytest.raises(TypeError, match="not a boolean"):
        functions.compute_rollout_correction_weights(OLD - ROLLOUT, MASK, "token", True)
