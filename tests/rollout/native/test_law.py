"""2,000 seeded requests on two gloo processes get the tokens and log-probs of one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from hone.controller.worker import free_port

from .law_ranks import NEAR, REQUESTS, run_rank


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_say_what_one_says_and_an_exit_is_told(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    mp.spawn(run_rank, (2, free_port(), str(tmp_path)), nprocs=2)
    found = torch.load(tmp_path / "rank0.pt", weights_only=False)
    for core in ("slots", "pages"):
        record_property(core, found[core])
        assert found[core]["requests"] == REQUESTS
        assert all(margin < NEAR for margin in found[core]["margins"])
        assert len(found[core]["margins"]) < REQUESTS // 100
        assert found[core]["worst"] < 1e-5
    assert "another of 2 tensor-parallel ranks has gone" in found["exit"]
