"""Builds one pipeline stage of a megatron-core GPTModel from a Hugging Face config.

The stage runs packed rows. Attention, norms and rotary positions are hone's; linear layers and embeddings are
megatron-core's own, without Transformer Engine. In shapes, N is the number of packed tokens, H of heads, and
D the head dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from hone.config.engine import MegatronConfig
from hone.engine.megatron.experts import (
    MicroBatchParams,
    MoETransformerLayer,
    moe_block,
    moe_layer_indices,
    moe_settings,
)
from hone.engine.megatron.refusals import passed_overrides
from hone.models.families import config_field, key_shape
from hone.ops.attention import AttentionOptions
from hone.ops.decoder import rms_norm

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class RmsNorm(nn.Module):
    """An RMS norm whose weight has the attribute `sequence_parallel` that megatron-core reads."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class RotaryPositions(nn.Module):
    """Rotary angles of packed positions, from the inverse frequencies of the Hugging Face model."""

    inv_freq: Tensor

    def __init__(self, inverse_frequencies: Tensor) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies.float(), persistent=False)

    def get_rotary_seq_len(
        self, context: None, decoder: None, hidden: Tensor, config: None, packed: MicroBatchParams
    ) -> Tensor:
        """Returns the positions, which megatron-core passes to `forward`."""
        assert packed.positions is not None
        return packed.positions

    def forward(self, positions: Tensor, **_: Any) -> Tensor:  # [N, 1, 1, D]
        angles = torch.outer(positions.float(), self.inv_freq)
        return torch.cat((angles, angles), -1)[:, None, None, :]


class PackedAttention(nn.Module):
    """Attention over packed rows, in which a token attends only to its own row."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.options = AttentionOptions(layer_number - 1, config.softmax_scale)

    def forward(
        self,
        query: Tensor,  # [N, 1, H, D]
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: MicroBatchParams,
        **_: Any,
    ) -> Tensor:  # [N, 1, H * D]
        assert packed_seq_params.layout is not None
        q, k, v = (x.squeeze(1) for x in (query, key, value))
        return packed_seq_params.layout.attend(q, k, v, self.options).flatten(1)[:, None]


class Stage(GPTModel):  # type: ignore[misc]
    """The layers of this pipeline stage; the last stage returns hidden states, not logits."""

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def transformer_config(
    hf_config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    rotary_scale: float,
    gradient_checkpointing: bool,
    megatron: MegatronConfig,
) -> TransformerConfig:
    """Returns megatron-core's config for a Hugging Face model."""
    kv_heads, head_dim = key_shape(hf_config)
    has_bias = hf_config.model_type == "qwen2" or config_field(hf_config, "attention_bias")
    fusions = ("bias_activation", "masked_softmax", "bias_dropout", "gradient_accumulation")
    settings: dict[str, Any] = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": kv_heads,
        "kv_channels": head_dim,
        "softmax_scale": head_dim**-0.5 * rotary_scale**2,  # queries and keys are both scaled
        "ffn_hidden_size": hf_config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": bool(has_bias),
        "qk_layernorm": hf_config.model_type in ("qwen3", "qwen3_moe"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "sequence_parallel": megatron.sequence_parallel and megatron.tensor_model_parallel_size > 1,
        "variable_seq_lengths": True,
        # megatron-core requires this dispatcher for variable lengths, even without experts.
        "moe_token_dispatcher_type": "alltoall",
        "deallocate_pipeline_outputs": False,
        # The losses of micro-batches are shares of one loss, so gradients are summed, not averaged.
        "calculate_per_token_loss": True,
        "use_cpu_initialization": device.type == "cpu",
        "perform_initialization": False,
        **{f"{name}_fusion": False for name in fusions},
        "apply_rope_fusion": False,
    }
    if moe_layer_indices(hf_config):
        settings |= moe_settings(hf_config) | {
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        }
    overrides = passed_overrides(megatron)
    if gradient_checkpointing and overrides.get("recompute_granularity") != "selective":
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(**settings | overrides)


def build_stage(
    hf_config: PreTrainedConfig,
    config: TransformerConfig,
    inverse_frequencies: Tensor,
    *,
    is_tied: bool,
) -> Stage:
    """Builds the layers of this rank's pipeline stage, with uninitialized weights."""
    dense, sparse = _layer_spec(config), _layer_spec(config)
    sparse.module, sparse.submodules.mlp = MoETransformerLayer, moe_block()
    moe_layers = moe_layer_indices(hf_config)
    first_layer = get_transformer_layer_offset(config)
    stage_layers = range(first_layer, first_layer + get_num_layers_to_build(config))
    block = TransformerBlockSubmodules(
        layer_specs=[sparse if layer in moe_layers else dense for layer in stage_layers],
        layer_norm=RmsNorm,
    )
    tensor_size = config.tensor_model_parallel_size
    stage = Stage(
        config,
        block,
        vocab_size=hf_config.vocab_size + (-hf_config.vocab_size) % tensor_size,  # padded
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=is_tied,
        position_embedding_type="rope",
        parallel_output=True,
    )
    stage.rotary_pos_emb = RotaryPositions(inverse_frequencies)
    if stage.pre_process and hf_config.pad_token_id is not None:
        _freeze_padding(stage.embedding.word_embeddings, hf_config.pad_token_id)
    for index, layer in zip(stage_layers, stage.decoder.layers, strict=True):
        if index in moe_layers:
            router = layer.mlp.router
            router.moe_layer_index = moe_layers.index(index)
            router.normalizes_gates = hf_config.norm_topk_prob
    return stage


def _freeze_padding(embedding: nn.Module, pad_token_id: int) -> None:
    """Stops the gradient of the padding token's embedding, as Hugging Face's `padding_idx` does."""

    def detach(module: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        is_padding = (inputs[0] == pad_token_id)[..., None]  # [1, N, 1]
        if module.reduce_scatter_embeddings:  # a tensor-parallel rank's part of [N, 1, d]
            group = module.tp_group
            is_padding = is_padding.transpose(0, 1).chunk(group.size())[group.rank()]
        return torch.where(is_padding, output.detach(), output)

    embedding.register_forward_hook(detach)


def _layer_spec(config: TransformerConfig) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    submodules = layer.submodules
    submodules.input_layernorm = submodules.pre_mlp_layernorm = RmsNorm
    attention = submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return layer
