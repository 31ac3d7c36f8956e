"""Megatron's layouts give what one rank of FSDP2 gives: outputs, updates, checkpoints, exports."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM

from tests.engine.megatron import ranks
from tests.engine.megatron.ranks import ADAM, FOUR, RESUMED, TWO, Case

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("megatron")
    ranks.write_models(place, (*TWO, *FOUR))
    for name, (case, _) in RESUMED.items():  # what the ranks load
        engine = ranks.one_rank(case, place, optim=ADAM)
        ranks.two_updates(engine, case)
        engine.save(place / f"fsdp2-{name}", ranks.CONTENTS)
    return place


@pytest.fixture(scope="module")
def two(folder):
    return ranks.spawn(TWO, 2, folder)


@pytest.fixture(scope="module")
def four(folder):
    return ranks.spawn(FOUR, 4, folder)


def assert_same_update(found, expected, rel=1e-5):
    metrics, after = found
    reference, wanted = expected
    assert set(metrics) == set(reference)
    for name, value in reference.items():
        assert metrics[name] == pytest.approx(value, rel=rel, abs=1e-6), name
    assert set(after) == set(wanted)
    for name, tensor in wanted.items():
        if not name.endswith("k_proj.bias"):  # its true gradient is zero
            torch.testing.assert_close(after[name], tensor, rtol=rel, atol=2e-6, msg=name)


def check(case, everyone, folder):
    expected = ranks.results(ranks.one_rank(case, folder), case)
    outputs: dict[int, dict[str, torch.Tensor]] = {}
    for found in (rank[case.name] for rank in everyone):
        assert_same_update(
            (found["metrics"], found["weights"]), (expected["metrics"], expected["weights"])
        )
        for name, tensor in found.get("decodes", {}).items():
            assert torch.equal(tensor, found["weights"][name]), name
        assert found["facts"] == expected["facts"]
        slot, collects = found["slot"]
        if collects:
            assert slot not in outputs
            outputs[slot] = found["outputs"]
    for name, tensor in expected["outputs"].items():
        whole = torch.cat([outputs[slot][name] for slot in sorted(outputs)])
        torch.testing.assert_close(whole, tensor, rtol=1e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.name)
def test_two_ranks_give_what_one_rank_of_fsdp2_gives(case, two, folder):
    check(case, two, folder)


@pytest.mark.parametrize("case", FOUR, ids=lambda case: case.name)
def test_four_ranks_give_what_one_rank_of_fsdp2_gives(case, four, folder):
    check(case, four, folder)


def leaves_of(checkpoint: Path) -> Iterator[tuple[str, Any]]:
    """The numbers of a checkpoint by name; moments and weights are whole tensors."""
    dcp_to_torch_save(checkpoint, checkpoint / "whole.pt")
    stack = [("", torch.load(checkpoint / "whole.pt", weights_only=False))]
    while stack:
        name, value = stack.pop()
        if isinstance(value, dict | list | tuple):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            stack += [(f"{name}.{key}", x) for key, x in pairs]
        elif isinstance(value, torch.Tensor | int | float):
            yield name, value


def bound(case):
    return 3e-2 if case.dtype == torch.bfloat16 else 1e-4


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("source", ["fsdp2", "megatron"])
def test_a_checkpoint_of_fsdp2_or_another_layout_resumes(two, folder, source, name):
    case = RESUMED[name][0]
    engine = ranks.one_rank(case, folder, optim=ADAM)
    engine.load(folder / f"fsdp2-{name}")
    expected = engine.train_minibatch(ranks.share(engine, case), ranks.objective(case))
    for rank in two:
        metrics, after, updates = rank["resumed"][f"{source}-{name}"]
        assert updates == 3
        assert metrics == pytest.approx(expected, rel=bound(case), abs=1e-4)
        for weight, tensor in ranks.weights(engine).items():
            difference = (after[weight].float() - tensor.float()).norm()
            assert difference < bound(case) * tensor.float().norm(), weight


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("source", ["fsdp2", "megatron"])
def test_a_checkpoint_that_was_loaded_is_saved_again_bit_by_bit(two, folder, source, name):
    saved, again = (
        dict(leaves_of(folder / f"{source}-{name}{suffix}")) for suffix in ("", "-again")
    )
    assert saved.keys() == again.keys()
    assert any("masters" in leaf for leaf in saved) == (RESUMED[name][0].dtype == torch.bfloat16)
    for leaf, value in saved.items():
        assert torch.equal(torch.as_tensor(again[leaf]), torch.as_tensor(value)), leaf


@pytest.mark.parametrize("name", RESUMED)
def test_fsdp2_resumes_a_checkpoint_of_megatron(two, folder, name):
    case = RESUMED[name][0]
    engine = ranks.one_rank(case, folder, optim=ADAM)
    engine.load(folder / f"megatron-{name}")
    assert engine.updates == 2
    metrics = engine.train_minibatch(ranks.share(engine, case), ranks.objective(case))
    expected, _, _ = two[0]["resumed"][f"megatron-{name}"]
    assert metrics == pytest.approx(expected, rel=bound(case), abs=1e-4)


def test_the_groups_wait_as_long_as_the_process_group(monkeypatch):
    from hone.engine.megatron import mesh

    waits = []
    state = mesh.parallel_state
    monkeypatch.setattr(state, "model_parallel_is_initialized", lambda: False)
    monkeypatch.setattr(
        state,
        "initialize_model_parallel",
        lambda *_, distributed_timeout_minutes, **__: waits.append(distributed_timeout_minutes),
    )
    wait = timedelta(seconds=601)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=wait)
    try:
        with pytest.raises(AssertionError):  # megatron-core's groups were not created
            mesh.join_mesh(ranks.spec(Case("llama"), Path()))
    finally:
        dist.destroy_process_group()
    assert waits == [11]


@pytest.mark.parametrize("name", RESUMED)
def test_the_export_holds_the_weights(two, folder, name):
    loaded = AutoModelForCausalLM.from_pretrained(folder / f"export-{name}" / "huggingface")
    _, after, _ = two[0]["resumed"][f"megatron-{name}"]
    for weight, parameter in loaded.named_parameters():
        assert torch.equal(parameter.to(after[weight].dtype), after[weight]), weight
