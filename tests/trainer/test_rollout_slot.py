"""GRPO on Ray where two ranks decode with one sharded model, beside the same run on one rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import pytest

from .runs import Run, Task
from .test_ray_runs import SGD, TWO_RANKS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

SHARDED = (*TWO_RANKS, "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
STEPS = "trainer.total_training_steps=4"
METRICS = ("actor/pg_loss", "actor/grad_norm", "critic/rewards/mean", "response_length/mean")


def first_difference(one: Run, two: Run) -> tuple[int, str, int] | None:
    """Step, trajectory and position of the first token that differs."""
    for step in range(1, len(one.metrics) + 1):
        rows: list[dict[str, Any]] = [
            {row["trajectory_id"]: row["response_ids"] for row in run.rollouts(step)}
            for run in (one, two)
        ]
        assert rows[0].keys() == rows[1].keys()
        for name, ids in rows[0].items():
            if ids != rows[1][name]:
                same = takewhile(
                    lambda pair: pair[0] == pair[1], zip(ids, rows[1][name], strict=False)
                )
                return step, name, len(list(same))
    return None


@pytest.mark.timeout(900)
def test_a_sharded_rollout_trains_as_one_rank_does_and_resumes(
    train: Callable[..., Run], record_property: Callable[[str, object], None]
) -> None:
    shared = [*SGD, "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.rollout.n=3"]
    one = train(*shared, STEPS, folder="one")
    two = train(*shared, STEPS, *SHARDED, folder="two")
    difference = first_difference(one, two)
    record_property("first differing token", difference)
    same = len(one.metrics) if difference is None else difference[0] - 1
    assert same >= 1, f"the first step differs: {difference}"
    for step in range(same):
        for metric in METRICS:
            value = pytest.approx(one.numbers[step][metric], rel=1e-4, abs=1e-6)
            assert two.numbers[step][metric] == value, metric
    begun = train(
        *shared, *SHARDED, "trainer.total_training_steps=2", "trainer.save_freq=2", folder="again"
    )
    assert len(begun.metrics) == 2
    resumed = train(*shared, *SHARDED, STEPS, folder="again")
    for metric in METRICS:
        assert resumed.numbers[-1][metric] == two.numbers[-1][metric]
    assert resumed.rollouts(4) == two.rollouts(4)


LAYOUTS = {
    "a pool of its own, with LoRA": [
        "trainer.controller=ray",
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "actor_rollout_ref.model.lora_rank=4",
    ],
    "a tensor parallel actor": [
        *TWO_RANKS,
        "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2",
    ],
    "a sequence parallel actor": [
        *TWO_RANKS,
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
    ],
    "a Megatron actor of two stages": [
        *TWO_RANKS,
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
        "actor_rollout_ref.model.external_lib=tests.engine.megatron_on_cpu",
    ],
}


@pytest.fixture(scope="module")
def alone(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("alone")
    return Run(folder).train(task.overrides(folder, *SGD))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sharded_rollout_takes_weights_of_any_layout(
    train: Callable[..., Run], alone: Run, layout: str
) -> None:
    """Both steps: the second decodes with the weights of the first update."""
    if "Megatron" in layout:
        pytest.importorskip("megatron.core")
    model = [key for key in LAYOUTS[layout] if "lora" in key]
    one = train(*SGD, *model, folder="one") if model else alone
    size = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    two = train(*SGD, *LAYOUTS[layout], size, folder="two")
    assert first_difference(one, two) is None
    for metric in METRICS:
        value = pytest.approx(one.numbers[-1][metric], rel=1e-3, abs=1e-6)
        assert two.numbers[-1][metric] == value, metric
