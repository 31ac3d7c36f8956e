"""SimPO, ORPO and CPO: values computed by hand from the papers' formulas, in float64."""

from __future__ import annotations

from math import exp, log

import pytest
import torch

from hone.algorithms.preference_losses import LossFunction
from hone.config.preference import PreferenceLossConfig

from .two_pairs import PAIRS, call, losses_of

# Log-probabilities per token: −4/4 = −1 and −3/1 = −3, against −6/2 = −3 and −5/5 = −1.


def softplus(x: float) -> float:
    return log(1 + exp(x))


def test_simpo_compares_means_per_token_with_a_target_margin() -> None:
    # 0.5·(−1 + 3) − 0.3 = 0.7 and 0.5·(−3 + 1) − 0.3 = −1.3
    losses = losses_of("simpo", simpo_gamma=0.3)
    assert losses == pytest.approx([softplus(-0.7), softplus(1.3)], rel=1e-12)
    losses = losses_of("simpo", {"margin": (0.5, 0.0)}, simpo_gamma=0.3)
    assert losses == pytest.approx([softplus(-0.2), softplus(1.3)], rel=1e-12)


def test_orpo_is_the_nll_plus_the_log_loss_of_the_odds_ratio() -> None:
    def odds(mean_logp: float) -> float:
        return exp(mean_logp) / (1 - exp(mean_logp))

    ratio = odds(-1) / odds(-3)
    expected = [1 - 0.5 * log(ratio / (1 + ratio)), 3 - 0.5 * log(1 / (1 + ratio))]
    losses, metrics = call("orpo", PAIRS)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert metrics["log_odds_ratio"] == pytest.approx([log(ratio), -log(ratio)], rel=1e-12)
    assert metrics["nll"] == [1.0, 3.0]


def test_orpo_is_finite_with_its_gradient_for_certain_and_impossible_responses() -> None:
    chosen = torch.tensor([-1e-7, -200.0, 0.0], requires_grad=True)
    rejected = torch.tensor([-200.0, -1e-7, -1.0], requires_grad=True)
    ones = torch.ones(3)
    losses, _ = LossFunction("orpo")(
        chosen_logp=chosen,
        rejected_logp=rejected,
        chosen_length=ones,
        rejected_length=ones,
        config=PreferenceLossConfig(),
    )
    losses.sum().backward()
    assert losses.isfinite().all()
    for gradient in (chosen.grad, rejected.grad):
        assert gradient is not None
        assert gradient.isfinite().all()


def test_cpo_is_dpo_without_reference_plus_the_weighted_nll() -> None:
    # 0.5·(−4 + 6) = 1 and 0.5·(−3 + 5) = 1
    expected = [softplus(-1.0) + 2 * 1.0, softplus(-1.0) + 2 * 3.0]
    assert losses_of("cpo", cpo_alpha=2.0) == pytest.approx(expected, rel=1e-12)
    assert losses_of("cpo", cpo_alpha=0.0) == pytest.approx([softplus(-1.0)] * 2, rel=1e-12)


@pytest.mark.parametrize("name", ["simpo", "orpo", "cpo"])
def test_they_need_no_reference(name: str) -> None:
    assert not LossFunction(name).needs_reference
    without = {key: value for key, value in PAIRS.items() if not key.startswith("ref_")}
    assert call(name, without) == call(name, PAIRS)
