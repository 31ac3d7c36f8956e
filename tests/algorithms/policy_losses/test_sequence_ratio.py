"""Losses with one ratio per sequence, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hone.algorithms.policy_losses import get_policy_loss_fn
from tests.algorithms.policy_losses.one_token import CFG


def test_gspo_caps_the_exponent_of_the_sequence_ratio():
    old = torch.full((1, 2), -50.0, dtype=torch.float64)
    new = torch.full((1, 2), -1.0, dtype=torch.float64)
    loss, _ = get_policy_loss_fn("gspo")(old, new, -torch.ones(1, 2), torch.ones(1, 2), config=CFG)
    assert loss.item() == pytest.approx(math.exp(10))


def test_gspo_clips_the_whole_sequence_by_its_geometric_mean_ratio():
    old = torch.zeros(1, 2, dtype=torch.float64)
    new = torch.tensor([[math.log(2.0), math.log(0.5)]], requires_grad=True, dtype=torch.float64)
    loss, metrics = get_policy_loss_fn("gspo")(
        old, new, torch.ones(1, 2), torch.ones(1, 2), config=CFG
    )
    loss.backward()
    assert loss.item() == pytest.approx(-1)  # the two ratios cancel: nothing to clip
    np.testing.assert_allclose(new.grad, [[-0.5, -0.5]])
    assert metrics["actor/pg_clipfrac"] == 0
    doubled = torch.full((1, 2), math.log(2.0))
    for sign, clipped in ((1, 1), (-1, 0)):
        _, metrics = get_policy_loss_fn("gspo")(
            old, doubled, sign * torch.ones(1, 2), torch.ones(1, 2), config=CFG
        )
        assert metrics["actor/pg_clipfrac"] == clipped


def test_luspo_is_gspo_times_the_length():
    random = torch.Generator().manual_seed(0)
    old, new, adv = (torch.randn(4, 5, generator=random, dtype=torch.float64) for _ in range(3))
    mask = torch.arange(5) < torch.tensor([[1], [2], [5], [3]])
    adv = adv[:, :1].expand(4, 5)
    rows = [
        get_policy_loss_fn("gspo")(
            old[i : i + 1], new[i : i + 1], adv[i : i + 1], mask[i : i + 1],
            "seq-mean-token-mean", CFG,
        )[0] * mask[i].sum()
        for i in range(4)
    ]  # fmt: skip
    loss, _ = get_policy_loss_fn("luspo")(old, new, adv, mask, "token-mean", CFG)
    assert loss.item() == pytest.approx(float(sum(rows)) / 4)


def test_geo_mean_clips_in_log_space_and_averages_over_sequences():
    old = torch.zeros(2, 2, dtype=torch.float64)
    new = torch.tensor([[1.0, -1.0], [0.1, 0.1]], dtype=torch.float64)
    adv = torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    loss, metrics = get_policy_loss_fn("geo_mean")(old, new, adv, torch.ones(2, 2), config=CFG)
    expected = (-math.exp((0.2 - 1) / 2) + math.exp(0.1)) / 2
    assert loss.item() == pytest.approx(expected)
    assert metrics["actor/pg_clipfrac"].item() == 0.5  # both tokens of the first row
    assert metrics["actor/pg_clipfrac_lower"].item() == 0


def test_geo_mean_counts_tokens_clipped_from_above():
    old, adv = torch.zeros(1, 3), torch.ones(1, 3)
    new = torch.tensor([[1.0, 0.9, 0.1]])
    _, metrics = get_policy_loss_fn("geo_mean")(old, new, adv, torch.ones(1, 3), config=CFG)
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(2 / 3)
    assert metrics["actor/pg_clipfrac_lower"].item() == 0


def test_geo_mean_counts_tokens_of_negative_advantage_apart():
    old, adv = torch.zeros(1, 4, dtype=torch.float64), -torch.ones(1, 4, dtype=torch.float64)
    new = torch.tensor([[-1.0, 1.0, 0.1, -0.1]], dtype=torch.float64)
    _, metrics = get_policy_loss_fn("geo_mean")(old, new, adv, torch.ones(1, 4), config=CFG)
    assert metrics["actor/pg_clipfrac"].item() == 0
    assert metrics["actor/pg_clipfrac_lower"].item() == 0.5
