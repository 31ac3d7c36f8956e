"""Making an engine from configuration: sharding and optimizer."""

from __future__ import annotations

from torch import nn

from hone.config.engine import FSDPConfig, OptimConfig
from hone.engine.engine import Engine
from hone.engine.microbatch import MicroBatchRule
from hone.engine.offload import offload_of
from hone.engine.optimizer import Optimizer
from hone.models.compiled import compile_layers
from hone.models.fused import fuse


def build_engine(
    module: nn.Module,
    *,
    optim: OptimConfig | None,
    grad_clip: float,
    fsdp: FSDPConfig,
    train_rule: MicroBatchRule,
    infer_rule: MicroBatchRule,
    response_width: int,
    world_size: int,
    compile_blocks: bool = False,
) -> Engine:
    """Shard over the ranks where there are several, and give a trained model its optimizer."""
    device = next(module.parameters()).device
    compile_blocks |= fsdp.use_torch_compile
    if device.type == "cuda":
        fuse(module, kernels=not compile_blocks)
    if compile_blocks:
        compile_layers(module)
    shards = None
    if world_size > 1:
        from hone.engine.sharding import join_group, shard

        join_group(device)
        shards = shard(module, fsdp, device)
    optimizer = None
    if optim is not None:
        optimizer = Optimizer(
            module.named_parameters(), optim, grad_clip=grad_clip, total=optim.total_training_steps
        )
    offload = offload_of(module, optimizer, fsdp)
    engine = Engine(
        module,
        optimizer=optimizer,
        train_rule=train_rule,
        infer_rule=infer_rule,
        response_width=response_width,
        seed=fsdp.seed,
        shards=shards,
        offload=offload,
    )
    offload.start()
    return engine
