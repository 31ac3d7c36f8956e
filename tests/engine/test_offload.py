"""Offload: offloaded tensors use no device memory, and are reloaded bit for bit.

The mechanism is the same on every device; here the CPU stands for the accelerator.
"""

from __future__ import annotations

import pytest
import torch

from hone.config.engine import FSDPConfig, OptimConfig
from hone.engine.offload import OffloadedTensors, build_offload
from tests.engine.batches import rows
from tests.engine.engines import actor, make_engine, policy, weights
from tests.engine.ranks import update

BOTH = FSDPConfig(param_offload=True, optimizer_offload=True)
ADAM = OptimConfig(lr=1e-2)


def storage_bytes(tensors) -> int:
    return sum(storage.nbytes() for storage in {t.untyped_storage() for t in tensors})


def offloaded_engine(dtype=torch.float32, fsdp=BOTH):
    engine = make_engine(policy(dtype=dtype), ADAM)
    engine.offload = build_offload(engine.module, engine.optimizer, fsdp, device_types=("cpu",))
    engine.offload.start()
    return engine


def test_an_offloaded_tensor_uses_no_memory_and_is_reloaded_bit_for_bit():
    block = torch.randn(6, 4)
    top, bottom, other = block[:2], block[2:], torch.randn(3).bfloat16()
    before = [block.clone(), other.clone()]
    tensors = OffloadedTensors(lambda: [top, bottom, other], device_types=("cpu",))
    tensors.to_host()
    assert storage_bytes([block, other]) == 0
    assert tensors.offloaded_bytes == 6 * 4 * 4 + 3 * 2  # two views share the memory of one block
    with tensors.on_device():
        assert torch.equal(block, before[0])
        assert torch.equal(other, before[1])
        assert top.data_ptr() == block.data_ptr()  # views stay views
        with tensors.on_device():  # only the outermost block moves
            pass
        assert tensors.offloaded_bytes == 0
        block += 1
    tensors.to_device()
    assert torch.equal(block, before[0] + 1)  # writes inside the block are kept


def test_tensors_are_offloaded_again_after_an_error():
    tensor = torch.ones(4)
    tensors = OffloadedTensors(lambda: [tensor], device_types=("cpu",))
    tensors.to_host()
    with pytest.raises(RuntimeError, match="broken"), tensors.on_device():
        raise RuntimeError("broken")
    assert tensor.untyped_storage().nbytes() == 0


def test_tensors_on_the_host_stay_there():
    tensor = torch.ones(4)
    tensors = OffloadedTensors(lambda: [tensor])
    tensors.to_host()
    assert tensors.offloaded_bytes == 0
    assert torch.equal(tensor, torch.ones(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fsdp", [BOTH, FSDPConfig(param_offload=True), FSDPConfig(optimizer_offload=True)]
)
def test_training_with_offload_equals_training_without_it(dtype, fsdp):
    plain, offloaded = make_engine(policy(dtype=dtype), ADAM), offloaded_engine(dtype, fsdp)
    for _ in range(3):
        expected = update(plain, rows(), actor())
        actual = update(offloaded, rows(), actor())
        assert actual[0] == expected[0]
        assert all(torch.equal(actual[1][name], x) for name, x in expected[1].items())
    scores = [engine.infer(rows(), temperature=1.0)["log_probs"] for engine in (plain, offloaded)]
    assert torch.equal(*scores)


def test_between_calls_neither_parameters_nor_optimizer_use_memory():
    engine = offloaded_engine(torch.bfloat16)
    assert storage_bytes(engine.module.parameters()) == 0
    engine.infer(rows(), temperature=1.0)
    update(engine, rows(), actor())
    assert storage_bytes(engine.module.parameters()) == 0
    optimizer = engine.optimizer
    moments = [x for state in optimizer.torch_optimizer.state.values() for x in state.values()]
    assert len(moments) >= 2 * len(optimizer.masters)
    assert storage_bytes([*moments, *optimizer.master_copies().values()]) == 0
    with engine.on_device():  # a forward pass needs no moments
        assert storage_bytes(engine.module.parameters()) > 0
        assert storage_bytes(moments) == 0
    with engine.on_device(optimizer=True):
        assert storage_bytes(moments) > 0


def test_an_offloaded_engine_saves_and_loads_complete_checkpoints(tmp_path):
    engine = offloaded_engine(torch.bfloat16)
    update(engine, rows(), actor())
    engine.save(tmp_path / "saved", ("model", "optimizer", "extra"))
    expected = update(engine, rows(), actor())
    other_engine = offloaded_engine(torch.bfloat16)
    other_engine.load(tmp_path / "saved")
    assert storage_bytes(other_engine.module.parameters()) == 0
    actual = update(other_engine, rows(), actor())
    assert actual[0] == expected[0]
    assert all(torch.equal(actual[1][name], x) for name, x in weights(engine).items())


def test_without_the_keys_nothing_is_offloaded():
    engine = make_engine(policy(), ADAM)
    assert build_offload(engine.module, engine.optimizer, FSDPConfig()) is None
    assert build_offload(engine.module, None, FSDPConfig(optimizer_offload=True)) is None
    assert engine.offload is None
