"""The Hugging Face folder of a trained model; with LoRA the merged model, and the adapter beside it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from hone.models.load import EXPORT_FOLDER
from hone.models.lora import ADAPTER_FOLDER, is_lora, save_adapter
from hone.models.writing import without_progress_bar
from hone.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Weights = dict[str, Tensor]


def on_host(named: Iterable[tuple[str, Tensor]], *, keep: bool) -> Weights:
    """Copies in host memory; a rank that keeps none still takes part in gathering each."""
    copies: Weights = {}
    for name, tensor in named:
        if keep:
            copies[name] = tensor.cpu().contiguous().clone()
    return copies


def write_export(
    folder: Path, lm: PreTrainedModel, tokenizer: Tokenizer, weights: Weights, adapter: Weights
) -> None:
    """Write what `from_pretrained` opens, and what `PeftModel.from_pretrained` does."""
    target = folder / EXPORT_FOLDER
    base = lm.get_base_model() if is_lora(lm) else lm
    with without_progress_bar():
        base.save_pretrained(target, state_dict=weights)
    tokenizer.save_pretrained(target)
    if adapter:
        save_adapter(lm, adapter, folder / ADAPTER_FOLDER)
