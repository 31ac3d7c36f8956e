"""The model state of a rank: weights, facts, lease and export."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from hone.models.tiny import character_tokenizer
from tests.engine.engines import critic, make_engine, policy, weights


def test_weights_carry_their_hugging_face_names():
    engine = make_engine(policy(tie_embeddings=False))
    assert set(weights(engine)) == set(engine.module.lm.state_dict())


def test_facts_are_those_of_the_whole_model():
    engine = make_engine(policy())
    parameters = list(engine.module.lm.parameters())
    assert engine.facts.parameters == sum(p.numel() for p in parameters)
    assert engine.facts.parameter_bytes == 4 * engine.facts.parameters
    assert not engine.facts.has_adapters


def test_a_lease_lends_the_policy_in_eval_mode_and_a_critic_has_none():
    engine = make_engine(policy())
    engine.module.train()
    with engine.lease() as lease:
        assert lease.policy is engine.module
        assert not engine.module.training
    with pytest.raises(TypeError, match="ValueModel does not decode"):
        make_engine(critic()).lease().__enter__()


def test_an_export_opens_with_transformers(tmp_path):
    engine = make_engine(policy())
    engine.export(tmp_path, character_tokenizer("0123456789"))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    state = opened.state_dict()
    assert all(state[name].equal(tensor) for name, tensor in weights(engine).items())
