"""The engine over ranks: what is refused before loading, and 2,000 seeded requests on two processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from hone.controller.worker import free_port
from hone.models.families import UnsupportedModel
from hone.rollout.contract import RolloutError
from hone.rollout.native.sharded_build import check_sharding
from tests.workers.tasks import config_of, write_model

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
    assert "another of 2 tensor-parallel ranks has exited" in found["exit"]


def test_what_ranks_cannot_share_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    config = config_of(model).actor_rollout_ref.model
    check_sharding(2, 4, config)
    with pytest.raises(RolloutError, match="=3 does not divide the 4 rollout rank"):
        check_sharding(3, 4, config)
    with pytest.raises(UnsupportedModel, match="has 4 attention heads"):
        check_sharding(3, 3, config)
