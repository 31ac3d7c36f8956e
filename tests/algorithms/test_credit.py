"""PURE's credit assignment: golden numbers and the strict minimum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.algorithms.credit import (
    GAMMA_DECAY,
    STRICT_MIN,
    assign_credit,
    min_form_returns,
    step_ends,
    step_rewards,
    total_min_form_returns,
)

R = torch.tensor([[0.9, 0.2, -0.6]], dtype=torch.float64)
ALL = torch.ones(1, 3)


def test_golden_soft_minimum():
    cold = assign_credit(R, ALL, 0.1)
    assert cold.sum().item() == pytest.approx(-0.599731, abs=1e-6)
    np.testing.assert_allclose((cold / R)[0], [3e-7, 3.35e-4, 0.999664], rtol=2e-2)
    warm = assign_credit(R, ALL, 1.0)
    np.testing.assert_allclose((warm / R)[0], [0.133414, 0.268664, 0.597922], atol=1e-6)
    to_go = warm.flip(-1).cumsum(-1).flip(-1)
    np.testing.assert_allclose(to_go[0], [-0.184947, -0.30502, -0.358753], atol=1e-6)
    good = assign_credit(torch.tensor([[0.9, 0.8, 0.7]]), ALL, 0.1)
    assert good.sum().item() == pytest.approx(0.74248, abs=1e-5)


def test_the_soft_minimum_tends_to_the_minimum_and_ignores_other_tokens():
    rewards = torch.tensor([[5.0, 0.4, -9.0, 0.1]])
    steps = torch.tensor([[0, 1, 0, 1]])
    assert assign_credit(rewards, steps, 1e-3).sum().item() == pytest.approx(0.1)
    assert assign_credit(rewards, steps, 1e-3)[0, 2] == 0
    assert (assign_credit(rewards, torch.zeros(1, 4), 0.1) == 0).all()


def test_the_soft_minimum_is_over_all_rows_of_a_trajectory():
    """Rows 0, 2 and 3 are one trajectory; row 3 has no step."""
    torch.manual_seed(0)
    rewards = torch.rand(5, 3, dtype=torch.float64) * 2 - 1
    steps = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0]])
    trajectory = torch.tensor([0, 1, 0, 0, 2])
    for temperature in (1e-3, 0.1, 5.0):
        actual = assign_credit(rewards, steps, temperature, trajectory)
        joined = torch.cat([rewards[0], rewards[2], rewards[3]])[None]
        mask = torch.cat([steps[0], steps[2], steps[3]])[None]
        expected = assign_credit(joined, mask, temperature)
        torch.testing.assert_close(actual[[0, 2, 3]].reshape(1, -1), expected)
        torch.testing.assert_close(actual[1], rewards[1] * steps[1])
        assert (actual[4] == 0).all()


@pytest.mark.parametrize("form", [GAMMA_DECAY, STRICT_MIN])
def test_the_named_forms_do_not_change_step_rewards(form):
    rewards = torch.tensor([[torch.nan, 0.4, -0.6]])
    actual = assign_credit(rewards, torch.tensor([[0, 1, 1]]), form)
    np.testing.assert_allclose(actual, [[0, 0.4, -0.6]])


def test_an_integer_or_a_numeric_string_is_a_temperature_too():
    torch.testing.assert_close(assign_credit(R, ALL, 1), assign_credit(R, ALL, 1.0))
    torch.testing.assert_close(assign_credit(R, ALL, "0.5"), assign_credit(R, ALL, 0.5))


@pytest.mark.parametrize("wrong", [0, -1.0, "min", float("nan")])
def test_other_values_are_refused(wrong):
    with pytest.raises(ValueError, match="strict min-form"):
        assign_credit(R, ALL, wrong)


def test_score_is_the_difference_of_the_two_probabilities():
    assert step_rewards(torch.tensor(2.0)).item() == pytest.approx(0.761594, abs=1e-6)
    logits = torch.tensor([[1.0, -0.5]], dtype=torch.float64)
    p = torch.softmax(logits, -1)
    assert step_rewards(logits[:, 1] - logits[:, 0]).item() == pytest.approx(
        (p[0, 1] - p[0, 0]).item()
    )


def test_a_step_ends_at_separators_and_once_at_the_last_token():
    ids = torch.tensor([[7, 5, 5, 7, 9, 0], [5, 7, 0, 0, 7, 7], [0, 0, 0, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    ends = step_ends(ids, mask, torch.tensor([7, 8]))
    assert ends.int().tolist() == [[1, 0, 0, 1, 1, 0], [0, 1, 0, 0, 0, 0], [0] * 6]


def test_the_strict_minimum_is_over_later_steps_only():
    rewards = torch.tensor([[9.0, 0.5, 9.0, 0.2, 9.0, 0.8, 9.0]])
    steps = torch.tensor([[0, 1, 0, 1, 0, 1, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0]])
    actual = min_form_returns(rewards, steps, mask)
    np.testing.assert_allclose(actual[0], [0.2, 0.2, 0.2, 0.2, 0.8, 0.8, 0], rtol=1e-6)
    assert (min_form_returns(rewards, torch.zeros_like(steps), mask) == 0).all()


def test_under_the_strict_minimum_other_rewards_are_summed():
    process = torch.tensor([[0.0, 0.5, 0.0, -0.3]])
    steps = torch.tensor([[0, 1, 0, 1]])
    rest = torch.tensor([[-0.01, -0.01, -0.01, 1.0]])
    returns = total_min_form_returns(process + rest, process, steps, torch.ones(1, 4))
    np.testing.assert_allclose(returns[0], [0.67, 0.68, 0.69, 0.7], rtol=1e-5)


def test_responses_without_columns_end_no_step():
    ends = step_ends(torch.ones(2, 0), torch.ones(2, 0), torch.tensor([1.0]))
    assert ends.shape == (2, 0)
