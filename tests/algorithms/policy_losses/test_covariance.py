"""Clip-Cov and KL-Cov: which tokens and how many are selected, reproducibly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.algorithms.policy_losses import get_policy_loss_fn
from hone.algorithms.policy_losses.covariance import _position_hash

from .references import clip


def config(**kw):
    return {
        "clip_ratio": 0.2,
        "policy_loss": {
            "clip_cov_ratio": 0.1,
            "clip_cov_lb": 0.2,
            "clip_cov_ub": 3.0,
            "kl_cov_ratio": 0.1,
            "ppo_kl_coef": 0.5,
            **kw,
        },
    }


def batch(seed=0, rows=8, width=10):
    random = np.random.default_rng(seed)
    shape = (rows, width)
    old = -random.exponential(1.0, shape) - 0.05
    new = old + random.normal(0, 0.3, shape)
    adv = random.normal(0.7, 1, shape)
    mask = random.uniform(size=shape) < 0.8
    return [torch.from_numpy(x) for x in (old, new, adv, mask)]


def covariance(old, new, adv, mask):
    return (adv - adv[mask].mean()) * (new - new[mask].mean())


def chosen(name, data, cfg):
    return get_policy_loss_fn(name).prepare(*data, cfg)["high_covariance"]


def test_kl_cov_takes_the_highest_covariances():
    data = batch()
    mask = data[3]
    cov = covariance(*data)
    count = int(0.1 * int(mask.sum()))
    assert count > 2
    picked = chosen("kl_cov", data, config())
    assert picked.sum() == count
    assert (picked & ~mask).sum() == 0
    assert cov[picked].min() > cov[mask & ~picked].max()


def test_clip_cov_draws_among_high_covariances_that_ppo_does_not_clip():
    data = batch()
    old, new, adv, mask = data
    cov = covariance(*data)
    ratio = (new - old).exp()
    ppo_clips = -adv * ratio.clamp(0.8, 1.2) > -adv * ratio
    eligible = mask & (cov > 0.2) & (cov < 3.0) & ~ppo_clips
    count = int(0.1 * int(mask.sum()))
    assert eligible.sum() > count
    picked = chosen("clip_cov", data, config())
    assert picked.sum() == count
    assert (picked & ~eligible).sum() == 0
    assert not torch.equal(picked, eligible & (eligible.cumsum(-1) <= 1))


def test_clip_cov_bounds_are_strict():
    old = new = torch.tensor([[1.0, -1.0, 0.0, 0.0]])  # covariances 1, 1, 0, 0
    adv, mask = torch.tensor([[1.0, -1.0, 0.0, 0.0]]), torch.ones(1, 4)
    data = [old, new, adv, mask]
    assert chosen("clip_cov", data, config(clip_cov_ratio=1.0, clip_cov_lb=1.0)).sum() == 0
    assert chosen("clip_cov", data, config(clip_cov_ratio=1.0, clip_cov_ub=1.0)).sum() == 0
    assert chosen("clip_cov", data, config(clip_cov_ratio=1.0)).sum() == 2


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_at_least_one_token_is_chosen_where_there_is_one(name):
    assert chosen(name, batch(), config(clip_cov_ratio=1e-9, kl_cov_ratio=1e-9)).sum() == 1


def test_the_choice_depends_on_nothing_but_the_batch():
    data = batch()
    first = chosen("clip_cov", data, config())
    torch.manual_seed(123)
    before = torch.get_rng_state()
    assert torch.equal(chosen("clip_cov", data, config()), first)
    assert torch.equal(torch.get_rng_state(), before)
    padded = [torch.nn.functional.pad(x, (0, 5)) for x in data]
    assert torch.equal(chosen("clip_cov", padded, config())[:, :10], first)


def test_the_hash_of_a_place_never_changes():
    """Recorded runs are replayed with it, so these numbers are part of the format."""
    numbers = _position_hash(torch.ones(64, 64))
    corners = [numbers[0, 0], numbers[0, 1], numbers[1, 0], numbers[63, 63]]
    assert [int(x) for x in corners] == [793937167, 1337043481, 1859976955, 1986376134]
    assert len(numbers.unique()) == 64 * 64


def test_the_draw_is_spread_over_rows_and_columns():
    shape = (64, 64)
    old = new = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0).expand(shape)
    data = [old, new, old, torch.ones(shape)]  # every token has covariance 1
    picked = chosen("clip_cov", data, config(clip_cov_ratio=0.25)).float()
    assert picked.sum() == 1024
    for axis in (0, 1):
        share = picked.mean(axis)
        assert share.min() > 0.05
        assert share.max() < 0.5


def test_losses_by_hand():
    old = torch.zeros(1, 3, dtype=torch.float64)
    new = torch.tensor([[0.5, -0.5, 0.1]], dtype=torch.float64)
    adv = torch.tensor([[1.0, 2.0, -1.0]], dtype=torch.float64)
    picked = {"high_covariance": torch.tensor([[False, True, False]])}
    args = (old, new, adv, torch.ones(1, 3), "token-sum", config())
    loss, metrics = get_policy_loss_fn("clip_cov")(*args, prepared=picked)
    assert loss.item() == pytest.approx(-clip(np.exp(0.5), 0.8, 1.2) + np.exp(0.1))
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(1 / 3)
    loss, metrics = get_policy_loss_fn("kl_cov")(*args, prepared=picked)
    assert loss.item() == pytest.approx(-np.exp(0.5) - 2 * np.exp(-0.5) + np.exp(0.1) + 0.5 * 0.5)
    assert metrics["actor/ppo_kl"].item() == pytest.approx(1.1 / 3)


def test_the_first_pass_has_no_gradient():
    data = batch()
    data[1].requires_grad_()
    picked = get_policy_loss_fn("kl_cov").prepare(*data, config())
    assert not any(x.requires_grad for x in picked.values())
    assert get_policy_loss_fn("vanilla").prepare(*data) == {}
