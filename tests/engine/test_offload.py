"""Offload: resting tensors take no memory where they compute, and come back bit for bit.

The mechanism is the same on every device; here the CPU plays the accelerator.
"""

from __future__ import annotations

import pytest
import torch

from hone.config.engine import FSDPConfig, OptimConfig
from hone.engine.offload import HostRest, Offload, offload_of
from tests.engine.batches import rows
from tests.engine.engines import actor, engine, policy, weights
from tests.engine.ranks import update

BOTH = FSDPConfig(param_offload=True, optimizer_offload=True)
ADAM = OptimConfig(lr=1e-2)


def bytes_of(tensors) -> int:
    return sum(storage.nbytes() for storage in {t.untyped_storage() for t in tensors})


def resting_engine(dtype=torch.float32, fsdp=BOTH):
    made = engine(policy(dtype=dtype), ADAM)
    made.offload = offload_of(made.module, made.optimizer, fsdp, devices=("cpu",))
    made.offload.start()
    return made


def test_a_resting_tensor_holds_no_memory_and_returns_bit_for_bit():
    block = torch.randn(6, 4)
    top, bottom, other = block[:2], block[2:], torch.randn(3).bfloat16()
    before = [block.clone(), other.clone()]
    rest = HostRest(lambda: [top, bottom, other], devices=("cpu",))
    rest.away()
    assert bytes_of([block, other]) == 0
    assert rest.bytes_resting == 6 * 4 * 4 + 3 * 2  # the block once, though two views of it rest
    with rest.present():
        assert torch.equal(block, before[0])
        assert torch.equal(other, before[1])
        assert top.data_ptr() == block.data_ptr()  # views stay views
        with rest.present():  # only the outermost block moves
            pass
        assert rest.bytes_resting == 0
        block += 1
    rest.back()
    assert torch.equal(block, before[0] + 1)  # what was written inside rests too


def test_it_rests_again_after_an_error_inside():
    tensor = torch.ones(4)
    rest = HostRest(lambda: [tensor], devices=("cpu",))
    rest.away()
    with pytest.raises(RuntimeError, match="broken"), rest.present():
        raise RuntimeError("broken")
    assert tensor.untyped_storage().nbytes() == 0


def test_what_lies_on_the_host_already_stays():
    tensor = torch.ones(4)
    rest = HostRest(lambda: [tensor])
    rest.away()
    assert rest.bytes_resting == 0
    assert torch.equal(tensor, torch.ones(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fsdp", [BOTH, FSDPConfig(param_offload=True), FSDPConfig(optimizer_offload=True)]
)
def test_training_with_offload_is_training_without_it(dtype, fsdp):
    plain, resting = engine(policy(dtype=dtype), ADAM), resting_engine(dtype, fsdp)
    for _ in range(3):
        expected = update(plain, rows(), actor())
        found = update(resting, rows(), actor())
        assert found[0] == expected[0]
        assert all(torch.equal(found[1][name], x) for name, x in expected[1].items())
    scores = [made.infer(rows(), temperature=1.0)["log_probs"] for made in (plain, resting)]
    assert torch.equal(*scores)


def test_between_calls_neither_parameters_nor_optimizer_hold_memory():
    made = resting_engine(torch.bfloat16)
    assert bytes_of(made.module.parameters()) == 0
    made.infer(rows(), temperature=1.0)
    update(made, rows(), actor())
    assert bytes_of(made.module.parameters()) == 0
    optimizer = made.optimizer
    moments = [x for state in optimizer.inner.state.values() for x in state.values()]
    assert len(moments) >= 2 * len(optimizer.masters)
    assert bytes_of([*moments, *optimizer.own_masters().values()]) == 0
    with made.present():  # a forward pass needs no moments
        assert bytes_of(made.module.parameters()) > 0
        assert bytes_of(moments) == 0
    with made.present(optimizer=True):
        assert bytes_of(moments) > 0


def test_checkpoints_and_exports_of_a_resting_engine_are_whole(tmp_path):
    made = resting_engine(torch.bfloat16)
    update(made, rows(), actor())
    made.save(tmp_path / "saved", ("model", "optimizer", "extra"))
    expected = update(made, rows(), actor())
    again = resting_engine(torch.bfloat16)
    again.load(tmp_path / "saved")
    assert bytes_of(again.module.parameters()) == 0
    found = update(again, rows(), actor())
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], x) for name, x in weights(made).items())


def test_without_the_keys_nothing_rests():
    made = engine(policy(), ADAM)
    assert offload_of(made.module, made.optimizer, FSDPConfig()) == Offload(None, None)
    assert made.offload == Offload(None, None)
