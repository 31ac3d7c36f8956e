"""The forward of exact mode, which decoding, prefill and the trainer's log-probs share.

All kernels are batch-invariant: their summation order does not depend on the batch. The backward
pass recomputes each layer with the plain modules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.models.decoder_layer import fits_decoder_layer
from hone.models.families import EXACT_FAMILIES
from hone.models.policy import PolicyModel
from hone.ops.autograd import Context
from hone.ops.decoder import Norm
from hone.ops.logprobs import Statistics, kernel_statistics, linear_log_probs, softmax_entropy
from hone.ops.rows import PackedRows
from hone.rollout.contract import RolloutError
from hone.rollout.native.decode_step import BatchState
from hone.rollout.native.decoder import JoinedDecoder, can_join_parameters
from hone.rollout.native.kernels_reference import RotaryTable, kernels_for
from hone.rollout.native.paged_cache import PagedCache
from hone.rollout.native.paged_layouts import (
    ExactLayout,
    TrainingLayout,
    decode_queries,
    queries_per_tile,
    segment_queries,
)
from hone.rollout.native.scheduler import BLOCK_SIZE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TensorFunction = Callable[[Tensor], Tensor]


def check_exact_supported(config: PreTrainedConfig, path: str) -> None:
    """Raises if exact mode does not support the model; the check needs only the model's config."""
    family = getattr(config, "model_type", "of unknown family")
    if family not in EXACT_FAMILIES:
        raise RolloutError(
            f"rollout.exact=true supports the model families {' and '.join(EXACT_FAMILIES)}, but "
            f"{path} is {family}; use rollout.exact=false, and read rollout_corr/* for the "
            "difference"
        )
    unsupported_layer_types = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if unsupported_layer_types:
        raise RolloutError(
            f"rollout.exact=true supports only full attention, but {path} has "
            f"{', '.join(sorted(unsupported_layer_types))}; use rollout.exact=false"
        )


