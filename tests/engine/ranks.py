"""What each rank does in the tests of several ranks; importable in a spawned process.

Every scenario takes (rank, world, folder) and returns what the test compares with one rank.
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

from hone.algorithms.aggregation import MODES
from hone.algorithms.policy_losses import TABLE
from hone.config.actor import CriticConfig
from hone.config.engine import FSDPConfig, OptimConfig
from hone.controller.worker import free_port
from hone.engine.checkpoint import AnotherModel
from hone.engine.engine import Engine
from hone.engine.microbatch import MicroBatchRule
from hone.engine.offload import offload_of
from hone.models.lora import wrap_lora
from hone.models.policy import hidden_states
from hone.models.tiny import character_tokenizer
from hone.protocol import DataProto
from hone.protocol.padding import split_padded
from hone.workers.objectives import PolicyObjective, ValueObjective

from .batches import ROWS, packed_of, rows
from .engines import ADAM, SGD, actor, critic, engine, policy, weights

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
    """Run scenarios, or the ones named, on `world` ranks; returns each rank's results by scenario."""
    found = (
        dict(scenarios) if isinstance(scenarios, Mapping) else {n: SCENARIOS[n] for n in scenarios}
    )
    mp.spawn(_main, (world, free_port(), str(folder), found), nprocs=world, join=True)
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(world)]


def _main(rank: int, world: int, port: int, folder: str, scenarios: dict[str, Scenario]) -> None:
    place = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    try:
        for name, scenario in scenarios.items():
            results[name] = scenario(rank, world, Path(folder))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the others wait in a collective: end at once so that the parent sees it
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def share(rank: int, world: int, batch: DataProto | None = None) -> DataProto:
    """This rank's rows: contiguous, and not the same number on every rank."""
    whole = rows() if batch is None else batch
    cuts = [round(i * len(whole) / world) for i in range(world + 1)]
    return whole.select_idxs(list(range(cuts[rank], cuts[rank + 1])))


def laws() -> dict[str, Any]:
    """Every loss, and every aggregation, once."""
    plans = {name: actor(name) for name in TABLE.names()}
    plans |= {mode: actor(loss_agg_mode=mode, use_kl_loss=True) for mode in MODES}
    return plans


def update(made: Engine, batch: DataProto, config: Any) -> tuple[dict[str, float], dict[str, Any]]:
    objective = PolicyObjective(config, temperature=0.8)
    return made.train_minibatch(batch, objective), weights(made)


