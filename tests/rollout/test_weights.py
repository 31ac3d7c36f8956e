"""The order of a weight update, and copies by name."""

from __future__ import annotations

import pytest
import torch

from hone.models.policy import PolicyModel
from hone.models.tiny import tiny_lm
from hone.rollout.contract import RolloutError
from hone.rollout.weights import WeightUpdate, load_weights


@pytest.fixture
def policy() -> PolicyModel:
    return PolicyModel(tiny_lm(20, hidden=16, layers=1, heads=2, mlp=16))


def test_an_update_begins_loads_and_commits() -> None:
    update = WeightUpdate()
    update.begin(0)
    with pytest.raises(RolloutError, match="generate is refused between begin_update and commit"):
        update.raise_if_in_progress("generate")
    with update.loading():
        pass
    update.commit()
    update.raise_if_in_progress("generate")


def test_an_update_begins_only_without_running_requests() -> None:
    with pytest.raises(RolloutError, match="while 3 requests run"):
        WeightUpdate().begin(3)


@pytest.mark.parametrize("call", ["load", "commit"])
def test_nothing_is_loaded_or_committed_before_begin(call: str) -> None:
    update = WeightUpdate()
    with (
        pytest.raises(RolloutError, match=f"cannot {call} without begin_update"),
        update.loading() if call == "load" else update.committing(),
    ):
        pass


@pytest.mark.parametrize("phase", ["loading", "committing"])
def test_after_an_error_only_a_new_begin_helps(phase: str) -> None:
    update = WeightUpdate()
    update.begin(0)
    with pytest.raises(ValueError, match="broken"), getattr(update, phase)():
        raise ValueError("broken")
    for _ in range(2):
        with pytest.raises(RolloutError, match=r"has failed \(broken\)"):
            update.commit()
    update.begin(0)
    update.commit()
    assert not update.in_progress


def test_every_tensor_goes_into_its_parameter_under_each_name_of_a_tied_one(
    policy: PolicyModel,
) -> None:
    weights = {
        name: torch.full_like(p, i)
        for i, (name, p) in enumerate(policy.lm.named_parameters(remove_duplicate=False), 1)
    }
    assert "lm_head.weight" in weights
    load_weights(policy, weights.items())
    tied = {"lm_head.weight", "model.embed_tokens.weight"}
    for name, parameter in policy.lm.named_parameters(remove_duplicate=False):
        if name not in tied:
            assert torch.equal(parameter, weights[name])
    last_of_tied = list(weights)[max(list(weights).index(name) for name in tied)]
    assert torch.equal(policy.lm.get_output_embeddings().weight, weights[last_of_tied])


def test_a_wrong_name_or_shape_is_told_with_what_the_model_has(policy: PolicyModel) -> None:
    with pytest.raises(RolloutError, match=r"Did you mean 'model\.norm\.weight'\?"):
        load_weights(policy, [("model.nrm.weight", torch.ones(16))])
    with pytest.raises(RolloutError, match=r"shape \(3,\); the model's has \(16,\)"):
        load_weights(policy, [("model.norm.weight", torch.ones(3))])
