"""One Ray cluster for all tests of the controller: starting it costs seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    pytest.importorskip("ray")
    from hone.controller.ray_start import start_ray, stop_ray

    # Four slots on whatever cores there are: two groups of two ranks may live at a time.
    started = start_ray({"num_cpus": 4, "log_to_driver": False, "object_store_memory": 200_000_000})
    yield
    if started:
        stop_ray()