def law(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return {
        name: update(engine(policy(), rule=ONE, world_size=world), share(rank, world), config)
        for name, config in laws().items()
    }


def shapes(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """The same update under every way to hold the shards and hand out the rows."""
    found = {}
    for name, fsdp in {
        "keep gathered": FSDPConfig(reshard_after_forward=False),
        "offload": FSDPConfig(offload_policy=True),
        "copies": FSDPConfig(fsdp_size=world // 2),
    }.items():
        made = engine(policy(), rule=ONE, fsdp=fsdp, world_size=world)
        made.infer(share(rank, world), temperature=0.8)  # leaves nothing gathered behind
        found[name] = update(made, share(rank, world), actor("kl_cov"))
    found["resting"] = update(
        resting(share(rank, world), world), share(rank, world), actor("kl_cov")
    )
    padded = split_padded(rows(), world)[rank]
    found["padded rows"] = update(engine(policy(), world_size=world), padded, actor("kl_cov"))
    alone = rows() if rank == 0 else rows().select_idxs([])
    found["rows on one rank"] = update(
        engine(policy(), rule=ONE, world_size=world), alone, actor("kl_cov")
    )
    recomputing = policy()
    recomputing.lm.gradient_checkpointing_enable({"use_reentrant": False})
    made = engine(recomputing, rule=ONE, world_size=world)
    found["gradient checkpointing"] = update(made, share(rank, world), actor("kl_cov"))
    made = engine(policy(), rule=ONE, grad_clip=0.01, world_size=world)
    found["clipped"] = update(made, share(rank, world), actor("kl_cov"))
    return found


def resting(batch: DataProto, world: int) -> Engine:
    """Shards that lie on the host between calls; the CPU plays the accelerator."""
    made = engine(policy(), rule=ONE, world_size=world)
    asked = FSDPConfig(param_offload=True, optimizer_offload=True)
    made.offload = offload_of(made.module, made.optimizer, asked, devices=("cpu",))
    made.offload.start()
    assert made.offload.parameters is not None
    assert made.offload.parameters.bytes_resting > 0
    with made.lease():
        assert all(p.untyped_storage().nbytes() > 0 for p in made.module.parameters())
    made.infer(batch, temperature=0.8)
    return made


def values(rank: int, world: int, folder: Path) -> Any:
    made = engine(critic(), rule=ONE, world_size=world)
    config = CriticConfig(loss_agg_mode="token-mean", loss_scale_factor=None)
    metrics = made.train_minibatch(share(rank, world), ValueObjective(config))
    return metrics, made.infer(share(rank, world))["values"], weights(made)


def infer(rank: int, world: int, folder: Path) -> Any:
    made = engine(policy(), None, rule=ONE, world_size=world)
    return made.infer(share(rank, world), temperature=0.7, with_entropy=True)


def decode(rank: int, world: int, folder: Path) -> Any:
    """Ranks decode different numbers of steps with whole parameters, before any training forward."""
    model = policy()
    made = engine(model, rule=ONE, world_size=world)
    packed = packed_of(rows(), True)
    found = {}
    for name in ("first", "after an update"):
        with made.lease(), torch.inference_mode():
            whole = all(type(p) is torch.nn.Parameter for p in model.parameters())
            for _ in range(1 + 3 * rank):
                logits = model.logits(hidden_states(model.decoder, packed))
        sharded = all(hasattr(p, "full_tensor") for p in model.parameters())
        found[name] = (whole, sharded, logits.clone())
        update(made, share(rank, world), actor())
    return found


def not_finite(rank: int, world: int, folder: Path) -> Any:
    """One rank's gradient is broken; no rank may take the step."""
    made = engine(policy(), world_size=world)
    before = weights(made)
    batch = share(rank, world)
    if rank == world - 1:
        batch.batch["advantages"][1, 0] = float("inf")
    metrics, after = update(made, batch, actor("reinforce"))
    unchanged = all(torch.equal(after[name], tensor) for name, tensor in before.items())
    return metrics["skipped_updates"], unchanged


def checkpoints(rank: int, world: int, folder: Path) -> Any:
    """Two updates, save, a third; and the third again from the file."""
    found: dict[str, Any] = {}
    for name, make, optim in (
        ("fp32", policy, ADAM),
        ("bf16", lambda: policy(dtype=torch.bfloat16), BF16),
        ("lora", lora_policy, ADAM),
    ):
        made = engine(make(), optim, rule=ONE, world_size=world)
        for _ in range(2):
            update(made, share(rank, world), actor())
            made.optimizer.advance_schedule()
        saved = folder / f"{name}-{world}"
        made.save(saved, CONTENTS)
        third = update(made, share(rank, world), actor())
        again = engine(make(), optim, rule=ONE, world_size=world)
        again.load(saved)
        found[name] = (third, update(again, share(rank, world), actor()), whole_masters(made))
    return found


def load_from_one(rank: int, world: int, folder: Path) -> Any:
    """What one rank saved, continued here."""
    found = {}
    for name, make, optim in (
        ("fp32", policy, ADAM),
        ("bf16", lambda: policy(dtype=torch.bfloat16), BF16),
    ):
        made = engine(make(), optim, rule=ONE, world_size=world)
        made.load(folder / f"{name}-1")
        found[name] = (whole_masters(made), update(made, share(rank, world), actor()))
    return found


def load_another_model(rank: int, world: int, folder: Path) -> str:
    """What each rank says of a file that belongs to another model."""
    made = engine(policy(family="llama"), ADAM, rule=ONE, world_size=world)
    try:
        made.load(folder / "fp32-1")
    except AnotherModel as error:
        return str(error)
    return "loaded"


def export(rank: int, world: int, folder: Path) -> None:
    for name, make in (("plain", policy), ("lora", lora_policy)):
        made = engine(make(), SGD, world_size=world)
        update(made, share(rank, world), actor())
        made.export(folder / f"export-{name}", character_tokenizer())


def lora_policy(**changes: Any) -> Any:
    model = policy()
    torch.manual_seed(0)
    model.lm = wrap_lora(model.lm, **LORA | changes)
    return model


def whole_masters(made: Engine) -> dict[str, torch.Tensor]:
    assert made.optimizer is not None
    return {
        name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()
        for name, x in made.optimizer.masters.items()
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
