"""The scenarios of the tests with several ranks; importable in a spawned process.

Every scenario takes (rank, world, folder) and returns results that the test compares with one rank.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hone.algorithms.policy_losses import TABLE
from hone.algorithms.policy_losses.policy_loss import LOSS_AGG_MODES
from hone.config.actor import CriticConfig
from hone.config.engine import FSDPConfig, OptimConfig
from hone.controller.worker import free_port
from hone.engine.checkpoint import ModelMismatch
from hone.engine.engine import Engine
from hone.engine.offload import build_offload
from hone.models.lora import AdapterSettings, wrap_lora
from hone.models.policy import hidden_states
from hone.models.tiny import character_tokenizer
from hone.ops.rows import MicroBatchRule
from hone.protocol import DataProto
from hone.protocol.padding import split_padded
from hone.workers.actor import PolicyObjective
from hone.workers.critic import ValueObjective

from .batches import ROWS, pack_batch, rows
from .engines import ADAM, SGD, actor, critic, make_engine, policy, weights

ONE = MicroBatchRule(rows=1, tokens=0)
LORA: dict[str, Any] = {
    "rank": 4,
    "alpha": 8.0,
    "dropout": 0.0,
    "target_modules": "all-linear",
    "exclude_modules": None,
    "adapter_path": None,
}
CONTENTS = ("model", "optimizer", "extra")
BF16 = OptimConfig(lr=1e-4)
Scenario = Callable[[int, int, Path], Any]


def spawn(
    scenarios: Iterable[str] | Mapping[str, Scenario], world: int, folder: Path
) -> list[dict[str, Any]]:
    """Runs scenarios, or those of these names, on `world` ranks; returns each rank's results by name."""
    named = (
        dict(scenarios) if isinstance(scenarios, Mapping) else {n: SCENARIOS[n] for n in scenarios}
    )
    mp.spawn(_main, (world, free_port(), str(folder), named), nprocs=world, join=True)
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(world)]


def _main(rank: int, world: int, port: int, folder: str, scenarios: dict[str, Scenario]) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in variables.items()})
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    try:
        for name, scenario in scenarios.items():
            results[name] = scenario(rank, world, Path(folder))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the other ranks wait in a collective; the parent must see the failure
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def share(rank: int, world: int, batch: DataProto | None = None) -> DataProto:
    """Returns this rank's rows: contiguous, and not the same number on every rank."""
    batch = rows() if batch is None else batch
    bounds = [round(i * len(batch) / world) for i in range(world + 1)]
    return batch.select_idxs(list(range(bounds[rank], bounds[rank + 1])))


def laws() -> dict[str, Any]:
    """Returns the config of every loss and of every aggregation."""
    configs = {name: actor(name) for name in TABLE.names()}
    configs |= {mode: actor(loss_agg_mode=mode, use_kl_loss=True) for mode in LOSS_AGG_MODES}
    return configs


def update(
    engine: Engine, batch: DataProto, config: Any
) -> tuple[dict[str, float], dict[str, Any]]:
    objective = PolicyObjective(config, temperature=0.8)
    return engine.train_minibatch(batch, objective), weights(engine)


