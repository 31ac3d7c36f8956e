"""LoRA adapters on a frozen base model, and merged weights by Hugging Face name.

PEFT wraps the model. Merging creates new tensors: if adapters were added to the base in place, subtracting
them would not restore the same bits.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hone.data.files import copy_to_local
from hone.errors import UserError

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

ADAPTER_FOLDER = "lora_adapter"
_PEFT_PREFIX = "base_model.model."
_SCORE_PATTERN = r"(?:.*\.)?score"
_HEAD_SUFFIXES = (".score.weight", ".score.bias")
_UNSUPPORTED_FIELDS = (
    *("use_dora", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config"),
    *("kasa_config", "monteclora_config", "layer_replication", "trainable_token_indices"),
)
"""Fields of PEFT's config whose adapters `merged_weights` cannot add to the base as low-rank matrices."""


class LoraError(UserError, ValueError):
    """The LoRA settings or the adapter cannot be used."""


@dataclass(frozen=True)
class AdapterSettings:
    """The settings of LoRA adapters."""

    rank: int
    alpha: float
    dropout: float
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...] | None = None
    adapter_path: str | None = None
    """The path of an existing adapter whose training continues."""


def is_lora(lm: PreTrainedModel | None) -> bool:
    """Whether PEFT has wrapped the model."""
    return hasattr(lm, "peft_config")


def init_lora(lm: PreTrainedModel, adapters: AdapterSettings, seed: int) -> PeftModel:
    """Wraps the model in adapters whose weights are initialized from the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return wrap_lora(lm, adapters)


def wrap_lora(lm: PreTrainedModel, adapters: AdapterSettings) -> PeftModel:
    """Wraps a frozen base model in PEFT adapters, or in the existing adapter at `adapter_path`.

    Adapters have the dtype of the base; the optimizer holds their float32 master weights.
    """
    from peft import LoraConfig, get_peft_model

    adapter_path, exclude_modules = adapters.adapter_path, adapters.exclude_modules
    is_classifier = hasattr(
        lm, "score"
    )  # the head of a classifier is trained fully, without an adapter
    try:
        if adapter_path:
            adapter_path = str(Path(copy_to_local(adapter_path)).expanduser())
            config = _read_adapter_config(adapter_path)
        else:
            config = LoraConfig(
                r=adapters.rank,
                lora_alpha=adapters.alpha,
                lora_dropout=adapters.dropout,
                target_modules=_list_or_pattern(adapters.target_modules),
                exclude_modules=_excluded_modules(exclude_modules, is_classifier),
            )
        config.task_type = "TOKEN_CLS" if is_classifier else "CAUSAL_LM"
        peft_model = get_peft_model(lm, config, autocast_adapter_dtype=False)
        if adapter_path:
            _load_adapter(peft_model, adapter_path)
    except (ValueError, OSError, RuntimeError, KeyError) as error:  # of PEFT and torch
        settings = adapter_path or f"rank {adapters.rank}, target_modules {adapters.target_modules}"
        raise LoraError(f"LoRA ({settings}): {textwrap.shorten(str(error), 400)}") from error
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


def _excluded_modules(
    exclude_modules: str | tuple[str, ...] | None, is_classifier: bool
) -> str | list[str] | None:
    """Returns names or a pattern of the modules without adapters, with the head of a classifier."""
    excluded = _list_or_pattern(exclude_modules)
    if not is_classifier:
        return excluded
    if isinstance(excluded, list):
        return [*excluded, "score"]
    return (f"(?:{excluded})|" if excluded else "") + _SCORE_PATTERN


def _read_adapter_config(path: str) -> PeftConfig:
    """Returns the config of an adapter; raises if `merged_weights` could not add it to the base."""
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(path)
    if config.peft_type != "LORA":
        raise ValueError(f"the adapter is of type {config.peft_type.value}; use a LoRA adapter")
    if names := [name for name in _UNSUPPORTED_FIELDS if getattr(config, name, None)]:
        raise ValueError(f"the adapter has {names[0]}, which is not supported; use a plain adapter")
    config.inference_mode = False
    return config


def _load_adapter(lm: PeftModel, path: str) -> None:
    """Loads the weights of an adapter; raises if they are not those of this model's adapter."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from peft.utils import load_peft_weights

    weights = load_peft_weights(path, device="cpu")
    initial = get_peft_model_state_dict(lm, save_embedding_layers=False)
    # The adapter of a language model lacks the head of a classifier, so the initial head is kept.
    head = {name: weight for name, weight in initial.items() if name.endswith(_HEAD_SUFFIXES)}
    result = set_peft_model_state_dict(lm, head | weights, lm.active_adapter)
    missing = [name for name in result.missing_keys if ".lora_" in name]
    if missing or result.unexpected_keys:
        difference = f"lacks {missing[0]}" if missing else f"also has {result.unexpected_keys[0]}"
        raise ValueError(f"the adapter is for another model: its file {difference}")


def merged_weights(lm: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """Yields the sum of base and adapter as full tensors; the parameters must be gathered before."""
    adapter = lm.active_adapter
    modules = dict(lm.named_modules())
    for name, parameter in lm.named_parameters():
        if ".lora_" in name or ".original_module." in name:
            continue
        module_path, _, parameter_name = name.rpartition(".")
        tensor = parameter.detach()
        while module_path.endswith(".base_layer"):  # one wrapper per adapted parameter of a module
            module_path = module_path.removesuffix(".base_layer")
            delta = _delta(modules[module_path], parameter_name, adapter)
            if delta is not None:
                tensor = (tensor.float() + delta.detach().float()).to(tensor.dtype)
        module_path = f"{module_path}.".replace(f".modules_to_save.{adapter}.", ".")
        yield f"{module_path.removeprefix(_PEFT_PREFIX)}{parameter_name}", tensor


def _delta(layer: LoraLayer, parameter_name: str, adapter: str) -> Tensor | None:
    """Returns the tensor that a layer's adapter adds to a parameter of its base layer, or None."""
    # PEFT's layers of experts adapt the parameter `parameter_name`; other layers adapt `weight`.
    if parameter_name == getattr(layer, "parameter_name", "weight"):
        return layer.get_delta_weight(adapter)
    if parameter_name == "bias" and layer.lora_bias[adapter]:
        return layer.lora_B[adapter].bias * layer.scaling[adapter]
    return None


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
    if config.target_parameters:  # parameters of experts
        return False
    return all(".lora_" in name for name, _ in adapter_weights(lm))


def full_tensor(parameter: Tensor) -> Tensor:
    """Returns the full tensor of a parameter, which may be sharded."""
    full: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach()


def save_adapter(lm: PeftModel, weights: dict[str, Tensor], folder: Path) -> None:
    """Writes a folder that `PeftModel.from_pretrained` and `lora_adapter_path` can load."""
    lm.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
