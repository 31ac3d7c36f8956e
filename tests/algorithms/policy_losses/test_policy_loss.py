"""What must hold for each policy loss in the table: it equals its reference in value and gradient, and
loss and gradient of a mini-batch do not depend on how it is cut (the normalisation law).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.algorithms.policy_losses import TABLE, get_policy_loss_fn
from hone.algorithms.policy_losses.policy_loss import LOSS_AGG_MODES, BatchCounts, batch_counts

from .references import CFG, ROW, clipped, slope, whole

NAMES = TABLE.names()
OF_BATCH = {"clip_cov", "kl_cov"}


class MiniBatch:
    """Random rows with tool tokens, an empty row, and ratios on both sides of every clip."""

    def __init__(self, seed: int, rows: int = 7, width: int = 6) -> None:
        random = np.random.default_rng(seed)
        shape = (rows, width)
        self.mask = random.uniform(size=shape) < 0.75
        self.mask[rows // 2] = False
        self.old = -random.exponential(1.0, shape) - 0.05
        self.new = np.minimum(self.old + random.normal(0, 0.6, shape), -0.01)
        self.adv = random.normal(0, 2, shape)
        self.weights = random.uniform(0.3, 2.0, shape)

    def tensors(self, rows=slice(None)):
        cut = [torch.from_numpy(x[rows].copy()) for x in (self.old, self.new, self.adv, self.mask)]
        cut[1].requires_grad_()
        return cut


def call(name, batch, mode="token-mean", rows=slice(None), weights=False, **kw):
    old, new, adv, mask = batch.tensors(rows)
    given_weights = torch.from_numpy(batch.weights[rows].copy()) if weights else None
    loss, metrics = get_policy_loss_fn(name)(old, new, adv, mask, mode, CFG, given_weights, **kw)
    loss.backward()
    return loss.item(), new.grad.numpy(), metrics


def prepared_for(name, batch):
    fn = get_policy_loss_fn(name)
    with torch.no_grad():
        return fn.prepare(*batch.tensors(), CFG) if fn.needs_batch_statistics else {}


def test_every_loss_of_the_table_has_a_reference():
    assert set(NAMES) == set(ROW) | OF_BATCH
    assert {n for n in NAMES if get_policy_loss_fn(n).needs_batch_statistics} == OF_BATCH


@pytest.mark.parametrize("name", sorted(ROW))
@pytest.mark.parametrize("weights", [False, True])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), mode=st.sampled_from(LOSS_AGG_MODES))
def test_value_and_gradient_equal_the_slow_reference(name, weights, seed, mode):
    b = MiniBatch(seed, rows=3, width=3)
    w = b.weights if weights else None
    loss, gradient, _ = call(name, b, mode, weights=weights)

    def reference(new):
        return whole(name, b.old, new, b.new, b.adv, b.mask, mode, w)

    assert loss == pytest.approx(reference(b.new), rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(gradient, slope(reference, b.new), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("weights", [False, True])
def test_loss_and_gradient_do_not_depend_on_the_micro_batches(name, mode, size, weights):
    b = MiniBatch(11)
    whole_loss, whole_gradient, _ = call(name, b, mode, weights=weights)
    prepared = prepared_for(name, b)
    shares, gradients = [], []
    with batch_counts(BatchCounts.from_mask(torch.from_numpy(b.mask))):
        for start in range(0, len(b.mask), size):
            rows = slice(start, start + size)
            mine = {key: value[rows] for key, value in prepared.items()}
            extra = {"prepared": mine} if prepared else {}
            share, gradient, _ = call(name, b, mode, rows, weights, **extra)
            shares.append(share)
            gradients.append(gradient)
    assert math.fsum(shares) == pytest.approx(whole_loss, rel=1e-12, abs=1e-12)
    np.testing.assert_allclose(np.concatenate(gradients), whole_gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_loss_and_gradient_do_not_depend_on_padding(name, mode):
    b = MiniBatch(5)
    loss, gradient, _ = call(name, b, mode)
    wide = MiniBatch(5)
    for key in ("old", "new", "adv", "mask", "weights"):
        setattr(wide, key, np.pad(getattr(b, key), ((0, 0), (0, 4))))
    wide_loss, wide_gradient, _ = call(name, wide, mode)
    assert wide_loss == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(wide_gradient[:, :6], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_metrics_are_token_means_and_combine_by_tokens(name):
    b = MiniBatch(23)
    _, _, together = call(name, b)
    prepared = prepared_for(name, b)
    combined = dict.fromkeys(together, 0.0)
    for i in range(len(b.mask)):
        extra = {"prepared": {k: v[i : i + 1] for k, v in prepared.items()}} if prepared else {}
        _, _, metrics = call(name, b, rows=slice(i, i + 1), **extra)
        for key, value in metrics.items():
            combined[key] += float(value) * b.mask[i].sum() / b.mask.sum()
    for key, value in together.items():
        assert not value.requires_grad
        assert combined[key] == pytest.approx(float(value), rel=1e-9, abs=1e-12)
    difference = (b.new - b.old)[b.mask]
    kl = np.abs(difference).mean() if name == "kl_cov" else -difference.mean()
    assert float(together["actor/ppo_kl"]) == pytest.approx(kl)
    assert {"actor/pg_clipfrac", "actor/pg_clipfrac_lower"} <= set(together)


@pytest.mark.parametrize("name", sorted(ROW))
@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_clip_fractions_equal_the_slow_reference(name, seed):
    b = MiniBatch(seed)
    _, _, metrics = call(name, b)
    first, second = [], []
    for i in range(len(b.mask)):
        if b.mask[i].any():
            row = [x[i][b.mask[i]].tolist() for x in (b.old, b.new, b.adv)]
            above, below = clipped(name, *row, CFG)
            first += above
            second += below
    assert float(metrics["actor/pg_clipfrac"]) == pytest.approx(np.mean(first))
    assert float(metrics["actor/pg_clipfrac_lower"]) == pytest.approx(np.mean(second))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_nothing_outside_the_mask_reaches_loss_gradient_or_metrics(name, junk):
    b, with_junk = MiniBatch(3), MiniBatch(3)
    for key in ("old", "new", "adv", "weights"):
        setattr(with_junk, key, np.where(b.mask, getattr(b, key), junk))
    loss, gradient, metrics = call(name, b, weights=True)
    dirty_loss, dirty_gradient, dirty_metrics = call(name, with_junk, weights=True)
    assert dirty_loss == loss
    np.testing.assert_array_equal(dirty_gradient, gradient)
    assert {k: float(v) for k, v in dirty_metrics.items()} == {
        k: float(v) for k, v in metrics.items()
    }
    assert (gradient[~b.mask] == 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_an_empty_mask_gives_nothing(name, mode):
    b = MiniBatch(1)
    b.mask[:] = False
    loss, gradient, metrics = call(name, b, mode)
    assert loss == 0
    assert (gradient == 0).all()
    assert all(float(value) == 0 for value in metrics.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("log_ratio", [-1000.0, 1000.0])
def test_a_ratio_beyond_all_bounds_gives_a_finite_loss_and_gradient(name, log_ratio):
    b = MiniBatch(5)
    b.new = b.old.copy()
    b.new[0, 0] += log_ratio
    b.mask[0] = True
    loss, gradient, metrics = call(name, b)
    assert math.isfinite(loss)
    assert np.isfinite(gradient).all()
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_at_the_old_policy_the_gradient_is_the_policy_gradient(name):
    """On-policy every loss must agree: −A at each token, up to its aggregation."""
    b = MiniBatch(8)
    b.new = b.old.copy()
    b.adv = np.repeat(b.adv[:, :1], 6, axis=1)  # one advantage a row, as GRPO gives
    mode = get_policy_loss_fn(name).agg_mode or "seq-mean-token-sum"
    prepared = {}
    if name in OF_BATCH:
        prepared = {"prepared": {"high_covariance": torch.zeros(7, 6, dtype=torch.bool)}}
    _, gradient, _ = call(name, b, mode, **prepared)
    rows = b.mask.any(1).sum()
    per_token = b.mask.sum(1, keepdims=True).clip(1) if mode == "seq-mean-token-mean" else 1
    np.testing.assert_allclose(gradient, -b.adv * b.mask / rows / per_token, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_the_defaults_come_from_hone_config(name):
    if name == "dro":
        with pytest.raises(ValueError, match="dro_beta above 0, got None"):
            get_policy_loss_fn(name)(*MiniBatch(2).tensors())
        return
    loss, _ = get_policy_loss_fn(name)(*MiniBatch(2).tensors())
    assert torch.isfinite(loss)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("shape", [(0, 3), (0, 0), (2, 0)])
def test_batches_without_rows_or_without_tokens_give_empty_results(name, mode, shape):
    old, adv, mask = torch.zeros(shape), torch.zeros(shape), torch.ones(shape)
    new = torch.zeros(shape, requires_grad=True)
    config = {**CFG, "loss_scale_factor": None}
    loss, metrics = get_policy_loss_fn(name)(old, new, adv, mask, mode, config)
    loss.backward()
    assert loss.item() == 0
    assert all(float(value) == 0 for value in metrics.values())