def law(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return {
        name: update(make_engine(policy(), rule=ONE, world_size=world), share(rank, world), config)
        for name, config in laws().items()
    }


def shapes(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Runs the same update under every sharding, offload and distribution of rows."""
    results = {}
    for name, fsdp in {
        "keep gathered": FSDPConfig(reshard_after_forward=False),
        "offload": FSDPConfig(offload_policy=True),
        "copies": FSDPConfig(fsdp_size=world // 2),
    }.items():
        engine = make_engine(policy(), rule=ONE, fsdp=fsdp, world_size=world)
        engine.infer(share(rank, world), temperature=0.8)  # must not leave parameters gathered
        results[name] = update(engine, share(rank, world), actor("kl_cov"))
    results["offloaded"] = update(
        offloaded(share(rank, world), world), share(rank, world), actor("kl_cov")
    )
    padded = split_padded(rows(), world)[rank]
    results["padded rows"] = update(
        make_engine(policy(), world_size=world), padded, actor("kl_cov")
    )
    alone = rows() if rank == 0 else rows().select_idxs([])
    results["rows on one rank"] = update(
        make_engine(policy(), rule=ONE, world_size=world), alone, actor("kl_cov")
    )
    recomputing = policy()
    recomputing.lm.gradient_checkpointing_enable({"use_reentrant": False})
    engine = make_engine(recomputing, rule=ONE, world_size=world)
    results["gradient checkpointing"] = update(engine, share(rank, world), actor("kl_cov"))
    engine = make_engine(policy(), rule=ONE, grad_clip=0.01, world_size=world)
    results["clipped"] = update(engine, share(rank, world), actor("kl_cov"))
    return results


def offloaded(batch: DataProto, world: int) -> Engine:
    """Returns an engine with offloaded shards; the CPU stands for the accelerator."""
    engine = make_engine(policy(), rule=ONE, world_size=world)
    offload = FSDPConfig(param_offload=True, optimizer_offload=True)
    engine.offload = build_offload(engine.module, engine.optimizer, offload, device_types=("cpu",))
    engine.offload.start()
    assert engine.offload.parameters is not None
    assert engine.offload.parameters.offloaded_bytes > 0
    with engine.lease():
        assert all(p.untyped_storage().nbytes() > 0 for p in engine.module.parameters())
    engine.infer(batch, temperature=0.8)
    return engine


def values(rank: int, world: int, folder: Path) -> Any:
    engine = make_engine(critic(), rule=ONE, world_size=world)
    config = CriticConfig(loss_agg_mode="token-mean", loss_scale_factor=None)
    metrics = engine.train_minibatch(share(rank, world), ValueObjective(config))
    return metrics, engine.infer(share(rank, world))["values"], weights(engine)


def infer(rank: int, world: int, folder: Path) -> Any:
    engine = make_engine(policy(), None, rule=ONE, world_size=world)
    return engine.infer(share(rank, world), temperature=0.7, with_entropy=True)


def decode(rank: int, world: int, folder: Path) -> Any:
    """Decodes with full parameters, a different number of steps on each rank, before any update."""
    model = policy()
    engine = make_engine(model, rule=ONE, world_size=world)
    packed = pack_batch(rows(), True)
    results = {}
    for name in ("first", "after an update"):
        with engine.lease(), torch.inference_mode():
            whole = all(type(p) is torch.nn.Parameter for p in model.parameters())
            for _ in range(1 + 3 * rank):
                logits = model.logits(hidden_states(model.decoder, packed))
        sharded = all(hasattr(p, "full_tensor") for p in model.parameters())
        results[name] = (whole, sharded, logits.clone())
        update(engine, share(rank, world), actor())
    return results


def not_finite(rank: int, world: int, folder: Path) -> Any:
    """One rank's gradient is infinite; every rank must skip the update."""
    engine = make_engine(policy(), world_size=world)
    before = weights(engine)
    batch = share(rank, world)
    if rank == world - 1:
        batch.batch["advantages"][1, 0] = float("inf")
    metrics, after = update(engine, batch, actor("reinforce"))
    unchanged = all(torch.equal(after[name], tensor) for name, tensor in before.items())
    return metrics["skipped_updates"], unchanged


def checkpoints(rank: int, world: int, folder: Path) -> Any:
    """Runs two updates, saves, and runs a third; then runs the third again from the checkpoint."""
    results: dict[str, Any] = {}
    for name, make, optim in (
        ("fp32", policy, ADAM),
        ("bf16", lambda: policy(dtype=torch.bfloat16), BF16),
        ("lora", lora_policy, ADAM),
    ):
        engine = make_engine(make(), optim, rule=ONE, world_size=world)
        for _ in range(2):
            update(engine, share(rank, world), actor())
            engine.optimizer.advance_schedule()
        saved = folder / f"{name}-{world}"
        engine.save(saved, CONTENTS)
        third = update(engine, share(rank, world), actor())
        resumed_engine = make_engine(make(), optim, rule=ONE, world_size=world)
        resumed_engine.load(saved)
        results[name] = (
            third,
            update(resumed_engine, share(rank, world), actor()),
            full_masters(engine),
        )
    return results


def load_from_one(rank: int, world: int, folder: Path) -> Any:
    """Continues a checkpoint that one rank saved."""
    results = {}
    for name, make, optim in (
        ("fp32", policy, ADAM),
        ("bf16", lambda: policy(dtype=torch.bfloat16), BF16),
    ):
        engine = make_engine(make(), optim, rule=ONE, world_size=world)
        engine.load(folder / f"{name}-1")
        results[name] = (full_masters(engine), update(engine, share(rank, world), actor()))
    return results


def load_another_model(rank: int, world: int, folder: Path) -> str:
    """Returns the error of loading a checkpoint of another model."""
    engine = make_engine(policy(family="llama"), ADAM, rule=ONE, world_size=world)
    try:
        engine.load(folder / "fp32-1")
    except ModelMismatch as error:
        return str(error)
    return "loaded"


def export(rank: int, world: int, folder: Path) -> None:
    for name, make in (("plain", policy), ("lora", lora_policy)):
        engine = make_engine(make(), SGD, world_size=world)
        update(engine, share(rank, world), actor())
        engine.export(folder / f"export-{name}", character_tokenizer())


def lora_policy(**changes: Any) -> Any:
    model = policy()
    torch.manual_seed(0)
    model.lm = wrap_lora(model.lm, AdapterSettings(**(LORA | changes)))
    return model


def full_masters(engine: Engine) -> dict[str, torch.Tensor]:
    assert engine.optimizer is not None
    return {
        name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()
        for name, x in engine.optimizer.masters.items()
    }


SCENARIOS: dict[str, Scenario] = {
    f.__name__: f
    for f in (
        law,
        shapes,
        values,
        infer,
        decode,
        not_finite,
        checkpoints,
        load_from_one,
        load_another_model,
        export,
    )
}
assert len(ROWS) % 2 == 1  # ranks must get different numbers of rows
