"""What is shown while Ray starts and ranks load their models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from hone.controller import LocalWorkerGroup, Role, WorkerGroup
from hone.controller.progress import report_progress
from hone.tracking.console import Bar
from hone.trainer.ppo import roles
from hone.trainer.ppo.plan import Plan
from hone.verl.dialect import load_config


class Group:
    """A worker group of two ranks that answer one after the other."""

    world_size = 2

    def __init__(self, **_: Any) -> None:
        report_progress(1, 2)

    def init_model(self) -> None:
        report_progress(1, 2)
        report_progress(2, 2)

    def spawn(self, prefix_set: Any) -> dict[str, Group]:
        return dict.fromkeys(prefix_set, self)

    def shutdown(self) -> None:
        pass


@pytest.fixture
def bar_descriptions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The bars that were opened, and how they moved."""
    descriptions: list[str] = []

    @contextmanager
    def progress(description: str, total: float | None = None) -> Iterator[Any]:
        bar = Bar(description)
        bar._report = lambda bar: descriptions.append(f"{description} {bar.done:g}/{bar.total:g}")
        yield bar

    monkeypatch.setattr(roles, "progress", progress)
    return descriptions


def test_ranks_that_have_their_model_are_counted(bar_descriptions: list[str]) -> None:
    roles.load_models({Role.ActorRollout: Group(), Role.Critic: Group()})  # type: ignore[dict-item]
    assert bar_descriptions == [
        "load the model of actor_rollout, ranks 1/2",
        "load the model of actor_rollout, ranks 2/2",
        "load the model of critic, ranks 1/2",
        "load the model of critic, ranks 2/2",
    ]


def test_the_start_of_ray_and_of_the_processes_is_said(
    bar_descriptions: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray_start = pytest.importorskip("hone.controller.ray_start")
    monkeypatch.setattr(ray_start, "start_ray", lambda options, report: report("starting Ray"))
    monkeypatch.setattr("hone.controller.ray_placement.check_pools_fit", lambda pools: None)
    config = load_config(["trainer.n_gpus_per_node=2", "trainer.device=cpu"])
    workers: Any = {Role.ActorRollout: LocalWorkerGroup}
    pools = roles.default_pools(config, workers)
    group: type[WorkerGroup] = Group  # type: ignore[assignment]
    with ExitStack() as running:
        roles.start_workers(config, workers, pools, group, running)
    assert capsys.readouterr().out.splitlines() == [
        "starting Ray",
        "starting 2 worker processes (actor_rollout)",
    ]
    assert bar_descriptions == ["start 2 worker processes (actor_rollout) 1/2"]


def test_a_reward_model_may_have_a_pool_of_its_own() -> None:
    judged = ["reward_model.enable=true", "reward_model.model.path=m", "trainer.device=cpu"]
    overrides = [*judged, "reward_model.enable_resource_pool=true", "reward_model.n_gpus_per_node=2",
           "reward_model.nnodes=3"]  # fmt: skip
    for settings, pool in ((judged, [1]), (overrides, [2, 2, 2])):
        config = load_config(settings)
        needed = roles.default_roles(Plan.of(config), lora=False)
        pools = roles.default_pools(config, needed)
        assert pools.resource_pool_spec[pools.mapping[Role.RewardModel]] == pool
        assert pools.mapping[Role.Actor] == "global_pool"
        assert config.resolved_controller == ("ray" if settings is overrides else "local")
    server_config = load_config([*overrides, "reward_model.server.url=http://127.0.0.1:80"])
    assert server_config.resolved_controller == "local"
    assert Role.RewardModel not in roles.default_roles(Plan.of(server_config), lora=False)
