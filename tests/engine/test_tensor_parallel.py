"""The plan of tensor parallel layers: which families have one, and what is refused before a model loads."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING

from benchmarks.families.tiny import tiny_config
from hone.config.engine import FSDPConfig
from hone.engine.build import build
from hone.engine.contract import EngineSpec
from hone.engine.microbatch import MicroBatchRule
from hone.engine.tensor_parallel import STYLES, UNPLANNED, refuse_tensor_parallel
from hone.models.families import FAMILIES, UnsupportedModel
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm


def plan_of(family):
    return tiny_config(family).get_text_config().base_model_tp_plan or {}


def test_every_style_of_a_supported_family_is_implemented():
    for family in FAMILIES - UNPLANNED:
        assert set(plan_of(family).values()) <= STYLES, family


def test_a_family_without_a_plan_is_refused_by_name():
    unplanned = {family for family in FAMILIES if not plan_of(family)}
    # Its plan names other modules than the model has.
    assert unplanned | {"minimax_m3_vl_text"} == UNPLANNED
    for family in UNPLANNED:
        config = CONFIG_MAPPING[family]()
        with pytest.raises(UnsupportedModel, match=f"is a {config.model_type} model, whose layers"):
            refuse_tensor_parallel(config, "m", 2)


@pytest.mark.parametrize("family", ["qwen2", "gpt_neox", "gemma3", "qwen3_moe", "granite_swa"])
def test_heads_are_never_cut(family):
    config = tiny_config(family)
    refuse_tensor_parallel(config, "m", 2)
    with pytest.raises(UnsupportedModel, match=r"num_attention_heads=4, which .*_size=3 does not"):
        refuse_tensor_parallel(config, "m", 3)
    if family != "gpt_neox":
        with pytest.raises(UnsupportedModel, match="m has num_key_value_heads=2"):
            refuse_tensor_parallel(config, "m", 4)


def test_heads_that_every_rank_computes_need_not_divide():
    for family in ("olmo2", "phi3", "deepseek_v3"):
        refuse_tensor_parallel(tiny_config(family), "m", 3)


def test_latent_attention_has_a_key_head_per_query_head():
    refuse_tensor_parallel(tiny_config("minicpm3"), "m", 4)


def test_an_engine_refuses_the_heads_before_it_loads_the_model(tmp_path, monkeypatch):
    lm = tiny_lm(40, hidden=32, kv_heads=1)
    path = save_pretrained(lm, character_tokenizer(), tmp_path / "model")
    monkeypatch.setattr("hone.engine.build.load_module", None)
    rule = MicroBatchRule(rows=1, tokens=0)
    spec = EngineSpec(
        head="policy",
        model_path=str(path),
        device=torch.device("cpu"),
        dtype=torch.float32,
        fsdp=FSDPConfig(),
        train_rule=lambda _: rule,
        infer_rule=lambda _: rule,
        response_width=4,
        world_size=2,
        tensor_parallel=2,
    )
    with pytest.raises(UnsupportedModel, match=r"num_key_value_heads=1, which tensor_parallel"):
        build(spec)
