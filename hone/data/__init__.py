"""Datasets, prompts and batches; names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES = {
    "check": "check_file",
    "create": "create_rl_dataset create_rl_sampler create_sft_dataset create_train_loader "
    "create_val_loader",
    "dataset": "RLHFDataset",
    "dynamic": "AbstractDataGenerator DynamicGenDataset",
    "loader": "PromptLoader",
    "prompt_ids": "render_prompt",
    "prompts": "collate_fn",
    "rows": "DataError",
    "samplers": "AbstractCurriculumSampler AbstractSampler",
    "sft": "MultiTurnSFTDataset SFTDataset",
}
_MODULES = {name: f"hone.data.{file}" for file, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
