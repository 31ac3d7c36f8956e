"""A user's own loss gets verl's arguments by name, and returns what verl's losses return."""

from __future__ import annotations

import pytest
import torch

from hone.algorithms.policy_losses.policy_loss import agg_loss, call_custom_loss
from hone.config.actor import ActorConfig
from hone.plugins import PluginError

OLD, NEW, ADVANTAGES = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]]), torch.ones(1, 2)
MASK, WEIGHTS, COLUMN = torch.tensor([[1, 1]]), torch.tensor([[0.5, 0.25]]), torch.zeros(1, 2)


def loss_of_verl_0_5(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None
):
    loss = agg_loss(advantages * (log_prob - old_log_prob), response_mask, loss_agg_mode)
    return loss, torch.tensor(0.25), torch.tensor(0.5), torch.tensor(0.0)


def with_another_order(advantages, log_prob, old_log_prob, response_mask):
    return agg_loss(advantages * (log_prob - old_log_prob), response_mask, "token-mean"), {}


def with_the_config(log_prob, response_mask, loss_agg_mode, config):
    return agg_loss(log_prob, response_mask, loss_agg_mode), {"cfg": config.clip_ratio}


def with_keywords_only(*, old_log_prob, log_prob, advantages, response_mask, **others):
    gap = advantages * (log_prob - old_log_prob)
    return agg_loss(gap, response_mask, others["loss_agg_mode"]), {}


def with_some_names(log_prob, advantages, **others):
    gap = advantages * (log_prob - others["old_log_prob"])
    return agg_loss(gap, others["response_mask"], others["loss_agg_mode"]), {}


def with_a_default_of_its_own(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_log_probs=None
):
    assert rollout_log_probs is None
    return agg_loss(advantages * (log_prob - old_log_prob), response_mask, loss_agg_mode), {}


def with_a_column(log_prob, response_mask, ref_log_prob):
    assert ref_log_prob is COLUMN
    return agg_loss(log_prob, response_mask, "token-mean"), {}


def weighted_by_name(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights):
    gap = advantages * (log_prob - old_log_prob) * rollout_is_weights
    return agg_loss(gap, response_mask, "token-mean"), {}


def per_token(old_log_prob, log_prob, advantages, response_mask, **_):
    return advantages * log_prob, {}


def alone(old_log_prob, log_prob, advantages, response_mask):
    return agg_loss(log_prob, response_mask, "token-mean")


def call(function, weights=None, **columns):
    config = ActorConfig(clip_ratio=0.2, loss_agg_mode="token-mean")
    loss, metrics = call_custom_loss(
        function, (OLD, NEW, ADVANTAGES, MASK), config, weights, columns
    )
    return loss.item(), metrics


FORMS = (
    loss_of_verl_0_5,
    with_another_order,
    with_keywords_only,
    with_some_names,
    with_a_default_of_its_own,
)


@pytest.mark.parametrize("function", FORMS)
def test_a_loss_may_have_any_form_of_verl(function):
    assert call(function)[0] == pytest.approx((-0.5 + 1.0) / 2)


def test_a_loss_gets_the_config_and_the_columns_that_it_needs():
    assert call(with_the_config)[1] == {"cfg": 0.2}
    assert call(with_a_column, ref_log_prob=COLUMN)[0] == pytest.approx(-1.25)


def test_the_metrics_of_verl_0_5_get_their_names():
    metrics = {name: value.item() for name, value in call(loss_of_verl_0_5)[1].items()}
    assert metrics == {
        "actor/pg_clipfrac": 0.25,
        "actor/ppo_kl": 0.5,
        "actor/pg_clipfrac_lower": 0.0,
    }


def test_importance_weights_are_passed():
    assert call(weighted_by_name, WEIGHTS)[0] == pytest.approx((-0.5 * 0.5 + 0.25) / 2)


@pytest.mark.parametrize("function", [loss_of_verl_0_5, with_another_order])
def test_a_loss_without_importance_weights_is_refused_in_a_run_with_them(function):
    with pytest.raises(PluginError, match="has no argument rollout_is_weights"):
        call(function, WEIGHTS)


@pytest.mark.parametrize(
    ("function", "returned"),
    [(per_token, r"\(a tensor of shape \[1, 2\], a dict\)"), (alone, r"a tensor of shape \[\]")],
)
def test_another_result_than_a_loss_and_metrics_is_refused(function, returned):
    with pytest.raises(PluginError, match=f"{function.__name__} returned {returned}; return "):
        call(function)
