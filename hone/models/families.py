"""The supported decoder families, and the features that only some of them have.

A family is supported if its log-probs were shown to equal those of plain `transformers`.
`python -m benchmarks.families` compares the rollout and trainer log-probs of every family. docs/models.md
has the results; a test checks that the results agree with this file.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from hone.errors import UserError
from hone.types import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

log = logging.getLogger(__name__)

FAMILIES = frozenset(
    """
    afmoe apertus arcee aria_text axk1 beam biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm
    deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon flex_olmo
    flint gemma gemma2 gemma3 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode
    gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe kolibri1 laguna llama mellum
    minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral nanochat
    nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe
    seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
    """.split()  # noqa: SIM905
)
"""Supported values of `model_type`."""

CPU_ONLY_FAMILIES = frozenset({"beam", "flint", "kolibri1"})
"""Families of `FAMILIES` that are refused on a GPU, because the comparison was only made on a CPU."""

DECODER_LAYER_FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}
"""The families of decoder_layer.py, each with the prefix of its class names in transformers.

Their modules have the attributes of Llama's; Qwen3's attention also has `q_norm` and `k_norm`.
"""
EXACT_FAMILIES = ("llama", "qwen2")
"""Families that `rollout.exact=true` supports."""
SHARDED_FAMILIES = frozenset(
    """
    apertus arcee cohere cohere2 cwm ernie4_5 exaone4 gemma gemma2 gemma3_text granite helium
    hunyuan_v1_dense hyperclovax jais2 llama ministral ministral3 mistral nemotron olmo qwen2 qwen3
    seed_oss smollm3 vaultgemma
    """.split()  # noqa: SIM905
)
"""Families that the native engine shards over ranks: tests compare their logits with those of one rank."""
MEGATRON_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Families that `strategy=megatron` supports."""
FAMILIES_DROPPING_KEYWORDS = frozenset({"falcon", "nemotron", "stablelm"})
"""Families whose layers do not pass keyword arguments to the attention."""
FAMILIES_WITHOUT_REPLAY = frozenset({"jetmoe"})
"""Mixtures of experts with routers in their attention or outside of the module of their experts."""

_UNSUPPORTED_FAMILIES = {
    "its positions are ALiBi biases on the scores, which rollout and trainer do not add": "bloom mpt",
    "its recurrent, convolutional or linear-attention layers read across the rows of a packed batch": """
        bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe
        mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
        qwen3_next recurrent_gemma rwkv xlstm zamba zamba2 zaya
        """,
    "its attention is chunked": "llama4 llama4_text",
    "its attention picks keys by an index or a mask of its own": """
        axk2 deepseek_v32 deepseek_v4 doge glm_moe_dsa
        """,
    "the shape of keys differs from layer to layer": """
        gemma3n gemma3n_text gemma4 gemma4_assistant gemma4_text gemma4_unified
        gemma4_unified_assistant gemma4_unified_text mimo_v2_flash
        """,
    "a layer attends more than once for each token": "diffllama hrm_text longcat_flash",
    "its experts are chosen at random in training": "phimoe",
    "its attention is computed in a way of its own, not through transformers' interface": """
        codegen cpmant gpt_neo gpt_neox_japanese gptj openai-gpt xglm xlm xlnet
        """,
    "it is an encoder, or the decoder of an encoder-decoder": """
        bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert
        data2vec-text electra ernie marian mbart megatron-bert mvp pegasus plbart
        prophetnet reformer rembert roberta roberta-prelayernorm roc_bert roformer trocr whisper
        xlm-roberta xlm-roberta-xl xmod
        """,
    "it reads more than text": """
        emu3 fuyu got_ocr2 mllama moshi moss_transcribe_diarize musicgen musicgen_melody
        phi4_multimodal
        """,
}
"""Refused families, by the reason."""
_REASON_BY_FAMILY = {
    family: reason for reason, names in _UNSUPPORTED_FAMILIES.items() for family in names.split()
}
_LENGTH_DEPENDENT_ROPES = {"dynamic", "longrope"}


class UnsupportedModel(UserError, ValueError):
    """The model, or a change to its config, is not supported."""


def check_family_supported(family: str, path: str, *, device: torch.device | None = None) -> None:
    """Raises UnsupportedModel for a `model_type` that is not supported on the device."""
    if family not in FAMILIES:
        reason = _REASON_BY_FAMILY.get(family, "it has not been shown equal to plain transformers")
        raise UnsupportedModel(
            f"{path} is a {family} model, which is not supported: {reason}. docs/models.md lists the "
            "supported families"
        )
    if family in CPU_ONLY_FAMILIES and device is not None and device.type == "cuda":
        raise UnsupportedModel(
            f"{path} is a {family} model, which is supported on the CPU only: on a GPU it has not been "
            "shown equal to plain transformers. Use trainer.device=cpu, or a family of docs/models.md"
        )


