"""What hone sets of megatron-core's config cannot be overridden."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from hone.config.engine import MegatronConfig
from hone.config.errors import ConfigError
from hone.engine.megatron.refusals import RESERVED, is_reserved, refuse_unknown

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow  # importing megatron-core takes seconds


def test_all_settings_but_recomputation_and_fusions_are_reserved(monkeypatch):
    from hone.engine.megatron import model

    for name in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor"):
        size = f"get_{name}_parallel_world_size"
        monkeypatch.setattr(model.parallel_state, size, lambda: 1)
    settings: dict[str, object] = {}
    monkeypatch.setattr(model, "TransformerConfig", lambda **given: settings.update(given))
    model.transformer_config(
        AutoConfig.for_model("qwen3_moe"),
        torch.float32,
        torch.device("cpu"),
        rotary_scale=1.0,
        gradient_checkpointing=True,
        megatron=MegatronConfig(),
    )
    assert settings["num_moe_experts"] == 128
    free = {name for name in settings if not is_reserved(name, "a value")}
    assert all(name.startswith("recompute_") or name.endswith("_fusion") for name in free), free


def test_every_reserved_name_is_a_field_and_an_unknown_one_is_refused():
    from megatron.core.transformer.transformer_config import TransformerConfig

    assert not RESERVED - TransformerConfig.__dataclass_fields__.keys()
    with pytest.raises(ConfigError, match="has no_such_field, which megatron-core"):
        refuse_unknown(MegatronConfig(override_transformer_config={"no_such_field": 1}))
