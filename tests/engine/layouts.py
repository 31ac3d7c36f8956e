"""Layouts of ranks, and the updates in which every layout must equal one rank.

One spawn of ranks runs the cases of all layouts of its size. A new engine or dimension adds its rows here;
`python -m benchmarks.parallel` writes the table of docs/parallel.md from the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks.families.tiny import randomise, tiny_config
from hone.config.actor import CriticConfig
from hone.config.engine import FSDPConfig, MegatronConfig
from hone.engine.build import build_strategy
from hone.engine.contract import EngineSpec, TrainEngine
from hone.engine.sharding import join_group
from hone.models.load import load_causal_lm
from hone.models.lora import AdapterSettings
from hone.models.policy import PolicyModel
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.ops.rows import MicroBatchRule, pack_rows
from hone.ops.ulysses import split_rows
from hone.protocol import DataProto, split_padded
from hone.workers.actor import PolicyObjective
from hone.workers.critic import ValueObjective
from hone.workers.objectives import StepObjective

from .batches import VOCABULARY, WIDTH, rows
from .engines import SGD, actor

BOUND = 1e-5
"""Relative difference of metrics, gradient norm and weights from those of one rank, in float32."""
CONTENTS = ("model", "optimizer", "extra")
MOMENTUM = replace(SGD, override_optimizer_config={"momentum": 0.9})
"""The first step is plain SGD; later ones depend on the momentum in the checkpoint."""


@dataclass(frozen=True)
class Layout:
    """A strategy and the sizes of its mesh."""

    strategy: str
    data: int = 1
    sequence: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        return self.data * self.sequence * self.tensor * self.pipeline

    def __str__(self) -> str:
        sizes = (self.data, self.sequence, self.tensor, self.pipeline)
        return f"{self.strategy} {'×'.join(map(str, sizes))}"


ONE = Layout("fsdp2")
LAYOUTS = [
    Layout("fsdp2", data=2),
    Layout("fsdp2", sequence=2),
    Layout("fsdp2", data=2, sequence=2),
    Layout("fsdp2", sequence=4),
    Layout("fsdp2", tensor=2),
    Layout("fsdp2", data=2, tensor=2),
    Layout("fsdp2", sequence=2, tensor=2),
    Layout("megatron", data=2),
    Layout("megatron", tensor=2),
    Layout("megatron", pipeline=2),
    Layout("megatron", data=2, tensor=2),
    Layout("megatron", tensor=2, pipeline=2),
]
if find_spec("megatron") is None:
    LAYOUTS = [layout for layout in LAYOUTS if layout.strategy != "megatron"]


@dataclass(frozen=True)
class Case:
    """One update of one model, after an inference."""

    objective: Callable[[], Any]
    head: str = "policy"
    model: str = "qwen2"
    changes: tuple[tuple[str, Any], ...] = ()
    """Fields of the EngineSpec."""
    sequence_only: bool = False
    """Whether it is skipped by layouts that split matrices."""
    fsdp_only: bool = False
    """Whether Megatron refuses it."""
    on_many_ranks: bool = False
    """Whether the tests also run it on more than 2 ranks; benchmarks/parallel.py runs all."""


def _policy(**changes: Any) -> Callable[[], Any]:
    return lambda: PolicyObjective(actor(**changes), temperature=0.8)


def _value() -> Any:
    return ValueObjective(CriticConfig(loss_agg_mode="token-mean", loss_scale_factor=None))


_LORA = AdapterSettings(4, 8.0, 0.0, "all-linear", None, None)
CASES = {
    "token-mean": Case(_policy(use_kl_loss=True), on_many_ranks=True),
    "seq-mean, clipped gradient": Case(
        _policy(loss_agg_mode="seq-mean-token-mean", entropy_coeff=0.1),
        changes=(("grad_clip", 0.1),),
    ),
    "batch statistics": Case(_policy(loss_mode="kl_cov")),
    "recomputed activations": Case(_policy(), changes=(("gradient_checkpointing", True),)),
    "LoRA": Case(_policy(), changes=(("adapters", _LORA),), fsdp_only=True),
    "critic": Case(_value, head="value", on_many_ranks=True),
    "process reward model": Case(StepObjective, head="step_scores", fsdp_only=True),
    "outcome reward model": Case(StepObjective, head="score", fsdp_only=True),
    "odd vocabulary": Case(_policy(entropy_coeff=0.1), model="odd"),
    "one key head, untied": Case(_policy(), model="llama", sequence_only=True, on_many_ranks=True),
}
SAVED = "token-mean"
"""The case whose checkpoint is saved and resumed."""
MODELS: dict[str, dict[str, Any]] = {
    "odd": {"family": "qwen3", "kv_heads": 2, "vocabulary": VOCABULARY + 1},
    "qwen2": {"family": "qwen2", "kv_heads": 2},
    "llama": {"family": "llama", "kv_heads": 1, "tie_embeddings": False},
}


def write_models(folder: Path) -> None:
    for name, shape in MODELS.items():
        lm = tiny_lm(**{"vocabulary": VOCABULARY, "hidden": 32, "mlp": 48, "seed": 1} | shape)
        save_pretrained(lm, character_tokenizer(), folder / name)


def cases_of(layout: Layout, *, every: bool = False) -> dict[str, Case]:
    """Returns the cases of a layout; without `every`, only some for more than 2 ranks."""
    splits_matrices = layout.tensor > 1 or layout.pipeline > 1
    return {
        name: case
        for name, case in CASES.items()
        if not (splits_matrices and case.sequence_only)
        and not (layout.strategy == "megatron" and case.fsdp_only)
        and (every or layout.ranks <= 2 or case.on_many_ranks)
    }


def build(layout: Layout, case: Case, folder: Path, rank: int, **changes: Any) -> TrainEngine:
    def rule(slots: int) -> MicroBatchRule:
        return MicroBatchRule(rows=3, tokens=0)

    settings: dict[str, Any] = {
        "head": case.head,
        "model_path": str(folder / case.model),
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "fsdp": FSDPConfig(),
        "train_micro_batch_rule": rule,
        "infer_micro_batch_rule": rule,
        "response_width": WIDTH,
        "optim": MOMENTUM,
        "rank": rank,
        "world_size": layout.ranks,
        "sequence_parallel": layout.sequence,
        "tensor_parallel": layout.tensor,
        "megatron": MegatronConfig(
            tensor_model_parallel_size=layout.tensor, pipeline_model_parallel_size=layout.pipeline
        ),
    }
    if layout.strategy == "megatron":
        _reset_megatron()
    return build_strategy(layout.strategy, EngineSpec(**settings | dict(case.changes) | changes))


def _reset_megatron() -> None:
    """Destroys megatron-core's groups, which another layout of this process may have created."""
    from megatron.core import parallel_state

    import tests.engine.megatron_on_cpu  # noqa: F401

    join_group(torch.device("cpu"))
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def slot_rows(engine: TrainEngine) -> DataProto:
    batch = rows()
    batch.batch["responses"][0, 1] = 0  # a policy may write the padding token
    batch.batch["labels"] = (batch.batch["advantages"] > 0).float()
    return split_padded(batch, engine.mesh.data_parallel_size)[engine.mesh.data_parallel_rank]


