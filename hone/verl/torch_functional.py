"""Tensor functions with verl's names and arguments; the training engine does not use them.

In verl, they are in `utils.torch_functional`, `utils.model` and `utils.groupwise`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hone.ops.rows import Groups, factorise, zero_outside_mask
from hone.ops.rows import masked_var as masked_var
from hone.ops.rows import masked_whiten as masked_whiten
from hone.types import Fields
from hone.verl.distributed import allgather_dict_tensors as allgather_dict_tensors
from hone.verl.distributed import broadcast_dict_tensor as broadcast_dict_tensor
from hone.verl.distributed import distributed_masked_mean as distributed_masked_mean
from hone.verl.distributed import distributed_mean_max_min_std as distributed_mean_max_min_std
from hone.verl.distributed import (
    split_dict_tensor_into_batches as split_dict_tensor_into_batches,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig

_INTEGER_TOLERANCE = 1e-6


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Returns the sum of `values`, weighted by the mask; values with weight 0 may be NaN."""
    return (zero_outside_mask(values, mask) * mask).sum(axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Returns the mean of `values`, weighted by the mask; 0 if all weights are 0."""
    return masked_sum(values, mask, axis) / (mask.expand_as(values).sum(axis) + 1e-8)


def gather_from_labels(data: Tensor, label: Tensor) -> Tensor:
    """Returns the entry of `data` […, V] at each label, […]."""
    return data.gather(-1, label.unsqueeze(-1)).squeeze(-1)


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Returns log p(label) […] of softmax(logits […, V]); the backward pass is never in place."""
    flat = -cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return flat.view(labels.shape)


logprobs_from_logits_naive = logprobs_from_logits_v2 = logprobs_from_logits


def log_probs_from_logits_response(
    input_ids: Tensor, logits: Tensor, response_length: int
) -> Tensor:
    """Returns log-probs [B, response_length] of the response, from logits of the whole sequence."""
    response_logits = logits[:, -response_length - 1 : -1]
    return logprobs_from_logits(response_logits, input_ids[:, -response_length:])


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Returns the entropy […] of softmax(logits […, V])."""
    probabilities = logits.softmax(-1)
    finite_logits = torch.where(probabilities > 0, logits, 0.0)  # ignores logits of -inf
    return torch.logsumexp(logits, -1) - (probabilities * finite_logits).sum(-1)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """Returns the entropy […] in float32, computed for `chunk_size` rows at a time."""
    return torch.cat([entropy_from_logits(rows.float()) for rows in logits.split(chunk_size)])


def calculate_sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """Returns Σ p² […] of softmax(logits […, V])."""
    return logits.softmax(-1).square().sum(-1)


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """Clips `x` to the range between two tensors."""
    return torch.maximum(torch.minimum(x, tensor_max), tensor_min)


def compute_grad_norm(model: nn.Module) -> float:
    """Returns the sum of squared gradients, not its root, as verl does."""
    return sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)


def get_response_mask(
    response_id: Tensor, eos_token: int | list[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Returns a mask [B, T] that is 1 up to and including the first end-of-sequence token."""
    is_end = torch.isin(response_id, torch.tensor(eos_token, device=response_id.device)).int()
    return (is_end.cumsum(1) - is_end == 0).to(dtype)


get_eos_mask = get_response_mask  # verl 0.2's name


def pad_2d_list_to_length(
    response: Sequence[Sequence[float]], pad_token_id: float, max_length: int | None = None
) -> Tensor:
    """Pads rows on the right to the longest row, or to `max_length` if that is larger."""
    width = max(max_length or 0, *(len(row) for row in response))
    return torch.tensor([[*row, *[pad_token_id] * (width - len(row))] for row in response])


def pad_sequence_to_length(
    tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> Tensor:
    """Pads the last dimension to `max_seq_len`; longer tensors are unchanged."""
    missing = max(max_seq_len - tensors.shape[-1], 0)
    return pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Pads or truncates (left, right, middle) ids and mask [B, L] to `max_length`."""
    if truncation not in ("left", "right", "middle", "error"):
        raise ValueError(f"truncation={truncation!r}: use left, right, middle or error")
    length = input_ids.shape[-1]
    if length > max_length and truncation == "error":
        raise NotImplementedError(
            f"{length} tokens are more than max_length={max_length}; set truncation to left, "
            "right or middle, or raise max_length"
        )
    num_left = {"left": 0, "right": max_length, "middle": max_length // 2}.get(truncation, length)
    if length > max_length:
        positions = torch.arange(length, device=input_ids.device)
        is_kept = (positions < num_left) | (positions >= length - (max_length - num_left))
        input_ids, attention_mask = input_ids[:, is_kept], attention_mask[:, is_kept]
    return (
        pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad),
        pad_sequence_to_length(attention_mask, max_length, 0, left_pad),
    )


def remove_pad_token(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """Returns the unmasked ids of each row."""
    pairs = zip(input_ids, attention_mask, strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Returns positions [B, L] that count the unmasked tokens; left padding is 0."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def create_random_mask(
    input_ids: Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> Tensor:
    """Returns random masks [B, L] for tests; each row has one run of ones."""
    rows, width = input_ids.shape
    max_tokens = int(width * max_ratio_of_valid_token)
    max_padding = int(width * max_ratio_of_left_padding)
    min_tokens = max(1, int(width * min_ratio_of_valid_token))
    if not 0 < min_tokens <= max_tokens or max_tokens + max_padding > width:
        raise AssertionError(
            f"{min_tokens} to {max_tokens} tokens and padding up to {max_padding} do not fit "
            f"{width} columns"
        )
    start = torch.from_numpy(np.random.randint(0, max_padding + 1, (rows, 1)))
    length = torch.from_numpy(np.random.randint(min_tokens, max_tokens + 1, (rows, 1)))
    position = torch.arange(width)
    return ((position >= start) & (position < start + length)).to(input_ids.device, torch.int64)


def update_model_config(module_config: PreTrainedConfig, override_config_kwargs: Fields) -> None:
    """Sets attributes of a model's config; a dict sets the attributes of a nested config."""
    for key, value in override_config_kwargs.items():
        if isinstance(value, dict):
            update_model_config(getattr(module_config, key), value)
        else:
            setattr(module_config, key, value)


def get_model_size(model: nn.Module, scale: str = "auto") -> tuple[float, str]:
    """Returns the number of parameters in units of B, M, K or 1, and the unit."""
    count = sum(parameter.numel() for parameter in model.parameters())
    units = {"B": 1e9, "M": 1e6, "K": 1e3, "": 1}
    if scale == "auto":
        scale = next((unit for unit, size in units.items() if count > size), "")
    return count / units[scale] if scale else count, scale


def print_model_size(model: nn.Module, name: str | None = None) -> None:
    """Prints the number of parameters of a model."""
    count, unit = get_model_size(model)
    sys.stdout.write(f"{name or type(model).__name__} contains {count:.2f}{unit} parameters\n")


def get_generation_config(model: str, trust_remote_code: bool = False) -> GenerationConfig | None:
    """Returns the generation config of a model, or one derived from its config, or None."""
    from transformers import AutoConfig, GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:
        pass
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):  # no config.json, or one without a model_type
        return None
    return GenerationConfig.from_model_config(config)


def squeeze(x: Tensor) -> Tensor:
    """Removes the last dimension if its size is 1."""
    return x.squeeze(-1)


def expand_as_nested(tensor: Tensor, nested_tensor: Tensor) -> Tensor:
    """Returns a jagged tensor in which each row repeats its value of `tensor` [B]."""
    if not nested_tensor.is_nested or tensor.shape != nested_tensor.shape[:1]:
        raise AssertionError("expand_as_nested needs a jagged tensor and one value per row of it")
    offsets = nested_tensor.offsets()  # type: ignore[attr-defined]
    values = tensor.repeat_interleave(offsets.diff(), dim=0)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def get_constant_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1
) -> LambdaLR:
    """Returns a schedule with linear warm-up from 0, then a constant rate."""

    def lr_factor(step: int) -> float:
        return step / num_warmup_steps if step < num_warmup_steps else 1.0

    return LambdaLR(optimizer, lr_factor, last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float | None = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    init_lr_ratio: float | None = None,
    zero_indexed_step: bool = True,
) -> LambdaLR:
    """Returns a schedule with linear warm-up from `init_lr_ratio`, then cosine decay.

    A ratio of None is 0.
    """
    start_factor, min_lr_ratio = init_lr_ratio or 0.0, min_lr_ratio or 0.0
    decay_steps = max(1, num_training_steps - num_warmup_steps)

    def lr_factor(step: int) -> float:
        step = step if zero_indexed_step else step + 1
        if step < num_warmup_steps:
            return start_factor + (1 - start_factor) * step / num_warmup_steps
        cosine = math.cos(2 * math.pi * num_cycles * (step - num_warmup_steps) / decay_steps)
        return max(min_lr_ratio, min_lr_ratio + (1 - min_lr_ratio) * (1 + cosine) / 2)

    return LambdaLR(optimizer, lr_factor, last_epoch)