def check_config_supported(
    config: PreTrainedConfig, path: str, *, device: torch.device | None = None
) -> None:
    """Raises UnsupportedModel, before weights are loaded, for a family or config that is not supported."""
    check_family_supported(config.model_type, path, device=device)
    text_config = config.get_text_config()
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    if unsupported := sorted(layer_types - {"full_attention", "sliding_attention"}):
        raise UnsupportedModel(
            f"{path} has layers of kind {', '.join(unsupported)}, which would mix the rows of a packed "
            "batch; use a model with only full and sliding attention"
        )
    if unsupported := sorted(set(_rope_types(text_config)) & _LENGTH_DEPENDENT_ROPES):
        raise UnsupportedModel(
            f"{path} has {unsupported[0]} rotary positions, which depend on the length of a row, but rows "
            "of many lengths are computed together; use a model with another rope_type"
        )
    for name in ("alibi", "use_bidirectional_attention", "is_encoder_decoder"):
        if config_field(text_config, name):
            raise UnsupportedModel(
                f"{path} has {name}={config_field(text_config, name)} in its config, which is not supported; "
                "use a model without it"
            )


def override_fields(config: PreTrainedConfig, values: Settings, path: str) -> None:
    """Changes fields of a config; the old names `rope_theta` and `rope_scaling` change `rope_parameters`."""
    for key, value in values.items():
        rope = getattr(config, "rope_parameters", None) or {}
        if key == "attn_implementation":
            log.warning("override_config.%s=%s: hone's own attention is used", key, value)
        elif key in ("dtype", "torch_dtype"):
            log.warning("override_config.%s=%s: fsdp_config.model_dtype is used", key, value)
        elif "drop" in key and isinstance(value, float | int):
            if value:
                raise UnsupportedModel(
                    f"override_config.{key}={value}: models train without dropout, with which the trained "
                    "policy would not be that of the rollout; set it to 0"
                )
        elif key == "rope_theta" and key in rope:
            config.rope_parameters = {**rope, key: value}
        elif key in ("rope_scaling", "rope_parameters") and "rope_theta" in rope:
            names = ("rope_theta", "partial_rotary_factor")
            unscaled = {name: rope[name] for name in names if name in rope}
            scaling = dict(value or {})
            rope_type = scaling.pop("type", "default")
            config.rope_parameters = {**unscaled, "rope_type": rope_type, **scaling}
        elif key != "rope_scaling" and hasattr(config, key):
            setattr(config, key, value)
        else:
            raise UnsupportedModel(
                f"override_config has {key!r}, which {type(config).__name__} of {path} does not have"
            )
    if any(key.startswith("rope_") for key in values):
        _check_rope(config, path)


def _check_rope(config: PreTrainedConfig, path: str) -> None:
    """Raises if a rotary table cannot be made from overridden parameters."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known_types = {"default", *ROPE_INIT_FUNCTIONS}
    for rope_type in _rope_types(config):
        if rope_type not in known_types:
            raise UnsupportedModel(
                f"override_config of {path} has rope_type={rope_type!r}; use one of "
                f"{', '.join(sorted(known_types))}"
            )
    try:
        config.standardize_rope_params()
        config.validate_rope()
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"override_config of {path} has rotary parameters {config.rope_parameters} that its model "
            f"cannot use: {error}"
        ) from error


def disable_dropout(config: PreTrainedConfig) -> None:
    """Disables dropout and router noise, which would make rollout and training different policies."""
    from transformers import PreTrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            disable_dropout(value)
        elif ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.0)


def _rope_types(text_config: PreTrainedConfig) -> Iterator[str]:
    """Yields the `rope_type` of the config's rotary table, or of its tables per layer type."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    for table in (parameters, *parameters.values()):
        if isinstance(table, dict) and isinstance(rope_type := table.get("rope_type"), str):
            yield rope_type


def config_field(config: PreTrainedConfig, name: str) -> Any:
    """Returns a field of a config, or None if its class lacks the field, which the model then ignores."""
    names = {field.name for field in dataclasses.fields(config)} | set(config.attribute_map or ())
    has_field = name in names or hasattr(type(config), name)
    return getattr(config, name, None) if has_field else None


def logit_softcap_and_scale(config: PreTrainedConfig) -> tuple[float | None, float]:
    """Returns the soft cap and the scale that a family applies to the output of the LM head."""
    scale = float(config_field(config, "logit_scale") or 1.0)
    if scaling := config_field(config, "logits_scaling"):
        scale *= scaling if config.model_type == "hyperclovax" else 1.0 / scaling
    return config_field(config, "final_logit_softcapping"), scale


def key_shape(config: PreTrainedConfig) -> tuple[int, int]:
    """Returns the number of heads and the head dimension of the keys that one layer caches."""
    text_config = config.get_text_config()
    heads = text_config.num_attention_heads
    head_dim = config_field(text_config, "head_dim") or text_config.hidden_size // heads
    if config_field(text_config, "kv_lora_rank"):
        # Multi-head latent attention: every head has its own keys, padded to the width of values.
        key_dim = text_config.qk_nope_head_dim + text_config.qk_rope_head_dim
        return heads, max(key_dim, text_config.v_head_dim)
    if text_config.model_type == "falcon":
        shares_one_key = text_config.multi_query and not text_config.new_decoder_architecture
        return (1 if shares_one_key else heads), head_dim
    if text_config.model_type == "gpt_bigcode":
        return (1 if text_config.multi_query else heads), head_dim
    if text_config.model_type == "jetmoe":  # the experts of a token share its keys
        return (
            text_config.num_key_value_heads * text_config.num_experts_per_tok,
            text_config.kv_channels,
        )
    return config_field(text_config, "num_key_value_heads") or heads, head_dim
