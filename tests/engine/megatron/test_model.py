"""Overrides of megatron-core's config against the values that hone uses."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from hone.config.engine import MegatronConfig
from hone.engine.megatron.refusals import FIXED_FIELDS, IGNORED_FIELDS, PASSED_FIELDS

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow  # importing megatron-core takes seconds

OF_OTHER_DEVICES = {"swap_optimizer", "use_flash_attn"}


@pytest.fixture
def config_with(monkeypatch):
    from hone.engine.megatron import model

    for name in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor"):
        size = f"get_{name}_parallel_world_size"
        monkeypatch.setattr(model.parallel_state, size, lambda: 1)

    def build(**overrides):
        return model.transformer_config(
            AutoConfig.for_model("qwen3_moe"),
            torch.float32,
            torch.device("cpu"),
            rotary_scale=1.0,
            gradient_checkpointing=True,
            megatron=MegatronConfig(override_transformer_config=overrides),
        )

    return build


def test_computed_fields_have_the_values_that_hone_uses(config_with):
    config = config_with()
    assert config.num_moe_experts == 128
    values = {name: getattr(config, name) for name in FIXED_FIELDS}
    assert values.pop("moe_z_loss_coeff") is None  # None means 0
    assert {**values, "moe_z_loss_coeff": 0.0} == dict(FIXED_FIELDS)


def test_fields_that_hone_sets_cannot_be_overridden(config_with, monkeypatch):
    from hone.engine.megatron import model

    settings: dict[str, object] = {}
    monkeypatch.setattr(model, "TransformerConfig", lambda **fields: settings.update(fields))
    config_with()
    shared = {name for name in settings if name in PASSED_FIELDS}
    assert shared == {f"recompute_{x}" for x in ("granularity", "method", "num_layers")}


def test_every_name_is_a_field_in_one_table():
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = TransformerConfig.__dataclass_fields__.keys()
    assert not (PASSED_FIELDS | FIXED_FIELDS.keys() | IGNORED_FIELDS) - fields - OF_OTHER_DEVICES
    assert (
        not PASSED_FIELDS & IGNORED_FIELDS
        | PASSED_FIELDS & FIXED_FIELDS.keys()
        | IGNORED_FIELDS & FIXED_FIELDS.keys()
    )


def test_recomputation_can_be_chosen(config_with):
    assert config_with().recompute_granularity == "full"
    config = config_with(recompute_granularity="selective", moe_permute_fusion=True)
    assert (config.recompute_granularity, config.recompute_method) == ("selective", None)
    assert not config.moe_permute_fusion
