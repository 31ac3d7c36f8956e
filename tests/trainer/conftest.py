"""A tiny policy, a small task and a way to train in this process, made once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .runs import Run, Task, make_task


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """A random policy of two layers, 24 rows to train on and 6 held out."""
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def train(task: Task, tmp_path: Path) -> Callable[..., Run]:
    """`train(*overrides, folder=…)`: a run in this process, and what it left."""

    def go(*overrides: str, folder: str = "run", **kwargs: Any) -> Run:
        return Run(tmp_path / folder).train(task.overrides(tmp_path / folder, *overrides), **kwargs)

    return go


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One cluster for all runs of this folder: starting it costs seconds."""
    pytest.importorskip("ray")
    from hone.controller.ray_start import start_ray, stop_ray

    started = start_ray({"num_cpus": 4, "log_to_driver": False, "object_store_memory": 200_000_000})
    yield
    if started:
        stop_ray()
