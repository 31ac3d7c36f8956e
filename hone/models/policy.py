"""The models that the engine trains: decoders that map packed rows to one value per response token.

`PolicyModel` returns log-probabilities (and entropies), `ValueModel` the value before each token, and
`ScoreModel` the score of a reward model. Their forward passes hold no padding and no full logits.

The code of the Hugging Face decoders is unchanged. `register_attention` adds `layout_attention` to their
attention implementations. A layout decides which keys a query attends to: packed rows in training, a
key-value cache in rollout.
"""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.models.families import FAMILIES_DROPPING_KEYWORDS, key_shape, logit_softcap_and_scale
from hone.ops.attention import AttentionOptions
from hone.ops.logprobs import LogitOptions, linear_log_probs, linear_sum_pi_squared, matmul_fp32
from hone.ops.rows import PackedRows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel

    from hone.models.routing import Routing
    from hone.rollout.native.exact_decoder import ExactDecoder


class Layout(Protocol):
    """Decides which keys each query of one forward pass attends to."""

    def attend(
        self,
        q: Tensor,  # [N, H, D]
        k: Tensor,  # [N, KV, D]
        v: Tensor,  # [N, KV, D]
        options: AttentionOptions,
    ) -> Tensor: ...  # [N, H, D]


class AttentionModule(Protocol):
    """The attribute that the attention modules of all families have."""

    layer_idx: int


def layout_attention(
    module: AttentionModule,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | EllipsisType | None = ...,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    layout: Layout | None = None,
    **_: Tensor | float | None,
) -> tuple[Tensor, None]:
    """Computes attention with the layout; transformers calls it in every attention layer."""
    layout = layout if layout is not None else getattr(attention_mask, "hone_layout", None)
    if layout is None:
        raise RuntimeError(
            f"{type(module).__name__} was called without a layout; call the model with layout=… "
            "or load it with another attn_implementation"
        )
    key_dim, value_dim = query.shape[-1], value.shape[-1]
    heads = [query, key, value]
    if key_dim != value_dim:  # latent attention: pad, because keys and values share a cache
        padded_dim = max(key_dim, value_dim)
        heads = [F.pad(x, (0, padded_dim - x.shape[-1])) for x in heads]
    # Some modules do not pass their window, because transformers' mask would apply it.
    window = attention_window(module) if sliding_window is ... else sliding_window
    scaling = scaling if scaling is not None else key_dim**-0.5
    options = AttentionOptions(module.layer_idx, scaling, window, softcap, s_aux)
    q, k, v = (x[0].transpose(0, 1) for x in heads)
    out = layout.attend(q, k, v, options)
    return out[None, ..., :value_dim], None


def attention_window(attention: AttentionModule) -> int | None:
    """Returns the sliding window of an attention module, or None for full attention."""
    config = getattr(attention, "config", None)
    # A mistral module has no attribute `sliding_window`; it reads the config.
    is_mistral = getattr(config, "model_type", None) == "mistral"
    config_window = getattr(config, "sliding_window", None) if is_mistral else None
    return getattr(attention, "sliding_window", config_window)


def forward_options(lm: PreTrainedModel, layout: Layout) -> dict[str, Layout | Tensor]:
    """Returns the argument that passes a layout to the decoder: `layout`, or a mask that holds it."""
    if lm.config.model_type not in FAMILIES_DROPPING_KEYWORDS:
        return {"layout": layout}
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)  # transformers passes 4D masks unchanged
    vars(mask)["hone_layout"] = layout
    return {"attention_mask": mask}


def register_attention() -> str:
    """Registers hone's attention with transformers and returns its `attn_implementation`; idempotent."""
    from transformers import AttentionInterface
    from transformers.models.falcon.modeling_falcon import FALCON_ATTENTION_CLASSES

    AttentionInterface.register("hone", layout_attention)
    FALCON_ATTENTION_CLASSES["hone"] = _falcon_attention()
    return "hone"


def _falcon_attention() -> type:
    """Returns a Falcon attention class that uses the layout; Falcon ignores the attention interface."""
    from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

    class FalconLayoutAttention(FalconAttention):
        def forward(
            self,
            hidden_states: Tensor,  # [1, N, d]
            alibi: Tensor | None,
            attention_mask: Tensor,
            position_embeddings: tuple[Tensor, Tensor],
            **_: Tensor | float | None,
        ) -> tuple[Tensor, None]:
            heads = self._split_heads(self.query_key_value(hidden_states))
            q, k, v = (x.transpose(1, 2) for x in heads)
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
            out, _weights = layout_attention(self, q, k, v, attention_mask)
            return self.dense(out.flatten(2)), None

    return FalconLayoutAttention


def hidden_states(decoder: PreTrainedModel, packed: PackedRows) -> Tensor:  # [N, d]
    """Returns the decoder's last hidden states of packed rows."""
    output = decoder(
        input_ids=packed.input_ids[None],
        position_ids=packed.position_ids[None],
        use_cache=False,
        **forward_options(decoder, packed.layout),
    )
    return output.last_hidden_state[0]