@dataclass(frozen=True)
class Update:
    """The results of one update of a case."""

    outputs: dict[str, torch.Tensor]
    """The outputs of this rank's slot, before the update."""
    metrics: dict[str, float]
    weights: dict[str, torch.Tensor]


def update(engine: TrainEngine, objective: Any) -> Update:
    batch = slot_rows(engine)
    outputs = engine.infer(batch, **objective.options)
    metrics = engine.train_minibatch(batch, objective)
    named = engine.named_hf_weights()
    return Update(outputs, metrics, {name: tensor.detach().clone() for name, tensor in named})


def run_cases(
    layouts: list[Layout], rank: int, world: int, folder: Path, *, every: bool = False
) -> dict[str, Any]:
    """Runs the cases of each layout, and saves a checkpoint of each layout."""
    results: dict[str, Any] = {}
    for layout in layouts:
        results[f"{layout} {SAVED}"] = save(layout, rank, world, folder)
        for name, case in cases_of(layout, every=every).items():
            if name != SAVED:
                engine = build(layout, case, folder, rank)
                results[f"{layout} {name}"] = update(engine, case.objective())
    return results


def save(layout: Layout, rank: int, world: int, folder: Path) -> Update:
    """Runs one update, then saves and exports."""
    case = CASES[SAVED]
    engine = build(layout, case, folder, rank)
    results = update(engine, case.objective())
    engine.save(folder / f"saved {layout}", CONTENTS)
    engine.export(folder / f"export {layout}", character_tokenizer())
    return results


