"""The contract of training engines: lease, adapters, facts, mesh."""

from __future__ import annotations

import pytest
import torch

from hone.config.engine import FSDPConfig
from hone.engine.contract import Mesh
from hone.engine.offload import build_offload
from tests.engine.batches import VOCABULARY, rows
from tests.engine.engines import ADAM, actor, critic, make_engine, policy
from tests.engine.ranks import CONTENTS, lora_policy, update


def test_a_lease_is_the_module_itself_in_eval_mode():
    model = policy()
    engine = make_engine(model)
    model.train()
    with engine.lease() as lease:
        assert lease.policy is model
        assert not any(module.training for module in model.modules())


def test_the_address_version_changes_when_addresses_may_have_changed(tmp_path):
    engine = make_engine(policy(), ADAM)

    def generation():
        with engine.lease() as lease:
            return lease.address_version

    first = generation()
    update(engine, rows(), actor())
    assert generation() == first  # updates write in mesh
    engine.save(tmp_path, CONTENTS)
    engine.load(tmp_path)
    loaded = generation()
    assert loaded != first
    fsdp = FSDPConfig(param_offload=True)
    engine.offload = build_offload(engine.module, engine.optimizer, fsdp, device_types=("cpu",))
    engine.offload.start()
    reloaded = generation()
    assert reloaded != loaded
    assert generation() != reloaded  # offloaded and reloaded once more
    with engine.on_device():
        assert generation() == generation()


def test_a_critic_is_not_leased():
    with (
        pytest.raises(TypeError, match="a ValueModel does not decode"),
        make_engine(critic()).lease(),
    ):
        pass


def test_with_disabled_adapters_the_model_equals_its_base():
    engine = make_engine(lora_policy(), ADAM)
    base = make_engine(policy()).infer(rows(), temperature=1.0)["log_probs"]
    update(engine, rows(), actor())
    disabled = engine.infer(rows(), adapters=False, temperature=1.0)["log_probs"]
    assert torch.equal(disabled, base)
    assert not torch.equal(engine.infer(rows(), temperature=1.0)["log_probs"], base)


def test_named_adapter_weights_are_the_adapters_only_and_a_plain_model_has_none():
    engine = make_engine(lora_policy(), ADAM)
    names = [name for name, _ in engine.named_adapter_weights()]
    assert names
    assert all(".lora_" in name for name in names)
    with pytest.raises(ValueError, match="no adapters"):
        next(make_engine(policy()).named_adapter_weights())
    with pytest.raises(ValueError, match="this model has no adapters"):
        make_engine(policy()).infer(rows(), adapters=False, temperature=1.0)


def test_facts_are_those_of_the_whole_model():
    facts = make_engine(lora_policy()).model_facts
    plain = make_engine(policy())
    assert (facts.has_adapters, plain.model_facts.has_adapters) == (True, False)
    assert facts.vocab_size == VOCABULARY
    assert plain.model_facts.parameters == sum(x.numel() for _, x in plain.named_hf_weights())
    assert plain.model_facts.parameter_bytes == 4 * plain.model_facts.parameters


def test_updates_count_optimizer_steps():
    engine = make_engine(policy(), ADAM)
    assert engine.updates == make_engine(policy(), None).updates == 0
    update(engine, rows(), actor())
    assert engine.updates == 1


def test_one_rank_of_a_slot_collects_and_one_of_all_writes():
    meshes = [
        Mesh(data_parallel_rank=d, data_parallel_size=2, tensor_rank=t, tensor_size=2)
        for d in range(2)
        for t in range(2)
    ]
    assert [mesh.is_collector for mesh in meshes] == [True, False, True, False]
    assert [mesh.is_writer for mesh in meshes] == [True, False, False, False]
    assert {mesh.ranks_per_slot for mesh in meshes} == {2}
