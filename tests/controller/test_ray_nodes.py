"""Three raylets on this machine: pools over nodes, objects between them, a node that is lost in mid-run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.controller.raylets import Raylets
from tests.trainer.runs import Run, make_task, start

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64}
PROGRAM = """
import json, os, signal, sys, threading, time
import numpy as np
from toy_workers import Toy, memory_of
from hone.controller import ClassWithInitArgs, RayWorkerGroup, ResourcePool
from hone.controller.failures import NodeLost, WaitTimeout, WorkerDied, WorkerStopped
from hone.controller.ray_start import start_ray, stop_ray
address, raylets = sys.argv[1], json.loads(sys.argv[2])
start_ray({"address": address, "log_to_driver": False})
facts = {}
def group(counts, name="toy", deadline_s=600.0, liveness_deadline_s=20.0):
    pool = ResourcePool(counts, name_prefix=name + "_pool")
    cls_with_init = ClassWithInitArgs(Toy, 1.0)
    return RayWorkerGroup(
        pool, cls_with_init, name, deadline_s, liveness_deadline_s=liveness_deadline_s
    )
def nodes(group):
    return [process.node_id for process in group._executor._processes]
def error(kind, call, *args):
    started = time.monotonic()
    try:
        call(*args)
    except kind as caught:
        return caught, time.monotonic() - started
    sys.exit(f"no {kind.__name__}")

trained = group([1, 1, 1], "actor")
facts["nodes"], facts["places"] = nodes(trained), trained.whereabouts()
facts["reduced"] = trained.all_reduced(1.0)
values = np.arange(1_000_000.0)
memory, received = zip(*trained.memory_of(values))
facts["sent_to"], facts["received_in"] = memory, [memory_of(array) for array in received]
facts["sums"] = [float(array.sum() - values.sum()) for array in received]
reward = group([1, 1], "rm")
facts["reward_nodes"] = nodes(reward)
processes = [place["pid"] for place in [*facts["places"], *reward.whereabouts()]]
facts["apart"] = len(set(processes)) == 5
refused, facts["refused_after"] = error(WaitTimeout, group, [2], "late", 3.0)
facts["refused"] = str(refused)
facts["too_large"] = str(error(ValueError, group, [1] * 4, "wide")[0])
facts["died"] = str(error(WorkerDied, reward.die, 1, "exit")[0])
reward.shutdown()
victim = facts["nodes"][2]
strike = threading.Timer(4.0, os.kill, (raylets[victim], signal.SIGKILL))
strike.start()
lost, seconds = error(NodeLost, trained.reduce_for, 600.0)
facts |= {"victim": victim, "lost_id": lost.node_id, "lost": str(lost), "lost_after": seconds - 4.0}
trained.shutdown()
ends = time.monotonic() + 30
while (left := [p for p in facts["places"] if os.path.exists(f"/proc/{p['pid']}")]):
    if time.monotonic() > ends:
        break
    time.sleep(0.1)
facts["orphans"] = left

pair = group([1, 1], liveness_deadline_s=8.0)
facts["nodes_left"] = nodes(pair)
pair.hold_interpreter(9.0)
os.kill(pair.whereabouts()[1]["pid"], signal.SIGSTOP)
facts["stopped"] = str(error(WorkerStopped, pair.nap, 600.0)[0])
pair.shutdown()
stop_ray()
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    with Raylets([2, 2, 2], TOKEN) as made:
        yield made


@pytest.fixture(scope="module")
def facts(raylets: Raylets) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, raylets.address, json.dumps(raylets.nodes)],
        cwd=os.path.dirname(__file__),
        env={**os.environ, **raylets.environment},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    raylets.kill(found["victim"])
    return found


