"""Engines over tiny models, and configurations small enough to vary one thing at a time."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from hone.config.actor import ActorConfig, PolicyLossConfig
from hone.config.engine import FSDPConfig, OptimConfig
from hone.engine.build import build_engine
from hone.engine.engine import Engine
from hone.engine.mesh import mesh_for_rank
from hone.models.policy import PolicyModel, ValueModel
from hone.models.tiny import tiny_lm
from hone.ops.rows import MicroBatchRule

from .batches import VOCABULARY, WIDTH

SGD = OptimConfig(optimizer="SGD", lr=0.1, weight_decay=0.0)
ADAM = OptimConfig(lr=1e-2)
ALL = MicroBatchRule(rows=100, tokens=10_000)


def policy(seed: int = 1, dtype: torch.dtype = torch.float32, **changes: Any) -> PolicyModel:
    lm = tiny_lm(VOCABULARY, hidden=32, mlp=48, seed=seed, **changes)
    return PolicyModel(lm.to(dtype))


def critic(seed: int = 1) -> ValueModel:
    model = ValueModel(tiny_lm(VOCABULARY, hidden=32, mlp=48, seed=seed))
    torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(seed))
    return model


def make_engine(
    module: torch.nn.Module,
    optim: OptimConfig | None = SGD,
    *,
    rule: MicroBatchRule = ALL,
    share: bool = True,
    grad_clip: float = 0.0,
    fsdp: FSDPConfig | None = None,
    world_size: int = 1,
    sequence: int = 1,
    tensor: int = 1,
) -> Engine:
    engine = build_engine(
        module,
        optim=optim,
        grad_clip=grad_clip,
        fsdp=fsdp or FSDPConfig(),
        train_micro_batch_rule=rule,
        infer_micro_batch_rule=rule,
        response_width=WIDTH,
        mesh=mesh_for_rank(int(os.environ["RANK"]), world_size, sequence=sequence, tensor=tensor)
        if world_size > 1
        else None,
    )
    engine._share_prompts = share
    return engine


def actor(loss_mode: str = "vanilla", **changes: Any) -> ActorConfig:
    """An actor's settings with clips tight enough to bind on some tokens."""
    config = ActorConfig(
        policy_loss=PolicyLossConfig(
            loss_mode=loss_mode,
            dro_beta=0.3,
            clip_cov_ratio=0.2,
            clip_cov_lb=-10.0,
            clip_cov_ub=10.0,
            kl_cov_ratio=0.2,
        ),
        clip_ratio=0.1,
        clip_ratio_c=1.5,
    )
    return replace(config, **changes)


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_hf_weights()}
