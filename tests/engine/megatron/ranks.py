"""The scenarios of the tests of strategy=megatron; importable in a spawned process.

One process group runs all layouts of its size: megatron-core's groups are destroyed between two layouts.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.families.tiny import randomise, tiny_config
from hone.config.actor import CriticConfig
from hone.config.engine import FSDPConfig, MegatronConfig, OptimConfig
from hone.controller.worker import free_port
from hone.engine.build import build_strategy
from hone.engine.contract import EngineSpec, TrainEngine
from hone.engine.sharding import join_group
from hone.models.routing import NOT_RECORDED
from hone.models.tiny import character_tokenizer, tiny_lm
from hone.ops.rows import MicroBatchRule
from hone.protocol import DataProto
from hone.workers.actor import PolicyObjective
from hone.workers.critic import ValueObjective
from tests.engine.batches import WIDTH, rows
from tests.engine.engines import SGD, actor

ODD_VOCABULARY = 41
ADAM = OptimConfig(lr=1e-3)
CONTENTS = ("model", "optimizer", "extra")
OPTIONS: Any = {"temperature": 0.8, "with_entropy": True, "with_sum_pi_squared": True}


MIXTURES: dict[str, dict[str, Any]] = {
    "moe": {"norm_topk_prob": True},
    "mixed": {"num_hidden_layers": 4, "mlp_only_layers": [2], "norm_topk_prob": False},
}
"""Models of qwen3_moe; the second has a dense layer in its second half."""


class Case(NamedTuple):
    """A model on a layout; data-parallel slots are the other ranks."""

    family: str
    tensor: int = 1
    pipeline: int = 1
    head: str = "policy"
    tied: bool = True
    loss: str = "vanilla"
    sequence_parallel: bool = True
    checkpointing: bool = False
    dtype: torch.dtype = torch.float32
    grad_clip: float = 0.0
    expert: int = 1
    expert_tensor: int | None = None
    replays: bool = False
    overrides: tuple[tuple[str, Any], ...] = ()
    """Overrides of megatron-core's config."""

    @property
    def name(self) -> str:
        marks = [self.family, f"tp{self.tensor}", f"pp{self.pipeline}", self.head, self.loss]
        marks += ["untied"] * (not self.tied) + ["no-sp"] * (not self.sequence_parallel)
        marks += [f"ep{self.expert}"] * (self.expert > 1)
        marks += [f"etp{self.expert_tensor}"] * (self.expert_tensor is not None)
        marks += ["replay"] * self.replays
        marks += ["recompute"] * self.checkpointing + ["clipped"] * (self.grad_clip > 0)
        marks += [f"{name}={value}" for name, value in self.overrides]
        return "-".join(marks)


SELECTIVE = (
    ("recompute_granularity", "selective"),
    ("recompute_modules", ("core_attn", "mlp", "moe")),
)
UNEVEN = (("num_layers_in_first_pipeline_stage", 3),)
TWO = (
    Case("llama"),
    Case("llama", 2),
    Case("qwen2", 2, sequence_parallel=False, tied=False),
    Case("qwen3", 2, loss="kl_cov", grad_clip=0.1),
    Case("llama", 1, 2),
    Case("qwen2", 1, 2, head="value", overrides=SELECTIVE),
    Case("qwen3", 1, 2, tied=False, checkpointing=True),
    Case("moe", 2, tied=False, loss="kl_cov", overrides=SELECTIVE),
    Case("moe", 2, expert=2, expert_tensor=1, replays=True, checkpointing=True),
    Case("moe", expert=2, head="value"),
    Case("moe", expert_tensor=2, replays=True),
    Case("mixed", 1, 2, checkpointing=True, overrides=UNEVEN),
    Case("mixed", expert=2, grad_clip=0.1),
)
FOUR = (
    Case("llama", 2),
    Case("qwen3", 2, checkpointing=True, loss="kl_cov"),
    Case("qwen2", 2, 2),
    Case("llama", 2, 2, head="value"),
    Case("moe", 2, 2, grad_clip=0.1),
    Case("moe", 2, expert=2, replays=True),
    Case("mixed", 1, 2, expert=2),
)

RESUMED = {
    "dense": (
        Case("llama", 2, dtype=torch.bfloat16),
        Case("llama", 1, 2, dtype=torch.bfloat16),
    ),
    "experts": (Case("moe", expert=2), Case("moe", 2)),
    "experts in bfloat16": (
        Case("moe", expert=2, dtype=torch.bfloat16, replays=True),
        Case("moe", 2, dtype=torch.bfloat16, replays=True),
    ),
}
"""The layout that saves, and the one that resumes. bfloat16 also saves float32 masters; without replay it
would route tokens near a tie to other experts."""


def model_folder(folder: Path, case: Case) -> Path:
    return folder / f"{case.family}-{case.tied}"


def write_models(folder: Path, cases: Sequence[Case]) -> None:
    for case in cases:
        if not model_folder(folder, case).exists():
            tiny_model(case).save_pretrained(model_folder(folder, case))


def tiny_model(case: Case) -> PreTrainedModel:
    if case.family not in MIXTURES:
        family, tied = case.family, case.tied
        return tiny_lm(
            ODD_VOCABULARY, hidden=32, mlp=48, seed=1, family=family, tie_embeddings=tied
        )
    config = tiny_config("qwen3_moe", flipped=False)
    changes = {"vocab_size": ODD_VOCABULARY, "tie_word_embeddings": case.tied}
    for name, value in (changes | MIXTURES[case.family]).items():
        setattr(config, name, value)
    torch.manual_seed(1)
    lm = AutoModelForCausalLM.from_config(config)
    randomise(lm)
    return lm