class DecoderModel(nn.Module):
    """Base of the models: a Hugging Face model that PEFT may have wrapped."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm

    @property
    def decoder(self) -> PreTrainedModel:
        """The decoder without the head and without the PEFT wrapper."""
        lm = without_peft(self.lm)
        return getattr(lm, lm.base_model_prefix)


class PolicyModel(DecoderModel):
    """A causal language model as a policy."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__(lm)
        self.exact: ExactDecoder | None = None
        """The forward of exact mode, where rollout and trainer are bitwise equal; None otherwise."""
        self.head_group: ProcessGroup | None = None
        """The ranks over which the vocabulary of the LM head is sharded (hone/engine/tensor_parallel.py)."""
        self.routing: Routing | None = None
        """Records and replays the experts of tokens; None if routing is not enabled."""
        self._softcap, self._logit_scale = logit_softcap_and_scale(lm.config)

    def enable_routing(self) -> Routing:
        """Enables recording and replay of expert routing; raises for a model without experts."""
        if self.routing is None:
            from hone.models.routing import Routing

            self.routing = Routing(self.decoder)
        return self.routing

    def addresses(self) -> list[int]:
        """Returns the memory address of each parameter; sharding and offload change them."""
        return [p.data_ptr() for p in self.parameters()]

    @property
    def key_shape(self) -> tuple[int, int]:
        """The number of heads and the head dimension of the keys that one layer caches."""
        return key_shape(self.lm.config.get_text_config())

    @property
    def logits_are_head_output(self) -> bool:
        """Whether the logits are the plain output of this LM head: unsharded, without soft cap and scale."""
        return self._softcap is None and self._logit_scale == 1.0

    def logits(self, hidden: Tensor) -> Tensor:  # [M, d] -> [M, V] float32, before temperature
        """Returns full logits, for decoding steps with one token per sequence."""
        head = self.lm.get_output_embeddings()
        logits = matmul_fp32(hidden, head.weight)
        if head.bias is not None:
            logits += head.bias
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits * self._logit_scale if self._logit_scale != 1.0 else logits

    def forward(
        self,
        packed: PackedRows,
        *,
        temperature: float,
        with_entropy: bool = False,
        with_sum_pi_squared: bool = False,
        with_routing: bool = False,
    ) -> dict[str, Tensor]:
        if self.routing is not None:
            experts_by_layer = self.routing.start(packed.experts, record=with_routing)
        if self.exact is not None:
            hidden = self.exact.hidden_states(packed)
        else:
            hidden = hidden_states(self.decoder, packed)
        hidden = hidden.index_select(0, packed.predicting_position)
        head = self.lm.get_output_embeddings()
        options: LogitOptions = {
            "temperature": temperature,
            "bias": head.bias,
            "softcap": self._softcap,
            "logit_scale": self._logit_scale,
        }
        if self.head_group is not None:
            from hone.ops.tensor_parallel import vocab_parallel_outputs

            outputs = vocab_parallel_outputs(
                hidden, head.weight, packed.target, group=self.head_group,
                with_entropy=with_entropy, with_sum_pi_squared=with_sum_pi_squared, **options,
            )  # fmt: skip
            return {name: packed.unpack(values) for name, values in outputs.items()}
        if self.exact is not None:
            log_probs, entropy = self.exact.log_probs(
                hidden, packed.target, temperature=temperature, with_entropy=with_entropy
            )
        else:
            log_probs, entropy = linear_log_probs(
                hidden, head.weight, packed.target, with_entropy=with_entropy, **options
            )
        outputs = {"log_probs": packed.unpack(log_probs)}
        if with_entropy:
            outputs["entropy"] = packed.unpack(entropy)
        if with_sum_pi_squared:
            outputs["sum_pi_squared"] = packed.unpack(
                linear_sum_pi_squared(hidden, head.weight, **options)
            )
        if self.routing is not None:
            outputs |= self.routing.outputs(packed, experts_by_layer)
        return outputs


class ValueModel(DecoderModel):
    """A decoder with a scalar head: the critic's value before each response token."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__(lm)
        hidden_size = lm.get_output_embeddings().weight.shape[1]
        dtype = next(lm.parameters()).dtype
        self.value_head = nn.Linear(hidden_size, 1, dtype=dtype)
        # A zero head makes the first returns pure Monte-Carlo, without the noise of a random head.
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        lm.set_output_embeddings(None)

    def forward(self, packed: PackedRows) -> dict[str, Tensor]:
        hidden = hidden_states(self.decoder, packed).index_select(0, packed.predicting_position)
        values = self.value_head(hidden).float().squeeze(-1)
        return {"values": packed.unpack(values)}


class ScoreModel(DecoderModel):
    """A Hugging Face classifier as a reward model: it scores the text before each response token.

    With one label, the score is the logit. With two labels (bad, good), the score is the log-odds of good:
    the difference of the logits.
    """

    @property
    def head(self) -> nn.Module:
        """The linear layer over the last hidden state, or PEFT's trained copy of the layer."""
        return without_peft(self.lm).score

    def forward(self, packed: PackedRows) -> dict[str, Tensor]:
        hidden = hidden_states(self.decoder, packed).index_select(0, packed.predicting_position)
        logits = self.head(hidden).float()  # [M, labels]
        scores = logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0]
        return {"scores": packed.unpack(scores)}


Model: TypeAlias = PolicyModel | ValueModel | ScoreModel
"""A model that the engine trains."""


def without_peft(lm: PreTrainedModel) -> PreTrainedModel:
    """Returns the model without the PEFT wrapper."""
    return lm.get_base_model() if hasattr(lm, "peft_config") else lm
