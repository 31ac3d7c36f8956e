"""Making an engine from configuration: sharding, optimizer, LoRA, and the Hugging Face export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from hone.config.engine import FSDPConfig, OptimConfig
from hone.config.model import ModelConfig
from hone.engine.engine import Engine
from hone.engine.microbatch import MicroBatchRule
from hone.engine.optimizer import Optimizer
from hone.models.load import EXPORT_FOLDER


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
) -> Engine:
    """Shard over the ranks where there are several, and give a trained model its optimizer."""
    device = next(module.parameters()).device
    group: dist.ProcessGroup | None = None
    if world_size > 1:
        from hone.engine.sharding import join_group, shard

        group = join_group(device)
        shard(module, fsdp, device)
    optimizer = None
    if optim is not None:
        optimizer = Optimizer(
            module.parameters(), optim, grad_clip=grad_clip, total=optim.total_training_steps
        )
    return Engine(
        module,
        optimizer=optimizer,
        train_rule=train_rule,
        infer_rule=infer_rule,
        response_width=response_width,
        share_prompts=device.type == "cpu",
        group=group,
    )


def wrap_lora(lm: Any, config: ModelConfig) -> Any:
    """PEFT adapters over a frozen base; an adapter path continues an earlier one."""
    from peft import LoraConfig, PeftModel, get_peft_model

    if config.lora_adapter_path:
        return PeftModel.from_pretrained(lm, config.lora_adapter_path, is_trainable=True)
    targets = config.target_modules
    return get_peft_model(
        lm,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=config.lora_rank,
            lora_alpha=int(config.lora_alpha),
            lora_dropout=config.lora_dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            exclude_modules=config.exclude_modules,
        ),
    )


def export_hf(engine: Engine, lm: Any, tokenizer: Any, folder: Path, rank: int) -> None:
    """Write what `from_pretrained` opens; every rank gathers, rank 0 writes."""
    weights = {
        name: tensor.cpu().contiguous().clone() for name, tensor in engine.named_hf_weights()
    }
    if rank == 0:
        target = folder / EXPORT_FOLDER
        lm.save_pretrained(target, state_dict=weights)
        tokenizer.save_pretrained(target)
