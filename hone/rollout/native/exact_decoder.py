"""Exact mode's one forward: decoding, prompts and the trainer's log-probs all run it, layer by layer.

Every product, norm and attention comes from kernels whose sums run in an order that no batch changes.
Gradients are the plain modules': a layer is computed again by them on the way back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.models.policy import PolicyModel
from hone.ops.autograd import Context
from hone.ops.logprobs import backward_on
from hone.ops.packing import PackedRows
from hone.rollout.contract import RolloutError
from hone.rollout.native.decoder import is_plain
from hone.rollout.native.exact_layouts import (
    ExactLayout,
    TrainingLayout,
    decode_queries,
    prefill_layout,
    queries_per_tile,
)
from hone.rollout.native.fused_decoder import JoinedDecoder, can_join
from hone.rollout.native.kernel_choice import exact_kernels_for
from hone.rollout.native.kernels_reference import Turn
from hone.rollout.native.paged_cache import PagedCache
from hone.rollout.native.paged_rows import RowState
from hone.rollout.native.paged_schedule import PAGE_SIZE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Map = Callable[[Tensor], Tensor]
FAMILIES = ("llama", "qwen2")
_CHUNK_BYTES = 2**29
"""Logits alive at once in the trainer's forward on a GPU."""


def refuse_unless_exact(config: PreTrainedConfig, path: str) -> None:
    """Say no before a model is loaded; `config` is the model's own."""
    family = getattr(config, "model_type", "of unknown family")
    if family not in FAMILIES:
        raise RolloutError(
            f"rollout.exact=true is for the families {' and '.join(FAMILIES)}, and {path} is {family}; "
            "use rollout.exact=false, and read rollout_corr/* for the gap"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise RolloutError(
            f"rollout.exact=true is for full attention, and {path} has {', '.join(sorted(kinds))}; "
            "use rollout.exact=false"
        )


class ExactDecoder(JoinedDecoder):
    """The policy's own parameters, computed exactly; both a rollout's forward and a trainer's."""

    def __init__(self, policy: PolicyModel) -> None:
        config = policy.lm.config
        refuse_unless_exact(config, getattr(config, "_name_or_path", "") or "this model")
        if not (is_plain(policy) and can_join(policy) and policy.plain_head):
            raise RolloutError(
                "rollout.exact=true needs a plain model (whole parameters, no adapters, no hooks, "
                "SiLU, fixed rotary table); use rollout.exact=false"
            )
        weight = next(policy.parameters())
        if weight.device.type == "cpu" and weight.dtype != torch.float32:
            raise RolloutError(
                f"rollout.exact=true on a CPU computes in float32, and the actor is {weight.dtype}; set "
                "actor_rollout_ref.actor.fsdp_config.dtype=float32"
            )
        heads = config.num_attention_heads
        self._kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self._per_tile = queries_per_tile(heads, self._kv_heads)
        self._head_dim = policy.decoder.layers[0].self_attn.head_dim
        super().__init__(policy)
        self.kernels = exact_kernels_for(self._embedding.device)

    def _read(self) -> None:
        super()._read()
        self._head: Tensor = self._policy.lm.get_output_embeddings().weight

    # -- what a rollout asks ---------------------------------------------------------------------

    def __call__(self, ids: Tensor, positions: Tensor, layout: ExactLayout) -> Tensor:
        x = F.embedding(ids, self._embedding).float()
        for index in range(len(self._layers)):
            x = self._layer(index, x, positions, layout)
        return self._normed(x, self._norm)

    def decode_layout(self, cache: PagedCache, rows: RowState) -> ExactLayout:
        queries = decode_queries(rows.table, rows.position)
        return ExactLayout(cache, self.kernels, rows.slot, queries)

    def prefill_layout(
        self, cache: PagedCache, pages: list[list[int]], starts: list[int], lengths: list[int]
    ) -> ExactLayout:
        device = self._embedding.device
        return prefill_layout(cache, self.kernels, pages, starts, lengths, self._per_tile, device)

    def logits(self, hidden: Tensor) -> Tensor:  # [M, d] -> [M, V] float32
        return self.kernels.linear(hidden, self._head, None, wide=True)

    def _normed(self, x: Tensor, norm: tuple[Tensor, float]) -> Tensor:
        return self.kernels.add_rms_norm(x, None, *norm)[0]

    def _layer(self, index: int, x: Tensor, positions: Tensor, layout: ExactLayout) -> Tensor:
        """One decoder layer; sums of the residual stream are float32."""
        layer, kernels = self._layers[index], self.kernels
        q, _, _ = kernels.rope_store(
            kernels.linear(self._normed(x, layer.norm_in), *layer.qkv),
            Turn(self._cos, self._sin),
            positions,
            layout.slots,
            layout.cache,
            index if layout.cache.layers > 1 else 0,
            keep_keys=False,
        )
        out = layout.attend(q, layer=index, scaling=layer.scaling)
        x = x + kernels.linear(out.flatten(1), *layer.out)
        gate_up = kernels.linear(self._normed(x, layer.norm_mlp), *layer.gate_up)
        return x + kernels.linear(kernels.silu_mul(gate_up), *layer.down)

    # -- what a trainer asks ---------------------------------------------------------------------

    def hidden_states(self, packed: PackedRows) -> Tensor:  # [N, d]
        """As the decoder's modules give, with their gradients and exact values."""
        self.refresh()
        longest = max(packed.layout.root_lengths) + max(
            (n for _, n in packed.layout.children), default=0
        )
        self.reach(longest)
        layout = TrainingLayout(
            packed, self.kernels, kv_heads=self._kv_heads, head_dim=self._head_dim,
            page_size=PAGE_SIZE, per_tile=self._per_tile, dtype=self._embedding.dtype,
        )  # fmt: skip
        decoder = self._policy.decoder
        x = decoder.embed_tokens(packed.input_ids).float()
        turns = decoder.rotary_emb(x[None].to(self._embedding.dtype), packed.position_ids[None])
        for index, module in enumerate(decoder.layers):

            def exact(x: Tensor, index: int = index) -> Tensor:
                return self._layer(index, x, packed.position_ids, layout)

            def plain(x: Tensor, module: nn.Module = module) -> Tensor:
                out = module(x[None], position_embeddings=turns, layout=packed.layout)
                return (out[0] if isinstance(out, tuple) else out)[0]

            x = _Exactly.apply(exact, plain, x, *module.parameters())
        norm = decoder.norm
        return _Exactly.apply(lambda x: self._normed(x, self._norm), norm, x, norm.weight)

    def log_probs(
        self, hidden: Tensor, target: Tensor, *, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """As `linear_log_probs`, with exact values."""
        head = self._policy.lm.get_output_embeddings()
        return _ExactLogProbs.apply(self, hidden, head.weight, target, temperature, with_entropy)

    def statistics(
        self, hidden: Tensor, target: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """log p(target), the norm of the logits at this temperature, and entropy; each [M] float32."""
        rows = max(128, _CHUNK_BYTES // (4 * len(self._head)) // 128 * 128)
        # As the rollout's rows hold it: the quotient of two float32.
        inverse = float(np.float32(1.0) / np.float32(temperature))
        made = []
        for begin in range(0, len(hidden), rows):
            part = slice(begin, begin + rows)
            logits = self.logits(hidden[part])
            heat = torch.full((len(logits),), inverse, dtype=torch.float32, device=logits.device)
            log_prob = self.kernels.log_probs_of(logits, target[part], heat)
            norm, entropy = _norm_and_entropy(logits.mul_(inverse), with_entropy)
            made.append(torch.stack([log_prob, norm, entropy]))
        whole = torch.cat(made, 1) if made else hidden.new_zeros(3, 0, dtype=torch.float32)
        return whole[0], whole[1], whole[2]


def _norm_and_entropy(z: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
    if z.is_cuda:
        from hone.ops.logprobs_triton import logit_statistics

        anything = torch.zeros(len(z), dtype=torch.int64, device=z.device)
        return logit_statistics(z, anything, 1.0, with_entropy)[1:]
    norm = torch.logsumexp(z, -1)
    if not with_entropy:
        return norm, torch.zeros_like(norm)
    p = torch.sub(z, norm[:, None]).exp_()
    return norm, norm - torch.linalg.vecdot(p, z)


class _Exactly(torch.autograd.Function):
    """Values of `exact`, gradients of `plain`, which is computed again on the way back."""

    @staticmethod
    def forward(ctx: Context, exact: Map, plain: Map, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(x, *parameters)
        return exact(x)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_()
        wanted = [x, *(p for p in parameters if p.requires_grad)]
        with torch.enable_grad():
            out = ctx.plain(x)
            made = iter(torch.autograd.grad(out, wanted, grads[0].to(out.dtype)))
        return (
            None,
            None,
            next(made),
            *(next(made) if p.requires_grad else None for p in parameters),
        )


class _ExactLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        exact: ExactDecoder,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        log_probs, norm, entropy = exact.statistics(hidden, target, temperature, with_entropy)
        ctx.save_for_backward(hidden, weight, target, norm, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *saved = ctx.saved_tensors
        factor, with_weight = 1.0 / ctx.temperature, ctx.needs_input_grad[2]
        g_hidden, g_weight, *_ = backward_on(hidden.device)(
            hidden, *saved, *grads, factor=factor, with_weight=with_weight
        )
        return None, g_hidden, g_weight, None, None, None
