"""What workers are promised: the lease, the adapters, the facts, the mesh."""

from __future__ import annotations

import pytest
import torch

from hone.config.engine import FSDPConfig
from hone.engine.contract import Mesh
from hone.engine.offload import offload_of
from tests.engine.batches import VOCABULARY, rows
from tests.engine.engines import ADAM, actor, critic, engine, policy
from tests.engine.ranks import CONTENTS, lora_policy, update


def test_a_lease_is_the_module_itself_in_eval_mode():
    model = policy()
    made = engine(model)
    model.train()
    with made.lease() as lease:
        assert lease.policy is model
        assert not any(module.training for module in model.modules())


def test_the_generation_stays_while_addresses_stay_and_changes_when_they_may_have(tmp_path):
    made = engine(policy(), ADAM)

    def generation():
        with made.lease() as lease:
            return lease.generation

    first = generation()
    update(made, rows(), actor())
    assert generation() == first  # updates write in place
    made.save(tmp_path, CONTENTS)
    made.load(tmp_path)
    loaded = generation()
    assert loaded != first
    resting = FSDPConfig(param_offload=True)
    made.offload = offload_of(made.module, made.optimizer, resting, devices=("cpu",))
    made.offload.start()
    back = generation()
    assert back != loaded
    assert generation() != back  # away and back again
    with made.present():
        assert generation() == generation()


def test_a_critic_is_not_leased():
    with pytest.raises(TypeError, match="a ValueModel does not decode"), engine(critic()).lease():
        pass


def test_without_adapters_the_model_is_its_base():
    made = engine(lora_policy(), ADAM)
    base = engine(policy()).infer(rows(), temperature=1.0)["log_probs"]
    update(made, rows(), actor())
    off = made.infer(rows(), adapters=False, temperature=1.0)["log_probs"]
    assert torch.equal(off, base)
    assert not torch.equal(made.infer(rows(), temperature=1.0)["log_probs"], base)


def test_adapters_are_named_alone_and_a_plain_model_has_none():
    made = engine(lora_policy(), ADAM)
    names = [name for name, _ in made.named_adapter_weights()]
    assert names
    assert all(".lora_" in name for name in names)
    with pytest.raises(ValueError, match="no adapters"):
        next(engine(policy()).named_adapter_weights())
    with pytest.raises(ValueError, match="there are none"):
        engine(policy()).infer(rows(), adapters=False, temperature=1.0)


def test_facts_are_those_of_the_whole_model():
    facts = engine(lora_policy()).facts
    plain = engine(policy())
    assert (facts.has_adapters, plain.facts.has_adapters) == (True, False)
    assert facts.vocabulary == VOCABULARY
    assert plain.facts.parameters == sum(x.numel() for _, x in plain.named_hf_weights())
    assert plain.facts.parameter_bytes == 4 * plain.facts.parameters


def test_updates_count_optimizer_steps():
    made = engine(policy(), ADAM)
    assert made.updates == engine(policy(), None).updates == 0
    update(made, rows(), actor())
    assert made.updates == 1


def test_one_rank_of_a_slot_collects_and_one_of_all_writes():
    places = [
        Mesh(data_parallel_rank=d, data_parallel_size=2, tensor_rank=t, tensor_size=2)
        for d in range(2)
        for t in range(2)
    ]
    assert [place.collects for place in places] == [True, False, True, False]
    assert [place.writes for place in places] == [True, False, False, False]
    assert {place.ranks_per_slot for place in places} == {2}
