"""Experts and routers of a megatron-core MoE layer that compute the same values as the Hugging Face model.

megatron-core dispatches tokens to the ranks of their experts. `Router` chooses experts as transformers does
and can replay recorded experts. `PackedExperts` has the layout of a Hugging Face checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from hone.models.routing import replay_experts
from hone.ops.attention import SegmentLayout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass
class MicroBatchParams(PackedSeqParams):  # type: ignore[misc]
    """The layout and routing of one micro-batch, which megatron-core passes to every layer."""

    layout: SegmentLayout | None = None
    positions: Tensor | None = None  # [N]
    replay: Tensor | None = None
    """The recorded experts [n, MoE layers, k] of this rank's tokens; None if the routers choose."""
    experts: dict[int, Tensor] = field(default_factory=dict)
    """The experts [n, k] that this rank's tokens used, by MoE layer index."""
    agreement: dict[int, Tensor] = field(default_factory=dict)
    """The share [n] of the replayed experts that the router would have chosen, by MoE layer index."""


class Router(nn.Module):
    """Chooses the experts of each token as transformers does: top-k after a softmax in float32."""

    moe_layer_index: int
    """The index of this router's layer among the MoE layers of the whole model."""
    normalizes_gates: bool
    """Whether the gates of a token add up to 1."""
    params: MicroBatchParams

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.top_k = config.moe_router_topk
        self.dtype = _ROUTER_DTYPES.get(config.moe_router_dtype, config.params_dtype)
        shape = config.num_moe_experts, config.hidden_size
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def set_layer_number(self, number: int) -> None:
        """Does nothing: megatron-core's number counts dense layers too."""

    def forward(self, hidden: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        """Returns the gates and the routing mask [n, experts] of hidden states [n, 1, d]."""
        logits = F.linear(hidden[:, 0].to(self.dtype), self.weight.to(self.dtype))
        scores = logits.softmax(-1, dtype=torch.float32)
        experts = scores.topk(self.top_k, -1).indices
        if self.params.replay is not None:
            recorded = self.params.replay[:, self.moe_layer_index]
            experts, self.params.agreement[self.moe_layer_index] = replay_experts(experts, recorded)
        self.params.experts[self.moe_layer_index] = experts
        gates = scores.gather(1, experts)
        if self.normalizes_gates:
            gates = gates / gates.sum(-1, keepdim=True)
        weights = torch.zeros_like(logits).scatter(1, experts, gates.to(logits.dtype))
        return weights, torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)


class PackedExperts(nn.Module):
    """The experts of this rank; an expert-tensor-parallel rank holds a shard of each expert."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *, pg_collection: Any
    ) -> None:
        super().__init__()
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        shapes = (2 * width, config.hidden_size), (config.hidden_size, width)
        self.gate_up, self.down = (
            nn.Parameter(torch.empty(num_local_experts, *shape, dtype=config.params_dtype))
            for shape in shapes
        )
        for parameter in (self.gate_up, self.down):
            # megatron-core reduces the gradients of experts over the ranks that hold the same experts.
            parameter.allreduce = False  # type: ignore[attr-defined]

    def forward(
        self, tokens: Tensor, tokens_per_expert: Tensor, gates: Tensor
    ) -> tuple[Tensor, None]:
        """Applies the experts to the hidden states [n, d] of tokens that are sorted by expert."""
        ends = tokens_per_expert.cumsum(0).to(tokens.device, torch.int32)
        gate, up = F.grouped_mm(tokens, self.gate_up.mT, offs=ends).chunk(2, -1)
        out = F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=ends)
        return (out * gates[:, None]).to(tokens.dtype), None


class MoETransformerLayer(TransformerLayer):  # type: ignore[misc]
    """A MoE layer that passes the parameters of the micro-batch to its router."""

    def forward(self, *args: Any, packed_seq_params: MicroBatchParams, **kwargs: Any) -> Any:
        # A recomputed layer runs again in the backward pass, so each forward sets its own parameters.
        self.mlp.router.params = packed_seq_params
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


def moe_settings(hf_config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the fields of megatron-core's config for a mixture of experts."""
    return {
        "num_moe_experts": hf_config.num_experts,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "none",
    }


def moe_block() -> ModuleSpec:
    """Returns the spec of the MoE block of a layer."""
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(experts=PackedExperts, router=Router),
        metainfo={"fuse_pre_mlp_layernorm": False},
    )


def moe_layer_indices(hf_config: PreTrainedConfig) -> list[int]:
    """Returns the indices of the MoE layers; other layers have one dense MLP."""
    if hf_config.model_type != "qwen3_moe" or not hf_config.num_experts:
        return []
    candidates = range(
        hf_config.decoder_sparse_step - 1,
        hf_config.num_hidden_layers,
        hf_config.decoder_sparse_step,
    )
    return [layer for layer in candidates if layer not in hf_config.mlp_only_layers]
