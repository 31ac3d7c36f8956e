"""PPO's clip by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hone.algorithms.policy_losses import get_policy_loss_fn
from tests.algorithms.policy_losses.one_token import CFG, one


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "lower"),
    [
        (1.1, 2.0, -2.2, 0, 0),  # inside
        (1.5, 2.0, -2.4, 1, 0),  # rose far enough
        (0.5, 2.0, -1.0, 0, 0),  # fell although good: no clip
        (1.5, -2.0, 3.0, 0, 0),  # rose although bad: no clip
        (0.5, -2.0, 1.6, 1, 0),  # fell far enough
        (5.0, -2.0, 6.0, 0, 1),  # dual clip
    ],
)
def test_vanilla_clips_on_the_side_the_advantage_pushes_to(ratio, advantage, loss, clipped, lower):
    value, gradient, metrics = one("vanilla", ratio, advantage)
    assert value == pytest.approx(loss)
    assert metrics["pg_clipfrac"] == clipped
    assert metrics["pg_clipfrac_lower"] == lower
    assert metrics["avg_ratio"] == pytest.approx(ratio)
    assert gradient == pytest.approx(0 if clipped or lower else -advantage * ratio)


def test_clip_ratio_alone_moves_both_bounds():
    for ratio, advantage, bound in ((2.0, 1.0, 1.4), (0.1, -1.0, 0.6)):
        value, _, _ = one("vanilla", ratio, advantage, cfg={"clip_ratio": 0.4, "clip_ratio_c": 3.0})
        assert value == pytest.approx(-advantage * bound)


def test_low_and_high_each_override_clip_ratio():
    cfg = {"clip_ratio": 0.2, "clip_ratio_c": 3.0, "clip_ratio_high": 0.28, "clip_ratio_low": None}
    assert one("vanilla", 2.0, 1.0, cfg=cfg)[0] == pytest.approx(-1.28)
    assert one("vanilla", 0.1, -1.0, cfg=cfg)[0] == pytest.approx(0.8)
    cfg = {"clip_ratio": 0.2, "clip_ratio_c": 3.0, "clip_ratio_low": 0.1}
    assert one("vanilla", 2.0, 1.0, cfg=cfg)[0] == pytest.approx(-1.2)
    assert one("vanilla", 0.1, -1.0, cfg=cfg)[0] == pytest.approx(0.9)


def test_config_may_be_an_object():
    from types import SimpleNamespace

    cfg = SimpleNamespace(
        clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=0.3, clip_ratio_c=3.0
    )
    assert one("vanilla", 2.0, 1.0, cfg=cfg)[0] == pytest.approx(-1.3)


def test_a_dual_clip_of_one_or_less_is_refused():
    with pytest.raises(ValueError, match="clip_ratio_c=1"):
        one("vanilla", 1.0, 1.0, cfg={"clip_ratio": 0.2, "clip_ratio_c": 1.0})


@pytest.mark.parametrize("name", ["vanilla", "cispo", "sapo", "dppo_tv"])
def test_a_huge_ratio_stays_finite(name):
    old = torch.full((1, 1), -900.0)
    for new, advantage in ((-1.0, 1.0), (-1.0, -1.0)):
        new_log_prob = torch.tensor([[new]], requires_grad=True)
        loss, _ = get_policy_loss_fn(name)(
            old, new_log_prob, torch.tensor([[advantage]]), torch.ones(1, 1), config=CFG
        )
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(new_log_prob.grad).all()


def test_the_exponent_of_the_ratio_is_bounded_at_twenty():
    old, new = torch.full((1, 1), -25.0).double(), torch.zeros(1, 1).double()
    loss, _ = get_policy_loss_fn("vanilla")(
        old, new, -torch.ones(1, 1), torch.ones(1, 1), config={**CFG, "clip_ratio_c": 1e12}
    )
    assert loss.item() == pytest.approx(math.exp(20))
