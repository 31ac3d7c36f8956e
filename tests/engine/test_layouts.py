"""Every layout of ranks equals one rank: metrics, gradient norm, weights, checkpoints, exports."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hone.engine.sharding import TIMEOUT_S
from tests.engine import ranks
from tests.engine.layouts import (
    BOUND,
    CASES,
    LAYOUTS,
    ONE,
    SAVED,
    Layout,
    build,
    cases_of,
    exported_weights,
    largest_difference,
    resume,
    run_cases,
    run_families,
    update,
    weight_differences,
    write_families,
    write_models,
)
from tests.engine.tensor_families import (
    KINDS,
    experts,
    families,
    load_experts,
    save_experts,
    timeouts,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


SPLIT_FAMILIES = ["deepseek_v3", "falcon", "gemma2", "gpt_oss", "qwen3_moe"]
"""Latent attention, a layout in the mask, soft caps and windows, sinks, experts."""


OF_TWO = [layout for layout in LAYOUTS if layout.ranks == 2]
CONTINUED = [Layout("fsdp2", data=2, tensor=2), Layout("megatron", tensor=2, pipeline=2)]
"""Layouts whose checkpoints every layout of two ranks resumes; benchmarks/parallel.py has other pairs."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Spawns ranks once per world size; the spawn of 2 ranks also resumes checkpoints."""
    folder = tmp_path_factory.mktemp("layouts")
    write_models(folder)
    write_families(SPLIT_FAMILIES, folder)
    save_experts(ONE, 0, folder)
    by_rank = {}
    for world in sorted({layout.ranks for layout in LAYOUTS}, reverse=True):
        layouts = [layout for layout in LAYOUTS if layout.ranks == world]
        scenarios = {"cases": partial(run_cases, layouts)}
        if world == 2:
            pairs = [(x, y) for x in CONTINUED if x in LAYOUTS for y in OF_TWO]
            scenarios |= {"resumed": partial(resume, pairs)}
            scenarios |= {"families": families, "split": run_families}
            scenarios |= {"experts": experts, "timeouts": timeouts}
        for rank, result in enumerate(ranks.spawn(scenarios, world, folder)):
            by_rank[world, rank] = {k: v for part in result.values() for k, v in part.items()}
    return by_rank, resume([(x, ONE) for x in LAYOUTS], 0, 1, folder), folder


@pytest.fixture(scope="module")
def expected(results):
    _, _, folder = results
    return {
        name: update(build(ONE, case, folder, 0), case.objective()) for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def two_updates(results):
    """The second of two updates in one process."""
    case = CASES[SAVED]
    engine = build(ONE, case, results[2], 0)
    update(engine, case.objective())
    return update(engine, case.objective())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor_parallel_layer_equals_the_whole_model(results, kind):
    for rank in range(2):
        assert max(results[0][2, rank][kind].values()) < BOUND


CELLS = [(layout, name) for layout in LAYOUTS for name in cases_of(layout)]


@pytest.mark.parametrize(("layout", "name"), CELLS, ids=lambda x: str(x))
def test_a_layout_computes_the_update_of_one_rank(results, expected, layout, name):
    for rank in range(layout.ranks):
        actual = results[0][layout.ranks, rank][f"{layout} {name}"]
        differences = largest_difference(actual, expected[name])
        assert max(differences.values()) < BOUND, (rank, differences)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_of_a_slot_infers_the_whole_rows_of_its_slot(results, expected, layout):
    expected_outputs = expected[SAVED].outputs
    slots = layout.data
    per_slot = layout.ranks // slots
    for rank in range(layout.ranks):
        actual = results[0][layout.ranks, rank][f"{layout} {SAVED}"].outputs
        assert set(actual) == set(expected_outputs)
        for name, tensor in expected_outputs.items():
            length = -(-len(tensor) // slots)
            part = tensor[rank // per_slot * length :][:length]
            torch.testing.assert_close(actual[name][: len(part)], part, rtol=1e-5, atol=1e-6)


def test_checkpoints_of_any_layout_resume_under_another(results, two_updates):
    by_rank, on_one_rank, _ = results
    assert len(on_one_rank) == len(LAYOUTS)
    resumed = {name: x for name, x in by_rank[2, 0].items() if " -> " in name}
    assert len(resumed) >= len(OF_TWO)
    for name, one_more in (on_one_rank | resumed).items():
        assert max(largest_difference(one_more, two_updates).values()) < BOUND, name


def test_packed_experts_resume_bit_for_bit_under_other_sizes_of_tensor_parallel(results):
    """Weights, masters and moments: gate and up rows keep their positions."""
    by_rank, _, folder = results
    saved_by_one = load_experts(ONE, 0, folder, ONE)
    loaded_by_one = load_experts(ONE, 0, folder, Layout("fsdp2", tensor=2))
    for rank in range(2):
        actual = by_rank[2, rank]
        for loaded in (actual["experts again"], loaded_by_one):
            assert all(map(torch.equal, loaded, actual["experts saved"]))
        assert all(map(torch.equal, actual["experts of one"], saved_by_one))


def test_every_group_of_a_mesh_has_the_timeout_of_the_process_group(results):
    for rank in range(2):
        assert results[0][2, rank]["timeouts"] == {TIMEOUT_S}


def test_families_with_other_attention_can_be_split(results):
    for rank in range(2):
        actual = results[0][2, rank]
        for name in SPLIT_FAMILIES:
            assert max(actual[f"family {name}"].values()) < BOUND, name


def test_exports_are_equal(results, expected):
    for layout in LAYOUTS:
        exported = exported_weights(results[2], layout)
        assert max(weight_differences(exported, expected[SAVED].weights)) < BOUND