class ExactDecoder(JoinedDecoder):
    """Computes the policy's forward with batch-invariant kernels, in rollout and training.

    The base class joins the q, k and v weights, and the gate and up weights, into one tensor each.
    """

    def __init__(self, policy: PolicyModel) -> None:
        config = policy.lm.config
        check_exact_supported(config, getattr(config, "_name_or_path", "") or "this model")
        if not (
            fits_decoder_layer(policy)
            and can_join_parameters(policy)
            and policy.logits_are_head_output
        ):
            raise RolloutError(
                "rollout.exact=true needs a model with unsharded parameters, SiLU and a fixed "
                "rotary table, without adapters and hooks; use rollout.exact=false"
            )
        weight = next(policy.parameters())
        if weight.device.type == "cpu" and weight.dtype != torch.float32:
            raise RolloutError(
                "rollout.exact=true on a CPU computes in float32, but the actor is "
                f"{weight.dtype}; set actor_rollout_ref.actor.fsdp_config.dtype=float32"
            )
        super().__init__(policy)
        self._queries_per_tile = queries_per_tile(self._layers[0].heads, self._layers[0].kv_heads)
        self.kernels = kernels_for(self._embedding.device, exact=True)

    def _read_parameters(self) -> None:
        super()._read_parameters()
        self._lm_head: Tensor = self._policy.lm.get_output_embeddings().weight

    # -- rollout ---------------------------------------------------------------------------------

    def __call__(self, ids: Tensor, positions: Tensor, layout: ExactLayout) -> Tensor:
        x = F.embedding(ids, self._embedding).float()
        for index in range(len(self._layers)):
            x = self._compute_layer(index, positions, layout, x)
        return self._apply_norm(self._norm, x)

    def decode_layout(self, cache: PagedCache, batch: BatchState) -> ExactLayout:
        queries = decode_queries(batch.block_table, batch.position)
        return ExactLayout(cache, self.kernels, queries, batch.slot)

    def prefill_layout(
        self, cache: PagedCache, blocks: list[list[int]], starts: list[int], lengths: list[int]
    ) -> ExactLayout:
        """Returns the layout of new tokens after the cached tokens of each sequence."""
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        device = self._embedding.device
        queries = segment_queries(starts, ends, blocks, self._queries_per_tile, device)
        return ExactLayout(cache, self.kernels, queries)

    def logits(self, hidden: Tensor) -> Tensor:  # [M, d] -> [M, V] float32
        return self.kernels.linear(hidden, self._lm_head, None, float32_out=True)

    def _apply_norm(self, norm: Norm, x: Tensor) -> Tensor:
        return self.kernels.add_rms_norm(x, None, *norm)[0]

    def _compute_layer(
        self, index: int, positions: Tensor, layout: ExactLayout, x: Tensor
    ) -> Tensor:
        """Computes one decoder layer of the residual stream x, which is float32."""
        layer, kernels = self._layers[index], self.kernels
        q, _, _ = kernels.rope_store(
            kernels.linear(self._apply_norm(layer.norm_in, x), *layer.qkv),
            RotaryTable(self._cos, self._sin),
            positions,
            layout.slots,
            layout.cache,
            layout.cache_layer(index),
            return_keys=False,
        )
        out = layout.attend(q, layer=index, scaling=layer.attention.scaling)
        x = x + kernels.linear(out.flatten(1), *layer.out)
        gate_up = kernels.linear(self._apply_norm(layer.norm_mlp, x), *layer.gate_up)
        return x + kernels.linear(kernels.silu_mul(gate_up), *layer.down)

    # -- training --------------------------------------------------------------------------------

    def hidden_states(self, packed: PackedRows) -> Tensor:  # [N, d]
        """Returns hidden states of the exact forward; the plain modules compute its gradients."""
        self.refresh()
        response_lengths = [length for _, length in packed.layout.children]
        self.extend_rotary_table(max(packed.layout.root_lengths) + max(response_lengths, default=0))
        layer, positions = self._layers[0], packed.position_ids
        training_layout = TrainingLayout(
            packed, self.kernels, kv_heads=layer.kv_heads, head_dim=layer.head_dim,
            block_size=BLOCK_SIZE, queries_per_tile=self._queries_per_tile,
            dtype=self._embedding.dtype,
        )  # fmt: skip
        decoder = self._policy.decoder
        x = decoder.embed_tokens(packed.input_ids).float()
        cos_sin = decoder.rotary_emb(x[None].to(self._embedding.dtype), positions[None])

        def run_module(module: nn.Module, x: Tensor) -> Tensor:
            out = module(x[None], position_embeddings=cos_sin, layout=packed.layout)
            return (out[0] if isinstance(out, tuple) else out)[0]

        for index, module in enumerate(decoder.layers):
            exact_layer = partial(self._compute_layer, index, positions, training_layout)
            x = _ExactForward.apply(
                exact_layer, partial(run_module, module), x, *module.parameters()
            )
        return _ExactForward.apply(
            partial(self._apply_norm, self._norm), decoder.norm, x, decoder.norm.weight
        )

    def log_probs(
        self, hidden: Tensor, target: Tensor, *, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns the exact log-probs [N] of the targets, and the entropies [N]."""
        # Divided in float32, as in the batch state of the rollout, so that both use the same factor.
        inverse_temperature = float(np.float32(1.0) / np.float32(temperature))
        return linear_log_probs(
            hidden,
            self._policy.lm.get_output_embeddings().weight,
            target,
            temperature=temperature,
            with_entropy=with_entropy,
            compute_statistics=partial(
                self._statistics, inverse_temperature=inverse_temperature, with_entropy=with_entropy
            ),
        )

    def _statistics(
        self, hidden: Tensor, target: Tensor, *, inverse_temperature: float, with_entropy: bool
    ) -> Statistics:
        logits = self.logits(hidden)
        inverse_temperatures = torch.full(
            (len(logits),), inverse_temperature, dtype=torch.float32, device=logits.device
        )
        log_prob = self.kernels.token_log_probs(logits, target, inverse_temperatures)
        z = logits.mul_(inverse_temperature)
        if z.is_cuda:
            return log_prob, *kernel_statistics(z, torch.zeros_like(target), 1.0, with_entropy)[1:]
        lse = torch.logsumexp(z, -1)
        return log_prob, lse, softmax_entropy(z, lse) if with_entropy else torch.zeros_like(lse)


class _ExactForward(torch.autograd.Function):
    """Computes the forward with `exact_forward` and the backward with `plain_forward`."""

    @staticmethod
    def forward(
        ctx: Context,
        exact_forward: TensorFunction,
        plain_forward: TensorFunction,
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.plain_forward = plain_forward
        ctx.save_for_backward(x, *parameters)
        return exact_forward(x)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_()
        inputs = [x, *(p for p in parameters if p.requires_grad)]
        with torch.enable_grad():
            out = ctx.plain_forward(x)
            input_grads = iter(torch.autograd.grad(out, inputs, grads[0].to(out.dtype)))
        x_grad = next(input_grads)
        return (
            *(None, None, x_grad),
            *(next(input_grads) if p.requires_grad else None for p in parameters),
        )
