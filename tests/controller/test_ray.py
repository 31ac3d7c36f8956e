"""What only many processes can do wrong, and how it is reported; Ray ranks that work together."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_workers import Toy

from hone.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, register
from hone.controller.failures import WaitTimeout, WorkerDied, WorkerProcess
from hone.event_loop import PhaseDeadlines
from hone.protocol import DataProto, DataProtoFuture
from tests.controller.raylets import Raylets

pytestmark = pytest.mark.usefixtures("ray_cluster")
LONG = PhaseDeadlines(200.0, 1.0)


def make_group(ranks: int, cls: type = Toy, *args: Any, **options: Any) -> Any:
    from hone.controller.ray import RayWorkerGroup

    cls_with_init = ClassWithInitArgs(cls, *(args or (2.0,)))
    given = {"name_prefix": "toy", "start_deadline_s": 250.0, "deadlines": LONG, **options}
    given.setdefault("resource_pool", ResourcePool([ranks]))
    return RayWorkerGroup(ray_cls_with_init=cls_with_init, **given)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_dead_worker_is_named_with_its_last_words_while_its_peers_still_work(how: str) -> None:
    # Rank 0 sleeps beyond the deadline: waiting for it first would pass that, and be another error.
    group = make_group(2, name_prefix="critic")
    with pytest.raises(WorkerDied) as caught:
        group.die(1, how)
    message = str(caught.value)
    assert "rank 1 of 'critic'" in message
    assert "during 'die'" in message
    assert "about to give up the ghost" in message
    assert (caught.value.process.rank, caught.value.role) == (1, "critic")
    with pytest.raises(WorkerDied, match="rank 1"):
        group.echo(1)
    group.shutdown()


@pytest.mark.slow
def test_a_worker_killed_from_outside_while_working_is_reported() -> None:
    with make_group(1) as group:
        pid = group.whereabouts()[0]["pid"]
        killer = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(WorkerDied, match=r"rank 0 of 'toy'.*during 'nap'"):
            group.nap(600)
        killer.join()


@pytest.mark.slow
def test_a_wait_beyond_its_deadline_says_who_waited_for_whom() -> None:
    with make_group(1, deadlines=PhaseDeadlines(1.0, 1.0)) as group:
        with pytest.raises(WaitTimeout, match=r"'toy' waited 1 s for 'nap' on rank 0 \(pid \d+ on"):
            group.nap(600)


@pytest.mark.slow
def test_a_death_seen_by_another_group_reaches_the_loop() -> None:
    pool = ResourcePool([1])
    first = make_group(1, name_prefix="first", resource_pool=pool)
    second = make_group(1, name_prefix="second", resource_pool=pool)
    future = first.execute_all_async("die", 0, "exit")
    lost = DataProtoFuture(_first, future.futures, resolve=future.resolve)
    with pytest.raises(WorkerDied, match="rank 0 of 'first'"):
        second.scale(lost)
    first.shutdown()
    second.shutdown()


def _first(results: list[Any]) -> Any:
    return results[0]


class Slow(Worker):
    def __init__(self, gate: Path) -> None:
        self.gate = gate

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def produce(self, data: DataProto) -> DataProto:
        while not self.gate.exists():
            time.sleep(0.01)
        return DataProto.from_dict(
            {"x": data.batch["x"] + 1}, {"uid": data.non_tensor_batch["uid"]}
        )


@pytest.mark.slow
def test_futures_stay_lazy_between_groups_of_different_size(tmp_path: Path) -> None:
    import ray

    pool, gate = ResourcePool([2]), tmp_path / "gate"
    producer = _slow_group(pool, gate)
    consumer = make_group(2, resource_pool=pool)
    data = DataProto.from_dict({"x": torch.arange(5.0)}, {"uid": list("abcde")})
    future = producer.produce(data)
    ready, _ = ray.wait(future.futures, num_returns=2, timeout=0)
    assert not ready, "the call returned before its workers were done"
    gate.touch()
    result = consumer.scale(future)
    assert result.batch["y"].tolist() == [2, 4, 6, 8, 10]
    assert list(result.non_tensor_batch["uid"]) == list("abcde")
    assert sum(result.meta_info["metrics"]["rows"]) == 5
    producer.shutdown()
    assert consumer.zero_echo(1) == (0, 1), "groups on one pool are shut down one by one"
    consumer.shutdown()


def _slow_group(pool: ResourcePool, gate: Path) -> Any:
    from hone.controller.ray import RayClassWithInitArgs, RayWorkerGroup

    return RayWorkerGroup(
        pool, RayClassWithInitArgs(Slow, gate), start_deadline_s=250, deadlines=LONG
    )


@pytest.mark.slow
def test_shutdown_gives_the_processes_and_the_reservation_back() -> None:
    import ray

    pool = ResourcePool([2])
    group = make_group(2, resource_pool=pool)
    pids = [place["pid"] for place in group.whereabouts()]
    group.shutdown()
    group.shutdown()
    _until(lambda: not any(_alive(pid) for pid in pids), "the workers' processes end")
    _until(lambda: ray.available_resources().get("CPU") == 4.0, "the slots are free")


@pytest.mark.slow
def test_a_failed_start_gives_the_reservation_back() -> None:
    import ray

    with pytest.raises(TypeError):
        make_group(1, Toy, 1.0, 2.0, 3.0)
    _until(lambda: ray.available_resources().get("CPU") == 4.0, "the slots are free")


def test_a_pool_larger_than_the_cluster_is_refused_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"\[64\].*does not fit.*: \S+ \(\w{8}\): \S+ of 4 CPUs, 0"
    ):
        make_group(64)


def test_variables_that_the_controller_sets_are_refused_from_the_user() -> None:
    with pytest.raises(ValueError, match="sets WORLD_SIZE, which the controller sets"):
        make_group(1, worker_env={"WORLD_SIZE": "100", "MINE": "1"})


def test_values_are_put_in_order() -> None:
    import ray

    from hone.controller.ray import parallel_put

    assert ray.get(parallel_put([1, "a", {"b": 2}], max_workers=2)) == [1, "a", {"b": 2}]
    with pytest.raises(AssertionError, match="empty list"):
        parallel_put([])


@pytest.mark.slow
def test_a_pool_that_is_shared_too_often_is_refused() -> None:
    pool = ResourcePool([1], max_colocate_count=1)
    with make_group(1, resource_pool=pool):
        with pytest.raises(ValueError, match="already shared by 1 worker groups"):
            make_group(1, resource_pool=pool)


@pytest.mark.slow
def test_occupied_slots_are_waited_for_with_a_deadline(caplog: pytest.LogCaptureFixture) -> None:
    with make_group(3), caplog.at_level(logging.WARNING):
        with pytest.raises(WaitTimeout, match=r"'pool' waited 2 s for Ray to reserve \[2\]"):
            make_group(2, start_deadline_s=2.0)
    assert "waits for resources" in caplog.text


def test_a_class_that_went_through_ray_remote_is_accepted() -> None:
    import ray

    from hone.controller.ray import RayClassWithInitArgs

    assert RayClassWithInitArgs(ray.remote(Toy), 1.0).cls.__name__ == "Toy"


@pytest.mark.slow
def test_what_a_worker_receives_may_be_changed_in_place() -> None:
    def double(worker: Any, data: DataProto) -> DataProto:
        data.batch["x"].mul_(2)
        return data

    data = DataProto.from_dict({"x": torch.ones(1000, 300)})
    with make_group(1) as group:
        assert float(group.execute_with_func_generator(double, data).batch["x"].sum()) == 600_000.0
    assert float(data.batch["x"].sum()) == 300_000.0


JOIN = """
import sys
from toy_workers import Toy
from hone.controller import ClassWithInitArgs, RayWorkerGroup
from hone.controller.ray_start import start_ray, stop_ray
start_ray({"address": sys.argv[1], "log_to_driver": False})
with RayWorkerGroup(ray_cls_with_init=ClassWithInitArgs(Toy, 1.0)) as group:
    assert group.echo(5) == [(0, 5, None)]
