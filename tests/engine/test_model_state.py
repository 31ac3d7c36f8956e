"""What a rank holds of the model, and how it leaves the engine."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from hone.models.tiny import character_tokenizer
from tests.engine.engines import critic, engine, policy, weights


def test_weights_carry_their_hugging_face_names():
    made = engine(policy(tie_embeddings=False))
    assert set(weights(made)) == set(made.module.lm.state_dict())


def test_facts_are_those_of_the_whole_model():
    made = engine(policy())
    parameters = list(made.module.lm.parameters())
    assert made.facts.parameters == sum(p.numel() for p in parameters)
    assert made.facts.parameter_bytes == 4 * made.facts.parameters
    assert not made.facts.has_adapters


def test_a_lease_is_of_the_policy_in_eval_mode_and_a_critic_has_none():
    made = engine(policy())
    made.module.train()
    with made.lease() as lease:
        assert lease.policy is made.module
        assert not made.module.training
    with pytest.raises(TypeError, match="ValueModel does not decode"):
        engine(critic()).lease().__enter__()


def test_an_export_opens_with_transformers(tmp_path):
    made = engine(policy())
    made.export(tmp_path, character_tokenizer("0123456789"))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    state = opened.state_dict()
    assert all(state[name].equal(tensor) for name, tensor in weights(made).items())