def get_wsd_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    stable_ratio: float = 0.9,
) -> LambdaLR:
    """Returns a schedule with linear warm-up, a constant part, then cosine decay."""
    steps_after_warmup = max(0, num_training_steps - num_warmup_steps)
    decay_start = num_warmup_steps + int(steps_after_warmup * stable_ratio)

    def lr_factor(step: int) -> float:
        if step < num_warmup_steps:
            return step / num_warmup_steps
        if step < decay_start:
            return 1.0
        cosine = -1.0
        if step < num_training_steps:
            progress = (step - decay_start) / (num_training_steps - decay_start)
            cosine = math.cos(2 * math.pi * num_cycles * progress)
        return min_lr_ratio + (1 - min_lr_ratio) * (1 + cosine) / 2

    return LambdaLR(optimizer, lr_factor, last_epoch)


def as_torch_index(
    index: Sequence[Hashable] | np.ndarray | Tensor, device: torch.device | str | None = None
) -> Tensor:
    """Returns the group number (from 0) of each label; floats close to integers are rounded first."""
    array = index.cpu().numpy() if isinstance(index, Tensor) else np.asarray(index, dtype=object)
    if array.dtype == object and all(isinstance(label, float | np.floating) for label in array):
        array = array.astype(np.float64)
    if array.dtype.kind == "f" and np.allclose(
        array, np.rint(array), rtol=0, atol=_INTEGER_TOLERANCE
    ):
        array = np.rint(array).astype(np.int64)
    return torch.from_numpy(factorise(array.reshape(-1))).to(device)


@torch.no_grad()
def group_mean_std(
    scores: Tensor,
    gidx: Tensor,
    eps: float = 1e-6,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean, std (at least √eps) and size per group.

    A group of one row has mean 0 and std 1.
    """
    if len(scores.reshape(-1)) != len(gidx.reshape(-1)):
        raise ValueError(f"{scores.numel()} scores for {gidx.numel()} group numbers")
    ids = gidx.reshape(-1).long().to(device)
    groups = Groups(ids, torch.bincount(ids).double())
    values = scores.reshape(-1).to(device)
    is_single = groups.sizes <= 1
    mean = groups.mean(values).masked_fill(is_single, 0.0)
    std = groups.std(values).clamp(min=math.sqrt(eps)).masked_fill(is_single, 1.0)
    return mean.float(), std.float(), groups.sizes.float()