stop_ray()
"""


@pytest.mark.slow
def test_a_cluster_without_authentication_is_joined() -> None:
    with Raylets([1]) as raylets:
        _run(JOIN, raylets.environment, raylets.address)


def _run(program: str, environment: dict[str, str], *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=os.path.dirname(__file__),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_failures_survive_pickling() -> None:
    died = WorkerDied("actor", WorkerProcess(3, 7, "host", "n", ("/log",)), "step", "why", ["last"])
    late = WaitTimeout("critic", "x", 2.0, "do y")
    for error in (died, late):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert pickle.loads(pickle.dumps(died)).process.rank == 3


class TwoPartError(Exception):
    """Pickle calls `__init__` with one argument, and fails."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(f"{part}: {reason}")


def test_an_error_that_cannot_be_unpickled_is_one_of_the_worker_and_no_death() -> None:
    from hone.controller.ray import picklable_errors

    with pytest.raises(RuntimeError, match="TwoPartError: parser: no answer"), picklable_errors():
        raise TwoPartError("parser", "no answer")
    with pytest.raises(KeyError, match="plain"), picklable_errors():
        raise KeyError("plain")


class Talker(Worker):
    def __init__(self, _: float) -> None: ...

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, value: Any = None) -> None:
        raise TwoPartError("parser", "no answer")


@pytest.mark.slow
def test_what_cannot_be_sent_is_named_and_the_worker_lives_on() -> None:
    group = make_group(1, Talker)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="TwoPartError: parser: no answer"):
            group.fail()
    with pytest.raises(
        TypeError, match=r"argument 'value' of toy\.fail cannot be sent .*'_thread\.lock'"
    ):
        group.fail(value=threading.Lock())
    group.shutdown()


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _until(condition: Any, what: str) -> None:
    ends = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < ends, f"waited 120 s, and not: {what}"
        time.sleep(0.1)


@pytest.mark.slow
def test_verls_reward_task_scores_in_another_process() -> None:
    import ray

    from hone.verl.reward import compute_reward_async

    def reward_fn(data: DataProto, return_dict: bool) -> dict[str, Any]:
        assert return_dict
        return {"reward_tensor": data.batch["x"] * 2, "reward_extra_info": {"pid": [os.getpid()]}}

    batch = DataProto.from_dict({"x": torch.ones(1, 2)})
    rewards, extras = ray.get(compute_reward_async.remote(data=batch, reward_fn=reward_fn))
    assert rewards.tolist() == [[2.0, 2.0]]
    assert extras["pid"] != [os.getpid()]
    with pytest.raises(ray.exceptions.RayTaskError, match="needs reward_fn, or config"):
        ray.get(compute_reward_async.remote(batch))