def resume(
    pairs: list[tuple[Layout, Layout]], rank: int, world: int, folder: Path
) -> dict[str, Any]:
    """Loads the checkpoint of the first layout of each pair under the second, and runs one update."""
    results: dict[str, Any] = {}
    case = CASES[SAVED]
    for source, layout in pairs:
        engine = build(layout, case, folder, rank)
        engine.load(folder / f"saved {source}")
        results[f"{source} -> {layout}"] = update(engine, case.objective())
    return results


def exported_weights(folder: Path, layout: Layout) -> dict[str, torch.Tensor]:
    path = folder / f"export {layout}" / "huggingface"
    return dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())


def largest_difference(actual: Update, expected: Update) -> dict[str, float]:
    """Returns the largest relative difference of metrics, gradient norm and weights."""

    def relative_difference(a: float, b: float) -> float:
        return abs(a - b) / max(abs(b), 1e-2)

    assert set(actual.metrics) == set(expected.metrics)
    metrics = {n: relative_difference(actual.metrics[n], v) for n, v in expected.metrics.items()}
    norm = metrics.pop("grad_norm")
    weights = weight_differences(actual.weights, expected.weights)
    return {"metrics": max(metrics.values()), "grad_norm": norm, "weights": max(weights)}


def weight_differences(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> list[float]:
    assert set(actual) == set(expected)
    return [
        float((actual[n] - w).detach().norm() / w.norm().clamp(min=1e-2))
        for n, w in expected.items()
    ]


def write_families(names: list[str], folder: Path) -> None:
    for name in names:
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(tiny_config(name, flipped=False))
        randomise(lm)
        lm.save_pretrained(folder / f"family {name}")


def run_families(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Compares split rows with whole rows for every family in the folder."""
    join_group(torch.device("cpu"))
    folders = sorted(folder.glob("family *"))
    return {path.name: split_difference(path) for path in folders}


def split_difference(folder: Path) -> dict[str, float]:
    """Returns the largest difference of log-probs, and of gradients relative to the largest one."""
    policy = PolicyModel(load_causal_lm(str(folder), dtype=torch.float32))
    batch = rows().batch
    columns = [batch[n] for n in ("prompts", "responses", "attention_mask", "response_mask")]
    packed = pack_rows(*columns, share_prompts=True)
    group = dist.group.WORLD
    assert group is not None
    results = []
    for inputs in (packed, split_rows(packed, group)):
        policy.zero_grad()
        outputs = policy(inputs, temperature=0.9, with_entropy=True)
        weights = batch["advantages"] * batch["response_mask"]
        (outputs["log_probs"] * weights + outputs["entropy"] * weights).sum().backward()
        results.append((outputs["log_probs"].detach(), _gradients(policy)))
    (expected, gradients), (log_probs, partial_gradients) = results
    worst = 0.0
    scale = max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in gradients.items():
        total = partial_gradients[name]
        dist.all_reduce(total)
        worst = max(worst, float((total - gradient).abs().max()) / scale)
    return {"log_probs": float((log_probs - expected).abs().max()), "gradient": worst}


def _gradients(policy: PolicyModel) -> dict[str, torch.Tensor]:
    named = policy.named_parameters()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}