def spec(
    case: Case, folder: Path, *, optim: OptimConfig | None = SGD, rank: int = 0, world: int = 1
) -> EngineSpec:
    return EngineSpec(
        head=case.head,  # type: ignore[arg-type]
        model_path=str(model_folder(folder, case)),
        device=torch.device("cpu"),
        dtype=case.dtype,
        fsdp=FSDPConfig(),
        train_micro_batch_rule=lambda slots: MicroBatchRule(rows=2, tokens=0),
        infer_micro_batch_rule=lambda slots: MicroBatchRule(rows=2, tokens=0),
        response_width=WIDTH,
        optim=optim,
        grad_clip=case.grad_clip,
        gradient_checkpointing=case.checkpointing,
        replays_routing=case.replays,
        rank=rank,
        world_size=world,
        megatron=MegatronConfig(
            tensor_model_parallel_size=case.tensor,
            pipeline_model_parallel_size=case.pipeline,
            sequence_parallel=case.sequence_parallel,
            expert_model_parallel_size=case.expert,
            expert_tensor_parallel_size=case.expert_tensor,
            override_transformer_config=dict(case.overrides),
        ),
    )


def objective(case: Case) -> Any:
    if case.head == "value":
        return ValueObjective(CriticConfig(loss_agg_mode="token-mean", loss_scale_factor=None))
    config = actor(case.loss, use_kl_loss=True, entropy_coeff=0.01)
    return PolicyObjective(config, temperature=0.8)


def share(engine: TrainEngine, case: Case) -> DataProto:
    """Returns the rows of this slot: contiguous, and not the same number in every slot."""
    batch, slots = rows(), engine.mesh.data_parallel_size
    if case.replays:
        batch.batch["routed_experts"] = other_experts(batch)
    bounds = [round(i * len(batch) / slots) for i in range(slots + 1)]
    slot = engine.mesh.data_parallel_rank
    return batch.select_idxs(list(range(bounds[slot], bounds[slot + 1])))


def other_experts(batch: DataProto) -> torch.Tensor:  # [B, P + T, layers, k]
    """Returns two random experts per token and layer, and NOT_RECORDED for some tokens."""
    generator = torch.Generator().manual_seed(7)
    size = *batch.batch["attention_mask"].shape, 2
    first = torch.randint(4, size, generator=generator)
    second = (first + torch.randint(1, 4, size, generator=generator)) % 4
    experts = torch.stack((first, second), -1).short()
    experts[:, ::5] = NOT_RECORDED
    return experts


def weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_hf_weights()}


def run_case(engine: TrainEngine, case: Case) -> dict[str, Any]:
    """Returns outputs, the results of one update, and the weights of the lease."""
    options = OPTIONS if case.head == "policy" else {}
    if case.replays:
        options = options | {"with_routing": True}
    batch = share(engine, case)
    results: dict[str, Any] = {"outputs": engine.infer(batch, **options)}
    results["metrics"] = engine.train_minibatch(batch, objective(case))
    results["weights"] = weights(engine)
    results["slot"] = (engine.mesh.data_parallel_rank, engine.mesh.is_collector)
    results["facts"] = engine.model_facts
    if case.head == "policy":
        with engine.lease() as lease:
            results["decodes"] = {n: p.clone() for n, p in lease.policy.lm.named_parameters()}
    return results


def spawn(cases: Sequence[Case], world: int, folder: Path) -> list[dict[str, Any]]:
    """Runs the cases on `world` ranks; returns each rank's results by name."""
    mp.spawn(_main, (world, free_port(), str(folder), list(cases)), nprocs=world, join=True)
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(world)]


def _main(rank: int, world: int, port: int, folder: str, cases: Sequence[Case]) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in variables.items()})
    torch.set_num_threads(1)
    try:
        results = _run(rank, world, Path(folder), cases)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the other ranks wait in a collective; the parent must see the failure
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _run(rank: int, world: int, folder: Path, cases: Sequence[Case]) -> dict[str, Any]:
    import tests.engine.megatron_on_cpu  # noqa: F401

    join_group(torch.device("cpu"))
    results = {}
    for case in cases:
        results[case.name] = run_case(build(case, folder, rank, world), case)
    if world == 2:
        results["resumed"] = resumed(rank, world, folder)
    return results


def build(case: Case, folder: Path, rank: int, world: int, **changes: Any) -> TrainEngine:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    return build_strategy("megatron", spec(case, folder, rank=rank, world=world, **changes))


def resumed(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Resumes, under another layout, two updates of one rank of FSDP2 and of one layout."""
    results: dict[str, Any] = {}
    for name, (first, second) in RESUMED.items():
        for source in ("fsdp2", "megatron"):
            engine = build(second, folder, rank, world, optim=ADAM)
            engine.load(folder / f"{source}-{name}")
            engine.save(folder / f"{source}-{name}-again", CONTENTS)
            results[f"{source}-{name}"] = (
                engine.train_minibatch(share(engine, second), objective(second)),
                weights(engine),
                engine.updates,
            )
            if source == "fsdp2":  # the next source is the checkpoint of the other layout
                engine = build(first, folder, rank, world, optim=ADAM)
                two_updates(engine, first)
                engine.save(folder / f"megatron-{name}", CONTENTS)
        engine.export(folder / f"export-{name}", character_tokenizer())
    return results


def two_updates(engine: TrainEngine, case: Case) -> None:
    for _ in range(2):
        engine.train_minibatch(share(engine, case), objective(case))
        engine.advance_schedule()


def one_rank(case: Case, folder: Path, **changes: Any) -> TrainEngine:
    """Returns the same model under FSDP2 on one rank, which the layouts must equal."""
    return build_strategy("fsdp2", spec(case, folder, **changes))
