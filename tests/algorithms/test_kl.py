"""KL estimators, their gradients, the in-reward penalty and the controllers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hone.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    get_kl_controller,
    kl_penalty,
)


def at(kind, logp=-1.0, ref=-1.5):
    """Returns value and gradient of one token."""
    x = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    value = kl_penalty(x, torch.tensor([ref], dtype=torch.float64), kind)
    value.sum().backward()
    return value.item(), x.grad.item()


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        ("k1", 0.5, 1),
        ("kl", 0.5, 1),
        ("abs", 0.5, 1),
        ("k2", 0.125, 0.5),
        ("mse", 0.125, 0.5),
        ("k3", 0.106531, 1 - math.exp(-0.5)),
        ("low_var_kl", 0.106531, 1 - math.exp(-0.5)),
    ],
)
def test_values_gradients_and_the_straight_through_forms(kind, value, gradient):
    actual, slope = at(kind)
    assert actual == pytest.approx(value, abs=1e-6)
    assert slope == pytest.approx(gradient)
    plus, plus_slope = at(kind + "+")
    assert plus == pytest.approx(value, abs=1e-6)
    assert plus_slope == pytest.approx(0.5)  # the gradient of k2 in every form


def test_values_below_the_reference():
    assert at("k1", -2.0, -1.0)[0] == -1
    assert at("abs", -2.0, -1.0)[0] == 1
    assert at("k2", -2.0, -1.0)[0] == 0.5
    assert at("k3", -2.0, -1.0)[0] == pytest.approx(math.e - 2)


def test_k3_is_bounded():
    assert at("k3", -100.0, 0.0)[0] == 10
    assert at("k3", 0.0, -15.0)[0] == 10
    assert at("k3", 0.0, -5.0)[0] == pytest.approx(math.exp(-5) + 4)
    assert math.isfinite(at("k3", -2000.0, 0.0)[1])


@pytest.mark.parametrize("kind", ["full", "k4", "", "full+"])
def test_the_error_of_an_unknown_kind_names_known_ones(kind):
    with pytest.raises(NotImplementedError, match="k3") as caught:
        at(kind)
    assert ("needs the full distribution" in str(caught.value)) == (kind == "full")


def test_k3_has_the_mean_of_the_divergence_and_k2s_gradient_is_unbiased():
    """Over samples of the policy: E[k1] = E[k3] = KL, and the `+` gradient is that of the KL."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.1, 0.4, -0.3], dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    probs = logp.exp().detach()
    divergence = (logp.exp() * (logp - ref)).sum()
    (true,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    for kind in ("k1", "k3"):
        assert (probs * kl_penalty(logp, ref, kind)).sum().item() == pytest.approx(
            divergence.item()
        )
        plus = (probs * kl_penalty(logp, ref, kind + "+")).sum()
        (estimate,) = torch.autograd.grad(plus, logits, retain_graph=True)
        np.testing.assert_allclose(estimate, true)


def test_the_penalty_in_the_reward_is_zero_outside_the_mask():
    scores = torch.tensor([[0.0, 1.0, math.nan], [0.0, 0.0, 2.0], [9.0, 9.0, 9.0]])
    old = torch.tensor([[-1.0, -1.0, math.nan], [-1.0, -1.0, -1.0], [0.0, 0.0, 0.0]])
    ref = torch.tensor([[-1.5, -0.5, math.inf], [-2.0, -2.0, -2.0], [5.0, 5.0, 5.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    rewards, current = apply_kl_penalty(scores, old, ref, mask, 0.1, "k1")
    np.testing.assert_allclose(rewards, [[-0.05, 1.05, 0], [-0.1, -0.1, 1.9], [0, 0, 0]], rtol=1e-6)
    assert current.item() == pytest.approx((0.0 + 1.0) / 2)  # the row without tokens does not count


def test_the_fixed_controller_never_changes():
    controller = FixedKLController(0.3)
    controller.update(100.0, 1000)
    assert controller.value == 0.3


@pytest.mark.parametrize(("kl", "factor"), [(10.0, 1.2), (0.0, 0.8), (0.11, 1.1), (0.1, 1.0)])
def test_the_adaptive_controller_moves_towards_its_target_in_bounded_steps(kl, factor):
    controller = AdaptiveKLController(0.5, target_kl=0.1, horizon=1000)
    controller.update(kl, n_steps=100)
    assert controller.value == pytest.approx(0.5 * (1 + (factor - 1) * 0.1))


def test_controllers_are_built_from_the_config_and_refuse_invalid_values():
    fixed = SimpleNamespace(type="fixed", kl_coef=0.2)
    assert get_kl_controller(fixed).value == 0.2
    adaptive = SimpleNamespace(type="adaptive", kl_coef=0.2, target_kl=0.5, horizon=10)
    controller = get_kl_controller(adaptive)
    assert (controller.value, controller.target, controller.horizon) == (0.2, 0.5, 10)
    with pytest.raises(NotImplementedError, match="'fixed' or 'adaptive'"):
        get_kl_controller(SimpleNamespace(type="wild", kl_coef=1))
    with pytest.raises(ValueError, match="horizon=0"):
        AdaptiveKLController(0.1, 0.1, 0)
    with pytest.raises(ValueError, match="target_kl=0"):
        AdaptiveKLController(0.1, 0, 10)


def test_a_controllers_value_is_restored_from_a_checkpoint():
    controller = AdaptiveKLController(0.5, 0.1, 1000)
    controller.update(10.0, 100)
    resumed = AdaptiveKLController(0.5, 0.1, 1000)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.value == controller.value != 0.5