def test_a_pool_has_a_node_for_each_of_its_nodes_and_pools_have_processes_of_their_own(
    facts: Any, raylets: Raylets
) -> None:
    assert len(set(facts["nodes"])) == 3
    assert facts["nodes"][0] == raylets.head, "rank 0 is on the node of the trainer process"
    assert [place["local_rank"] for place in facts["places"]] == [0, 0, 0]
    assert [place["local_world_size"] for place in facts["places"]] == [1, 1, 1]
    assert facts["reduced"] == [6.0, 6.0, 6.0]
    assert facts["apart"]


def test_arrays_arrive_on_other_nodes_as_views_of_the_object_store(facts: Any) -> None:
    for memory in (*facts["sent_to"], *facts["received_in"]):
        assert memory.startswith("/dev/shm/plasma"), memory
    assert facts["sums"] == [0.0, 1_000_000.0, 2_000_000.0]


def test_a_pool_without_room_is_refused_in_time_with_what_is_free_where(
    facts: Any, raylets: Raylets
) -> None:
    assert facts["refused_after"] < 30.0
    assert "'late_pool' waited 3 s for Ray to reserve [2] processes" in facts["refused"]
    for node in facts["nodes"]:
        free = 0 if node in facts["reward_nodes"] else 1
        assert f"({node[:8]}): {free} of 2 CPUs, 0 of 0 GPUs and " in facts["refused"]
    assert facts["refused"].count("GiB memory") == 3
    assert "[1, 1, 1, 1] CPU processes) does not fit this Ray cluster: " in facts["too_large"]


def test_a_lost_node_is_named_in_time_with_ranks_roles_and_last_lines(facts: Any) -> None:
    assert facts["lost_id"] == facts["victim"]
    assert f"(id {facts['victim'][:12]}) was lost with rank 2 of 'actor', while " in facts["lost"]
    assert "last log lines of rank 2 of 'actor'" in facts["lost"]
    assert "| rank 2 reduces 6.0" in facts["lost"]
    assert facts["lost_after"] < 30.0
    assert facts["orphans"] == []
    assert set(facts["nodes_left"]) == {*facts["nodes"]} - {facts["victim"]}


def test_a_dead_and_a_stopped_worker_of_another_node_are_told_behind_a_token(facts: Any) -> None:
    assert "rank 1 of 'rm'" in facts["died"]
    assert "about to give up the ghost" in facts["died"]
    assert "rank 1 of 'toy'" in facts["stopped"]
    assert "has been stopped (SIGSTOP) for 8 s" in facts["stopped"]


def test_a_run_that_loses_a_node_goes_on_on_the_others_with_the_same_numbers(
    raylets: Raylets, tmp_path: Path
) -> None:
    while len(raylets.nodes) < 3:
        raylets.add(2)
    task = make_task(tmp_path)
    whole, run = Run(tmp_path / "whole"), Run(tmp_path / "run")
    shape = (
        "trainer.total_training_steps=8",
        "trainer.save_freq=2",
        "data.train_batch_size=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
        "actor_rollout_ref.actor.optim.optimizer=SGD",
        "actor_rollout_ref.actor.optim.lr=0.5",
    )
    nodes = (
        "trainer.nnodes=3",
        "trainer.max_restarts=1",
        f"ray_kwargs.ray_init.address={raylets.address}",
    )
    process = start(task.overrides(run.folder, *shape, *nodes), **raylets.environment)
    while not (run.folder / "global_step_4").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raylets.kill(next(node for node in raylets.nodes if node != raylets.head))
    whole.train(task.overrides(whole.folder, *shape))
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert output.count(" was lost with rank ") == 1, output
    assert "restart 1 of 1: 2 of 3 nodes, 2 ranks" in output
    assert [line["step"] for line in run.metrics] == list(range(1, 9))
    for step in range(1, 9):
        responses = [
            {row["trajectory_id"]: row["response_ids"] for row in each.rollouts(step)}
            for each in (whole, run)
        ]
        assert responses[0] == responses[1]
    for name in ("actor/grad_norm", "actor/pg_loss", "reward/mean"):
        assert run.series(name) == pytest.approx(whole.series(name), rel=1e-3, abs=1e-6)
