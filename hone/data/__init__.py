"""Data sets, prompts, batches. Names are loaded when first used, so that `import hone.data` stays light."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {
    "AbstractCurriculumSampler": "hone.data.samplers",
    "AbstractDataGenerator": "hone.data.dynamic",
    "AbstractSampler": "hone.data.samplers",
    "DataError": "hone.data.rows",
    "DynamicGenDataset": "hone.data.dynamic",
    "MultiTurnSFTDataset": "hone.data.sft",
    "PromptLoader": "hone.data.loader",
    "RLHFDataset": "hone.data.dataset",
    "SFTDataset": "hone.data.sft",
    "check_file": "hone.data.check",
    "collate_fn": "hone.data.loader",
    "create_rl_dataset": "hone.data.create",
    "create_rl_sampler": "hone.data.create",
    "create_sft_dataset": "hone.data.create",
    "create_train_loader": "hone.data.create",
    "create_val_loader": "hone.data.create",
    "render_prompt": "hone.data.prompts",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
