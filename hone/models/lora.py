"""LoRA adapters on a frozen base model, and merged weights by Hugging Face name.

PEFT wraps the model. Merging creates new tensors, because adding to the base in place and subtracting
again would not restore the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

ADAPTER_FOLDER = "lora_adapter"
_PEFT_PREFIX = "base_model.model."
_SCORE_PATTERN = r"(?:.*\.)?score"


class LoraError(ValueError):
    """The LoRA settings or the adapter cannot be used."""


@dataclass(frozen=True)
class AdapterSettings:
    """The settings of LoRA adapters."""

    rank: int
    alpha: float
    dropout: float
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...] | None
    adapter_path: str | None
    """The path of an existing adapter whose training continues."""


def is_lora(lm: PreTrainedModel | None) -> bool:
    """Whether PEFT has wrapped the model."""
    return hasattr(lm, "peft_config")


def init_lora(lm: PreTrainedModel, adapters: AdapterSettings, seed: int) -> PeftModel:
    """Wraps the model in adapters whose weights are initialized from the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return wrap_lora(lm, **vars(adapters))


def wrap_lora(
    lm: PreTrainedModel,
    *,
    rank: int,
    alpha: float,
    dropout: float,
    target_modules: str | tuple[str, ...],
    exclude_modules: str | tuple[str, ...] | None,
    adapter_path: str | None,
) -> PeftModel:
    """Wraps a frozen base model in PEFT adapters, or in the existing adapter at `adapter_path`.

    Adapters have the dtype of the base; the optimizer holds their float32 master weights.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    is_classifier = hasattr(lm, "score")  # its head is trained fully, without an adapter
    excluded_modules = _list_or_pattern(exclude_modules)
    if is_classifier:
        pattern = rf"(?:{excluded_modules})|" if isinstance(excluded_modules, str) else ""
        excluded_modules = (
            [*excluded_modules, "score"]
            if isinstance(excluded_modules, list)
            else pattern + _SCORE_PATTERN
        )
    try:
        if adapter_path:
            peft_model = PeftModel.from_pretrained(
                lm, adapter_path, is_trainable=True, autocast_adapter_dtype=False
            )
        else:
            config = LoraConfig(
                task_type="TOKEN_CLS" if is_classifier else "CAUSAL_LM",
                r=rank,
                lora_alpha=alpha,
                lora_dropout=dropout,
                target_modules=_list_or_pattern(target_modules),
                exclude_modules=excluded_modules,
            )
            peft_model = get_peft_model(lm, config, autocast_adapter_dtype=False)
    except ValueError as error:  # PEFT raises it for invalid settings
        settings = adapter_path or f"rank {rank}, target_modules {target_modules}"
        raise LoraError(f"LoRA ({settings}): {' '.join(str(error).split())}") from error
    if getattr(peft_model.peft_config[peft_model.active_adapter], "use_dora", False):
        raise LoraError("the adapter uses DoRA, which is not supported; use a plain LoRA adapter")
    head = None if is_classifier else peft_model.get_output_embeddings()
    if hasattr(head, "base_layer") or hasattr(head, "modules_to_save"):
        raise LoraError(
            "the adapter changes the LM head, but log-probs are computed from the head's own weight; "
            "leave lm_head out of target_modules"
        )
    embeddings = peft_model.get_input_embeddings()
    is_tied = head is not None and lm.config.get_text_config().tie_word_embeddings
    if is_tied and (hasattr(embeddings, "base_layer") or hasattr(embeddings, "modules_to_save")):
        raise LoraError(
            "the adapter changes the embeddings, whose matrix is also that of the LM head, so the merged "
            "weights would differ from the trained policy; leave the embeddings out of target_modules"
        )
    return peft_model


def _list_or_pattern(value: str | tuple[str, ...] | None) -> str | list[str] | None:
    return value if value is None or isinstance(value, str) else list(value)


def merged_weights(lm: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """Yields the sum of base and adapter as full tensors; the parameters must be gathered before."""
    adapter = lm.active_adapter
    modules = dict(lm.named_modules())
    for name, parameter in lm.named_parameters():
        module_path, _, parameter_name = name.rpartition(".")
        if ".lora_" in name or module_path.endswith(".original_module"):
            continue
        tensor = parameter.detach()
        if module_path.endswith(".base_layer"):
            module_path = module_path.removesuffix(".base_layer")
            if parameter_name == "weight":
                delta = modules[module_path].get_delta_weight(adapter).detach()
                tensor = (tensor.float() + delta.float()).to(tensor.dtype)
        module_path = module_path.removesuffix(f".modules_to_save.{adapter}")
        yield f"{module_path.removeprefix(_PEFT_PREFIX)}.{parameter_name}", tensor


def adapter_weights(lm: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """Yields the full tensors of the adapter by PEFT name, even if the parameters are sharded."""
    for name, parameter in lm.named_parameters():
        if parameter.requires_grad:
            yield name, full_tensor(parameter)


def is_plain_lora(lm: PeftModel) -> bool:
    """Whether base files plus adapter files reproduce the policy.

    This needs one rank and scaling for all modules, two matrices per module, and an unchanged base.
    """
    config = lm.peft_config[lm.active_adapter]
    changes_base = config.init_lora_weights not in (True, False, "gaussian", "orthogonal")
    if changes_base or config.rank_pattern or config.alpha_pattern or config.lora_bias:
        return False
    return all(".lora_" in name for name, _ in adapter_weights(lm))


def full_tensor(parameter: Tensor) -> Tensor:
    """Returns the full tensor of a parameter, which may be sharded."""
    full: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach()


def save_adapter(lm: PeftModel, weights: dict[str, Tensor], folder: Path) -> None:
    """Writes a folder that `PeftModel.from_pretrained` and `lora_adapter_path` can load."""
    lm.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
