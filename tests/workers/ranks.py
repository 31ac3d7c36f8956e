"""One step after another on each rank of a sharded actor; importable in a spawned process."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hone.config import load_config
from hone.controller.worker import Placement, use_placement
from hone.protocol import DataProto
from hone.workers.actor_rollout_ref import ActorRolloutRefWorker
from hone.workers.process_reward_model import ProcessRewardModelWorker

from .tasks import RESPONSE, config_of, prompts


def weights(one: Any) -> dict[str, torch.Tensor]:
    return {n: x.clone() for n, x in one.actor.engine.named_hf_weights()}


def metrics_of(one: Any, batch: DataProto) -> dict[str, float]:
    return one.update_actor(batch).meta_info["metrics"]


def run_rank(rank: int, world: int, port: int, model: str, folder: str) -> None:
    place = Placement(rank, world, rank, world, "127.0.0.1", port)
    os.environ.update(place.environment())
    torch.set_num_threads(1)
    try:
        found = {
            name: walk(place, Path(model), Path(folder) / name, overrides)
            for name, overrides in TWO_RANK_RUNS.items()
        }
        torch.save(found, Path(folder) / f"rank{rank}.pt")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


def score_rank(rank: int, world: int, port: int, judge: str, folder: str) -> None:
    """Score this rank's rows of `folder/batch.pt` with a sharded process reward model."""
    place = Placement(rank, world, rank, world, "127.0.0.1", port)
    os.environ.update(place.environment())
    torch.set_num_threads(1)
    try:
        with use_placement(place):
            one = ProcessRewardModelWorker(load_config(judge_settings(judge)))
        one.init_model()
        sharded = sum(p.to_local().numel() for p in one.engine.module.parameters())
        whole = sum(p.numel() for p in one.engine.module.parameters())
        assert sharded < 0.6 * whole
        rows = torch.load(Path(folder) / "batch.pt", weights_only=False)[rank]
        scored = one.compute_rm_score(rows).batch
        torch.save(dict(scored.items()), Path(folder) / f"rank{rank}.pt")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


def judge_settings(judge: str) -> list[str]:
    return [
        "reward_model.enable=true",
        "reward_model.type=prm",
        f"reward_model.model.path={judge}",
        f"actor_rollout_ref.model.path={judge}",
        "trainer.device=cpu",
    ]


TWO_RANK_RUNS = {
    "whole": ["actor_rollout_ref.actor.optim.optimizer=SGD"],
    "lora": ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.optimizer=SGD"],
}


def walk(place: Placement, model: Path, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Generate, score with the reference, update, save: what one step asks of the worker."""
    with use_placement(place):
        one = ActorRolloutRefWorker(
            config_of(model, "actor_rollout_ref.actor.use_kl_loss=true", *overrides)
        )
    one.init_model()
    mine = prompts().chunk(place.world_size)[place.rank]
    mine.meta_info["sampling_params"] = {"temperature": 0.9}
    found: dict[str, Any] = {"tokens": [], "metrics": []}
    for _ in range(2):
        batch = one.generate_sequences(mine)
        found["tokens"] += [
            r[m.bool()].tolist()
            for r, m in zip(batch.batch["responses"], batch.batch["response_mask"], strict=True)
        ]
        whole = _advantages(batch, place)
        whole = whole.union(one.compute_ref_log_prob(whole))
        found["metrics"].append(metrics_of(one, whole))
    one.save_checkpoint(str(folder))
    found["weights"] = weights(one)
    one.close()
    return found


def _advantages(batch: DataProto, place: Placement) -> DataProto:
    """By row number over all ranks, so that every number of ranks sees the same."""
    start = place.rank * len(batch)
    random = torch.Generator().manual_seed(1)
    every = torch.randn(100, RESPONSE, generator=random)
    width = batch.batch["responses"].shape[1]
    batch.batch["advantages"] = every[start : start + len(batch), :width].contiguous()
    batch.meta_info["temperature"] = 0.9
    return batch
