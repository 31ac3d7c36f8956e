"""A run that lost a process starts again: on what is left, from the right checkpoint, so often."""

from __future__ import annotations

import os
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hone.config import ConfigError, PPOTrainerConfig
from hone.controller.failures import ClusterFailed, NodeLost, WorkerProcess
from hone.trainer.interrupt import SIGNAL_NAMES
from hone.trainer.ppo import restarts
from hone.verl.dialect import load_config

pytest.importorskip("ray")

from hone.controller import ray_placement, ray_start
from hone.controller.ray_placement import Node

WORKER = WorkerProcess(3, 4711, "10.0.0.7", "id", ())
LOST = NodeLost("id", "10.0.0.7", [("actor", WORKER, ["its last words"])], "actor", "step", "why")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cluster on paper: `cpus` are the free and all CPUs of its nodes, `lines` is what was printed."""
    cluster_ = SimpleNamespace(cpus=[(4, 4), (4, 4), (4, 4)], lines=[], now=0.0)

    def nodes() -> list[Node]:
        return [
            Node(f"n{number}", "10.0.0.1", {"CPU": free}, {"CPU": total})
            for number, (free, total) in enumerate(cluster_.cpus)
        ]

    monkeypatch.setattr(ray_placement, "reachable_nodes", nodes)
    monkeypatch.setattr(ray_start, "start_ray", lambda options, report: False)
    monkeypatch.setattr(restarts, "screen", lambda: SimpleNamespace(line=cluster_.lines.append))
    clock = SimpleNamespace(
        monotonic=lambda: cluster_.now, sleep=lambda s: setattr(cluster_, "now", cluster_.now + s)
    )
    monkeypatch.setattr(restarts, "time", clock)
    return cluster_


def config_of(folder: Path, *more: str) -> PPOTrainerConfig:
    shape = ["trainer.nnodes=3", "trainer.n_gpus_per_node=4", "data.train_batch_size=24"]
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=24"
    return load_config(
        [*shape, mini, "trainer.device=cpu", f"trainer.default_local_dir={folder}", *more]
    )


def attempts(config: PPOTrainerConfig, *events: Any) -> list[PPOTrainerConfig]:
    """The configs of the attempts; an event is what an attempt does: it raises, or calls and raises."""
    configs: list[PPOTrainerConfig] = []
    queue = list(events)

    for attempt in restarts.attempts(config):
        with attempt as current:
            configs.append(current)
            if queue:
                event = queue.pop(0)
                if callable(event):
                    event()
                    raise LOST
                raise event
    return configs


def test_a_run_restarts_on_the_nodes_that_are_left_and_on_all_when_they_are_back(
    cluster: Any, tmp_path: Path
) -> None:
    configs = attempts(
        config_of(tmp_path, "trainer.max_restarts=2"),
        lambda: cluster.cpus.pop(),
        lambda: cluster.cpus.append((4, 4)),
    )
    assert [attempt.trainer.nnodes for attempt in configs] == [3, 2, 3]
    message = str(LOST).partition("\n")[0] + f" (its log lines: {tmp_path / 'error.log'})"
    assert cluster.lines == [
        message,
        "restart 1 of 2: 2 of 3 nodes, 8 ranks",
        message,
        "restart 2 of 2: 3 of 3 nodes, 12 ranks",
    ]
    assert (tmp_path / "error.log").read_text().count("its last words") == 2


def test_the_last_failure_is_raised_and_other_errors_at_once(cluster: Any, tmp_path: Path) -> None:
    config = config_of(tmp_path, "trainer.max_restarts=1")
    last = ClusterFailed("it has ended", "actor", "step", "do x")
    with pytest.raises(ClusterFailed) as caught:
        attempts(config, LOST, last)
    assert caught.value is last
    with pytest.raises(KeyError):
        attempts(config, KeyError("x"))
    with pytest.raises(NodeLost):
        attempts(config_of(tmp_path), LOST)


def test_a_number_of_nodes_that_does_not_divide_the_batch_is_not_used(
    cluster: Any, tmp_path: Path
) -> None:
    odd = ["data.train_batch_size=9", "actor_rollout_ref.actor.ppo_mini_batch_size=9"]
    config = config_of(tmp_path, *odd, "trainer.n_gpus_per_node=1", "trainer.max_restarts=1")
    configs = attempts(config, lambda: cluster.cpus.pop())
    assert [attempt.trainer.nnodes for attempt in configs] == [3, 1]


def test_what_is_left_is_refused_in_one_sentence_if_no_pool_of_the_run_fits_on_it(
    cluster: Any, tmp_path: Path
) -> None:
    config = config_of(
        tmp_path,
        "trainer.max_restarts=1",
        "actor_rollout_ref.rollout.nnodes=3",
        "actor_rollout_ref.rollout.n_gpus_per_node=4",
    )
    cluster.cpus = [(4, 4)]
    with pytest.raises(
        ConfigError, match=r"cannot restart on the remaining nodes \(10.0.0.1 \(n0\): 4 of 4"
    ):
        attempts(config, LOST)


def test_a_run_without_a_reachable_node_is_refused_in_one_sentence(
    cluster: Any, tmp_path: Path
) -> None:
    cluster.cpus = []
    with pytest.raises(ConfigError, match=r"cannot restart on the remaining nodes \(\):"):
        attempts(config_of(tmp_path, "trainer.max_restarts=1"), LOST)


def test_a_rollout_pool_shrinks_after_the_trainer_pool(cluster: Any, tmp_path: Path) -> None:
    pool = ["actor_rollout_ref.rollout.nnodes=2", "actor_rollout_ref.rollout.n_gpus_per_node=4"]
    config = config_of(tmp_path, *pool, "trainer.nnodes=1", "trainer.max_restarts=1")
    configs = attempts(config, lambda: cluster.cpus.pop())
    assert [len(attempt.rollout_pool) for attempt in configs] == [2, 1]


def test_a_rollout_pool_shrinks_to_a_size_that_its_tensor_parallel_groups_divide(
    cluster: Any, tmp_path: Path
) -> None:
    rollout = "actor_rollout_ref.rollout"
    pool = [f"{rollout}.nnodes=4", f"{rollout}.n_gpus_per_node=1"]
    pairs = [f"{rollout}.tensor_model_parallel_size=2", "trainer.nnodes=1"]
    config = config_of(tmp_path, *pool, *pairs, "trainer.max_restarts=1")
    cluster.cpus = [(4, 4), (1, 1), (1, 1), (1, 1)]
    configs = attempts(config, LOST)
    assert [len(attempt.rollout_pool) for attempt in configs] == [4, 2]


def test_resources_of_the_lost_attempt_are_waited_for_and_those_of_another_run_not_for_long(
    cluster: Any, tmp_path: Path
) -> None:
    config = config_of(tmp_path, "trainer.max_restarts=1")
    cluster.cpus[2] = (0, 4)
    configs = attempts(config, LOST)
    assert [attempt.trainer.nnodes for attempt in configs] == [3, 2]
    assert cluster.now >= restarts.RELEASE_DEADLINE_S


def test_a_restart_does_not_go_on_from_an_older_checkpoint_of_an_earlier_run(
    cluster: Any, tmp_path: Path
) -> None:
    for step in (3, 7):
        (tmp_path / f"global_step_{step}").mkdir()
    config = config_of(
        tmp_path,
        "trainer.max_restarts=1",
        "trainer.resume_mode=resume_path",
        "trainer.resume_from_path=/elsewhere/global_step_5",
    )

    def begin() -> None:
        (tmp_path / "global_step_7").rename(tmp_path / "global_step_7.earlier")

    configs = attempts(config, begin)
    assert [attempt.trainer.resume_mode for attempt in configs] == ["resume_path", "resume_path"]


def test_a_run_that_was_asked_to_stop_does_not_restart(cluster: Any, tmp_path: Path) -> None:
    config = config_of(tmp_path, "trainer.max_restarts=5")

    def lose(number: int | None) -> None:
        with restarts.graceful_stop():
            if number is not None:
                os.kill(os.getpid(), number)
            raise copy(LOST)

    assert len(attempts(config, lambda: lose(None))) == 2
    for number in SIGNAL_NAMES:
        with pytest.raises(NodeLost):
            attempts(config, lambda number=number: lose(number))
    assert sum("restart 1 of 5" in line for line in cluster.lines) == 1


def test_a_restart_on_one_rank_stays_on_ray(cluster: Any, tmp_path: Path) -> None:
    config = config_of(tmp_path, "trainer.n_gpus_per_node=1", "trainer.max_restarts=1")
    cluster.cpus = [(1, 1)]
    configs = attempts(config, LOST)
    assert [attempt.world_size for attempt in configs] == [3, 1]
    assert [attempt.resolved_controller for attempt in configs] == ["ray", "ray"]


def test_a_restart_goes_on_from_what_this_run_saved_whatever_it_started_from(
    cluster: Any, tmp_path: Path
) -> None:
    (tmp_path / "global_step_7").mkdir()  # of an earlier run
    config = config_of(tmp_path, "trainer.max_restarts=2", "trainer.resume_mode=disable")

    def save() -> None:
        (tmp_path / "global_step_7").rename(tmp_path / "global_step_7.earlier")
        (tmp_path / "global_step_2").mkdir()

    configs = attempts(config, LOST, save)
    assert [attempt.trainer.resume_mode for attempt in configs] == ["disable", "disable", "auto"]


def test_a_run_that_finds_no_ray_any_more_ends_with_what_was_lost(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_ray(options: Any, report: Any) -> bool:
        raise ConnectionError("nothing answers there")

    monkeypatch.setattr(ray_start, "start_ray", start_ray)
    with pytest.raises(NodeLost, match=r"node 10\.0\.0\.7"):
        attempts(config_of(tmp_path, "trainer.max_restarts=5"), LOST)
