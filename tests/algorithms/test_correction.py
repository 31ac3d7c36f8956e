"""Rollout correction: weights, the loss mask and metrics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hone.algorithms.correction import correct, importance_weights
from hone.config.algorithm import PRESETS, RolloutCorrectionConfig

from .two_rows import MASK, OLD, ROLLOUT, options, weights


def test_without_options_only_metrics_are_computed():
    actual, mask, metrics = correct(OLD, ROLLOUT, MASK, options())
    assert actual is None
    assert torch.equal(mask, MASK)
    assert metrics["rollout_corr/kl"] == pytest.approx(-(math.log(0.5) + math.log(4)) / 5)
    default, _, _ = correct(OLD, ROLLOUT, MASK)
    assert default is None


def test_token_weights_are_truncated_and_zero_outside_the_mask():
    np.testing.assert_allclose(weights("token", 2.0), [[0.5, 2, 0, 0], [1, 1, 1, 0]])


def test_sequence_weights_are_the_product_on_every_token():
    np.testing.assert_allclose(weights("sequence", 10.0), [[2, 2, 0, 0], [1, 1, 1, 0]])
    np.testing.assert_allclose(weights("sequence", 1.5), [[1.5, 1.5, 0, 0], [1, 1, 1, 0]])


def test_icepop_sets_weights_outside_the_band_to_zero():
    np.testing.assert_allclose(weights("token", "0.6_5.0"), [[0, 4, 0, 0], [1, 1, 1, 0]])
    np.testing.assert_allclose(weights("token", "0.49_4.1"), [[0.5, 4, 0, 0], [1, 1, 1, 0]])
    np.testing.assert_allclose(weights("sequence", "0.5_1.9"), [[0, 0, 0, 0], [1, 1, 1, 0]])


def test_batch_normalisation_divides_by_the_mean_weight():
    actual, _, metrics = correct(
        OLD, ROLLOUT, MASK, options(rollout_is="token", rollout_is_batch_normalize=True)
    )
    mean = (0.5 + 2 + 1 + 1 + 1) / 5
    np.testing.assert_allclose(actual, np.array([[0.5, 2, 0, 0], [1, 1, 1, 0]]) / mean)
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(mean)
    actual, _, metrics = correct(
        OLD, ROLLOUT, MASK, options(rollout_is="sequence", rollout_is_batch_normalize=True)
    )
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(1.5)  # of two rows
    np.testing.assert_allclose(actual, np.array([[2, 2, 0, 0], [1, 1, 1, 0]]) / 1.5)


def test_batch_normalisation_of_zero_weights_is_zero():
    actual, _, _ = correct(
        OLD,
        ROLLOUT,
        MASK,
        options(rollout_is="token", rollout_is_threshold="8_9", rollout_is_batch_normalize=True),
    )
    assert (actual == 0).all()


def test_weights_have_no_gradient_and_are_finite_for_huge_differences():
    old = torch.tensor([[0.0, -900.0]], requires_grad=True)
    actual, _, metrics = correct(
        old, torch.tensor([[-900.0, 0.0]]), torch.ones(1, 2), options(rollout_is="token")
    )
    assert not actual.requires_grad
    np.testing.assert_allclose(actual, [[2, 0]], atol=1e-8)
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_exponent_of_a_weight_is_bounded():
    actual = importance_weights(
        torch.tensor([[30.0, -30.0]]).double(), torch.ones(1, 2), "token", 1e12
    )
    np.testing.assert_allclose(actual, [[math.exp(20), math.exp(-20)]])


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_values_outside_the_mask_have_no_effect(junk):
    setting = options(
        rollout_is="sequence", rollout_rs="seq_mean_k1,seq_max_k2", rollout_rs_threshold=3
    )
    clean = correct(OLD, ROLLOUT, MASK, setting)
    with_junk = correct(
        torch.where(MASK.bool(), OLD, junk), torch.where(MASK.bool(), ROLLOUT, -junk), MASK, setting
    )
    assert torch.equal(clean[0], with_junk[0])
    assert torch.equal(clean[1], with_junk[1])
    assert clean[2] == with_junk[2]


def test_rejection_changes_the_loss_mask_and_not_the_response_mask():
    response_mask = MASK.clone()
    _, loss_mask, metrics = correct(
        OLD,
        ROLLOUT,
        response_mask,
        options(rollout_rs="token_k1", rollout_rs_threshold="0.1_3"),
    )
    assert loss_mask.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]
    assert loss_mask.dtype == MASK.dtype
    assert torch.equal(response_mask, MASK)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 5)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 2)


def test_wrong_settings_are_refused():
    for bad in ({"rollout_is": "word"}, {"rollout_is": "token", "rollout_is_threshold": 0}):
        with pytest.raises(ValueError, match="rollout_is"):
            correct(OLD, ROLLOUT, MASK, options(**bad))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_can_be_run(name):
    preset = getattr(RolloutCorrectionConfig, name)()
    correct(OLD, ROLLOUT, MASK, preset)


@pytest.mark.parametrize("shape", [(0, 3), (0, 0), (2, 0)])
@pytest.mark.parametrize("level", [None, "token", "sequence"])
def test_empty_batches_have_finite_metrics(shape, level):
    setting = options(
        rollout_is=level, rollout_rs="token_k1,seq_max_k2,seq_mean_k3", rollout_rs_threshold="2,1,1"
    )
    _, mask, metrics = correct(torch.ones(shape), torch.ones(shape), torch.ones(shape), setting)
    assert mask.shape == shape
    assert all(math.isfinite(value) for value in metrics.values())
