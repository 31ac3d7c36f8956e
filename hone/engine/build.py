"""Builds the engine of `strategy`, which is a built-in name, `pkg.mod:Class` or `file.py:Class`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from hone.config.engine import FSDPConfig, OptimConfig
from hone.engine.contract import EngineSpec, Mesh, TrainEngine
from hone.engine.engine import Engine
from hone.engine.offload import build_offload
from hone.engine.optimizer import Optimizer
from hone.models.decoder_layer import compile_layers, fuse
from hone.models.load import LoadOptions, load_causal_lm, load_classifier, load_step_classifier
from hone.models.lora import init_lora
from hone.models.policy import Model, PolicyModel, ScoreModel, ValueModel
from hone.ops.rows import MicroBatchRule
from hone.plugins import PluginError, Table

log = logging.getLogger(__name__)

STRATEGIES: Table[Callable[[EngineSpec], TrainEngine]] = Table(
    "training engine",
    {
        "fsdp": "hone.engine.build:build",
        "fsdp2": "hone.engine.build:build",
        "megatron": "hone.engine.megatron.engine:build",
    },
)
LABELS = {"step_scores": ("bad", "good"), "score": ("reward",)}
"""The labels of a classifier by head: step_scores (process reward model), score (outcome reward model)."""
_ENGINE_MEMBERS = sorted(name for name in vars(TrainEngine) if not name.startswith("_"))


def build_strategy(name: str, spec: EngineSpec) -> TrainEngine:
    """Builds the engine that `strategy` names and checks that it implements TrainEngine."""
    engine = STRATEGIES.get(name)(spec)
    if missing := [member for member in _ENGINE_MEMBERS if not hasattr(engine, member)]:
        raise PluginError(
            f"strategy={name} built a {type(engine).__name__} without {', '.join(missing)}; an engine must "
            "have every member of hone.engine.contract.TrainEngine"
        )
    mesh = engine.mesh
    if mesh.data_parallel_size * mesh.ranks_per_slot != spec.world_size:
        raise PluginError(
            f"strategy={name} has a mesh of {mesh.data_parallel_size} × {mesh.ranks_per_slot} ranks, but "
            f"{spec.world_size} ranks run; a mesh must contain every rank exactly once ({mesh})"
        )
    return engine


def build(spec: EngineSpec) -> Engine:
    """Builds the engine of `strategy=fsdp2`: a Hugging Face decoder, sharded by FSDP2 on several ranks."""
    mesh = Mesh()
    if spec.world_size > 1 or spec.sequence_parallel > 1 or spec.tensor_parallel > 1:
        from hone.engine.mesh import check_layout, mesh_for_rank

        mesh = mesh_for_rank(
            spec.rank,
            spec.world_size,
            sequence=spec.sequence_parallel,
            tensor=spec.tensor_parallel,
        )
        check_layout(
            spec.model_path,
            spec.world_size,
            sequence=spec.sequence_parallel,
            tensor=spec.tensor_parallel,
            shard_size=spec.fsdp.fsdp_size,
            adapters=spec.adapters is not None,
        )
    rules = (
        spec.train_micro_batch_rule(mesh.data_parallel_size),
        spec.infer_micro_batch_rule(mesh.data_parallel_size),
    )
    # The budgets are per rank, but the ranks of a sequence group split each micro-batch.
    train_micro_batch_rule, infer_micro_batch_rule = (
        replace(rule, tokens=rule.tokens * mesh.sequence_size) for rule in rules
    )
    # Several ranks move the module from the host to their devices layer by layer while they shard it.
    load_device = torch.device("cpu") if spec.world_size > 1 else spec.device
    return build_engine(
        load_module(spec, load_device),
        device=spec.device,
        optim=spec.optim,
        grad_clip=spec.grad_clip,
        fsdp=spec.fsdp,
        train_micro_batch_rule=train_micro_batch_rule,
        infer_micro_batch_rule=infer_micro_batch_rule,
        response_width=spec.response_width,
        mesh=mesh,
        compile_blocks=spec.compile_blocks,
    )


def load_module(spec: EngineSpec, device: torch.device | None = None) -> Model:
    """Loads the decoder with the head that the spec names; without an optimizer, the base model is frozen.

    Adapters are never frozen: `requires_grad` distinguishes them from the base model, and vLLM needs their
    names. `device` overrides `spec.device`: a model that will be sharded is loaded on the host.
    """
    device = device or spec.device
    options: LoadOptions = {
        "dtype": spec.dtype,
        "override_config": spec.override_config,
        "device": spec.device,
    }
    labels = LABELS.get(spec.head)
    if spec.label_tokens is not None:
        lm = load_step_classifier(spec.model_path, spec.label_tokens, **options)
    elif labels is None:
        lm = load_causal_lm(spec.model_path, **options)
    else:
        lm = load_classifier(spec.model_path, labels, seed=spec.seed, **options)
    if spec.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    lm = lm.to(device)
    module: Model
    if labels is not None:
        module = ScoreModel(lm)
    else:
        module = PolicyModel(lm) if spec.head == "policy" else ValueModel(lm)
    if spec.replays_routing and isinstance(module, PolicyModel):
        module.enable_routing()
    if spec.adapters is not None:
        module.lm = init_lora(module.lm, spec.adapters, spec.seed)
    if spec.trained_part == "head" or (spec.optim is None and spec.adapters is None):
        module.requires_grad_(False)
    if spec.trained_part == "head" and isinstance(module, ScoreModel):
        module.head.requires_grad_(True)
    return module.to(device)


def build_engine(
    module: Model,
    *,
    optim: OptimConfig | None,
    grad_clip: float,
    fsdp: FSDPConfig,
    train_micro_batch_rule: MicroBatchRule,
    infer_micro_batch_rule: MicroBatchRule,
    response_width: int,
    mesh: Mesh | None = None,
    compile_blocks: bool = False,
    device: torch.device | None = None,
) -> Engine:
    """Builds an engine: shards the module over several ranks, and creates the optimizer if `optim` is set.

    A module on the host is moved to the device layer by layer while it is sharded.
    """
    device = device or next(module.parameters()).device
    compile_blocks |= fsdp.use_torch_compile
    if mesh is not None and mesh.tensor_size > 1:  # fused and compiled layers need full weights
        if compile_blocks or device.type == "cuda":
            log.info("layers under tensor parallel are neither fused nor compiled")
    else:
        if device.type == "cuda":
            fuse(module, kernels=not compile_blocks)
        if compile_blocks:
            compile_layers(module)
    sharded_module = None
    if mesh is not None and mesh.data_parallel_size * mesh.ranks_per_slot > 1:
        from hone.engine.sharding import join_group, shard

        join_group(device)
        sharded_module = shard(module, fsdp, device, mesh)
    optimizer = None
    if optim is not None:
        optimizer = Optimizer(
            module.named_parameters(),
            optim,
            grad_clip=grad_clip,
            total_steps=optim.total_training_steps,
        )
    offload = build_offload(module, optimizer, fsdp)
    engine = Engine(
        module,
        optimizer=optimizer,
        train_micro_batch_rule=train_micro_batch_rule,
        infer_micro_batch_rule=infer_micro_batch_rule,
        response_width=response_width,
        seed=fsdp.seed,
        sharded_module=sharded_module,
        offload=offload,
    )
    if offload is not None:
        offload.start()
    return engine
