"""The steps of each rank of sharded workers; importable in a spawned process."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hone.controller.worker import Placement, use_placement
from hone.protocol import DataProto
from hone.verl.actor_rollout_ref import ActorRolloutRefWorker
from hone.verl.dialect import load_config
from hone.workers.process_reward_model import ProcessRewardModelWorker

from .tasks import RESPONSE, config_of, prompts


def weights(worker: Any) -> dict[str, torch.Tensor]:
    return {n: x.clone() for n, x in worker.actor.engine.named_hf_weights()}


def metrics_of(worker: Any, batch: DataProto) -> dict[str, float]:
    return worker.update_actor(batch).meta_info["metrics"]


def run_rank(rank: int, world: int, port: int, model: str, folder: str) -> None:
    place = Placement(rank, world, rank, world, "127.0.0.1", port)
    os.environ.update(place.environment())
    torch.set_num_threads(1)
    try:
        results = {
            name: run_steps(place, Path(model), Path(folder) / name, overrides)
            for name, overrides in TWO_RANK_RUNS.items()
        }
        torch.save(results, Path(folder) / f"rank{rank}.pt")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


def score_rank(rank: int, world: int, port: int, prm: str, folder: str) -> None:
    """Scores this rank's rows of `folder/batch.pt` with a sharded process reward model."""
    place = Placement(rank, world, rank, world, "127.0.0.1", port)
    os.environ.update(place.environment())
    torch.set_num_threads(1)
    try:
        with use_placement(place):
            worker = ProcessRewardModelWorker(load_config(prm_settings(prm)))
        worker.init_model()
        sharded = sum(p.to_local().numel() for p in worker.engine.module.parameters())
        full = sum(p.numel() for p in worker.engine.module.parameters())
        assert sharded < 0.6 * full
        rows = torch.load(Path(folder) / "batch.pt", weights_only=False)[rank]
        scored = worker.compute_rm_score(rows).batch
        torch.save(dict(scored.items()), Path(folder) / f"rank{rank}.pt")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


def prm_settings(prm: str) -> list[str]:
    return [
        "reward_model.enable=true",
        "reward_model.type=prm",
        f"reward_model.model.path={prm}",
        f"actor_rollout_ref.model.path={prm}",
        "trainer.device=cpu",
    ]


TWO_RANK_RUNS = {
    "whole": ["actor_rollout_ref.actor.optim.optimizer=SGD"],
    "lora": ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.optimizer=SGD"],
}


def run_steps(place: Placement, model: Path, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Runs two steps (generate, reference log-probs, update) and saves a checkpoint."""
    with use_placement(place):
        worker = ActorRolloutRefWorker(
            config_of(model, "actor_rollout_ref.actor.use_kl_loss=true", *overrides)
        )
    worker.init_model()
    own_prompts = prompts().chunk(place.world_size)[place.rank]
    own_prompts.meta_info["sampling_params"] = {"temperature": 0.9}
    results: dict[str, Any] = {"tokens": [], "metrics": []}
    for _ in range(2):
        batch = worker.generate_sequences(own_prompts)
        results["tokens"] += [
            r[m.bool()].tolist()
            for r, m in zip(batch.batch["responses"], batch.batch["response_mask"], strict=True)
        ]
        batch = _with_advantages(batch, place)
        batch = batch.union(worker.compute_ref_log_prob(batch))
        results["metrics"].append(metrics_of(worker, batch))
    worker.save_checkpoint(str(folder))
    results["weights"] = weights(worker)
    worker.close()
    return results


def _with_advantages(batch: DataProto, place: Placement) -> DataProto:
    """Adds advantages by row number over all ranks, so that they do not depend on the world size."""
    start = place.rank * len(batch)
    random = torch.Generator().manual_seed(1)
    all_rows = torch.randn(100, RESPONSE, generator=random)
    width = batch.batch["responses"].shape[1]
    batch.batch["advantages"] = all_rows[start : start + len(batch), :width].contiguous()
    batch.meta_info["temperature"] = 0.9
    return batch
