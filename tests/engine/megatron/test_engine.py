"""Megatron's layouts equal one rank of FSDP2: outputs, updates, checkpoints, exports."""

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
    root = tmp_path_factory.mktemp("megatron")
    ranks.write_models(root, (*TWO, *FOUR))
    for name, (case, _) in RESUMED.items():  # what the ranks load
        engine = ranks.one_rank(case, root, optim=ADAM)
        ranks.two_updates(engine, case)
        engine.save(root / f"fsdp2-{name}", ranks.CONTENTS)
    return root


@pytest.fixture(scope="module")
def two(folder):
    return ranks.spawn(TWO, 2, folder)


@pytest.fixture(scope="module")
def four(folder):
    return ranks.spawn(FOUR, 4, folder)


def assert_same_update(actual, expected, rel=1e-5):
    metrics, after = actual
    reference, expected_weights = expected
    assert set(metrics) == set(reference)
    for name, value in reference.items():
        assert metrics[name] == pytest.approx(value, rel=rel, abs=1e-6), name
    assert set(after) == set(expected_weights)
    for name, tensor in expected_weights.items():
        if not name.endswith("k_proj.bias"):  # its true gradient is zero
            torch.testing.assert_close(after[name], tensor, rtol=rel, atol=2e-6, msg=name)


def check(case, ranks_results, folder):
    expected = ranks.run_case(ranks.one_rank(case, folder), case)
    outputs: dict[int, dict[str, torch.Tensor]] = {}
    for actual in (rank[case.name] for rank in ranks_results):
        assert_same_update(
            (actual["metrics"], actual["weights"]), (expected["metrics"], expected["weights"])
        )
        for name, tensor in actual.get("decodes", {}).items():
            assert torch.equal(tensor, actual["weights"][name]), name
        assert actual["facts"] == expected["facts"]
        slot, collects = actual["slot"]
        if collects:
            assert slot not in outputs
            outputs[slot] = actual["outputs"]
    for name, tensor in expected["outputs"].items():
        all_rows = torch.cat([outputs[slot][name] for slot in sorted(outputs)])
        torch.testing.assert_close(all_rows, tensor, rtol=1e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.name)
def test_two_ranks_equal_one_rank_of_fsdp2(case, two, folder):
    check(case, two, folder)


@pytest.mark.parametrize("case", FOUR, ids=lambda case: case.name)
def test_four_ranks_equal_one_rank_of_fsdp2(case, four, folder):
    check(case, four, folder)


def leaves_of(checkpoint: Path) -> Iterator[tuple[str, Any]]:
    """Yields the values of a checkpoint by name; moments and weights are full tensors."""
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
    saved, resumed = (
        dict(leaves_of(folder / f"{source}-{name}{suffix}")) for suffix in ("", "-again")
    )
    assert saved.keys() == resumed.keys()
    assert any("masters" in leaf for leaf in saved) == (RESUMED[name][0].dtype == torch.bfloat16)
    for leaf, value in saved.items():
        assert torch.equal(torch.as_tensor(resumed[leaf]), torch.as_tensor(value)), leaf


@pytest.mark.parametrize("name", RESUMED)
def test_fsdp2_resumes_a_checkpoint_of_megatron(two, folder, name):
    case = RESUMED[name][0]
    engine = ranks.one_rank(case, folder, optim=ADAM)
    engine.load(folder / f"megatron-{name}")
    assert engine.updates == 2
    metrics = engine.train_minibatch(ranks.share(engine, case), ranks.objective(case))
    expected, _, _ = two[0]["resumed"][f"megatron-{name}"]
    assert metrics == pytest.approx(expected, rel=bound(case), abs=1e-4)


def test_the_groups_have_the_timeout_of_the_process_group(monkeypatch):
    from hone.engine.megatron import mesh

    timeouts = []
    state = mesh.parallel_state
    monkeypatch.setattr(state, "model_parallel_is_initialized", lambda: False)
    monkeypatch.setattr(
        state,
        "initialize_model_parallel",
        lambda *_, distributed_timeout_minutes, **__: timeouts.append(distributed_timeout_minutes),
    )
    timeout = timedelta(seconds=601)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        with pytest.raises(AssertionError):  # megatron-core's groups were not created
            mesh.join_mesh(ranks.spec(Case("llama"), Path()))
    finally:
        dist.destroy_process_group()
    assert timeouts == [11]


@pytest.mark.parametrize("name", RESUMED)
def test_the_export_holds_the_weights(two, folder, name):
    loaded = AutoModelForCausalLM.from_pretrained(folder / f"export-{name}" / "huggingface")
    _, after, _ = two[0]["resumed"][f"megatron-{name}"]
    for weight, parameter in loaded.named_parameters():
        assert torch.equal(parameter.to(after[weight].dtype), after[weight]), weight
