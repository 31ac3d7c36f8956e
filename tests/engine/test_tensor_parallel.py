"""The plan of tensor-parallel layers: which families have one, and which models are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING

from benchmarks.families.tiny import tiny_config
from hone.config.engine import FSDPConfig
from hone.engine.build import build
from hone.engine.contract import EngineSpec
from hone.engine.tensor_parallel import STYLES, check_tensor_parallel, tensor_parallel_plan
from hone.models.families import FAMILIES, UnsupportedModel
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.ops.rows import MicroBatchRule

KNOWN = sorted(FAMILIES & set(CONFIG_MAPPING))
"""The newest families are missing from the oldest transformers that hone supports."""


@pytest.mark.parametrize("family", KNOWN)
def test_a_family_has_a_plan_whose_styles_are_implemented_or_is_refused_by_name(family):
    if plan := tensor_parallel_plan(tiny_config(family)):
        assert set(plan.values()) <= STYLES
        return
    config = CONFIG_MAPPING[family]()
    with pytest.raises(UnsupportedModel, match=f"is a {config.model_type} model, whose layers"):
        check_tensor_parallel(config, "m", 2)


def test_families_known_to_have_no_plan_that_fits_are_refused():
    without_plan = [family for family in KNOWN if not tensor_parallel_plan(tiny_config(family))]
    assert {"gpt2", "gpt_oss", "minimax_m3_vl_text", "opt", "stablelm"} <= set(without_plan)
    assert not {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3"} & set(without_plan)


@pytest.mark.parametrize("family", ["qwen2", "gpt_neox", "gemma3", "qwen3_moe", "granite_swa"])
def test_a_head_is_never_split_over_ranks(family):
    config = tiny_config(family)
    check_tensor_parallel(config, "m", 2)
    with pytest.raises(UnsupportedModel, match=r"num_attention_heads=4, which .*_size=3 does not"):
        check_tensor_parallel(config, "m", 3)
    if family != "gpt_neox":
        with pytest.raises(UnsupportedModel, match="m has num_key_value_heads=2"):
            check_tensor_parallel(config, "m", 4)


def test_heads_that_every_rank_computes_need_not_divide():
    for family in ("olmo2", "phi3"):
        check_tensor_parallel(tiny_config(family), "m", 3)


@pytest.mark.parametrize(
    ("family", "name", "width"),
    [("qwen2", "intermediate_size", 97), ("qwen3_moe", "moe_intermediate_size", 33)],
)
def test_a_width_that_the_ranks_do_not_divide_is_refused_from_the_config(family, name, width):
    config = tiny_config(family)
    setattr(config, name, width)
    with pytest.raises(
        UnsupportedModel, match=f"m has {name}={width}, which tensor_parallel_size=2"
    ):
        check_tensor_parallel(config, "m", 2)


def test_a_vocabulary_whose_parts_get_shards_of_different_sizes_is_refused():
    config = tiny_config("qwen2")
    config.vocab_size = 151665
    for shards in (1, 2):
        check_tensor_parallel(config, "m", 2, fsdp_shards=shards)
    with pytest.raises(UnsupportedModel, match=r"m has vocab_size=151665, .* into 4 shards"):
        check_tensor_parallel(config, "m", 2, fsdp_shards=4)
    config.vocab_size = 151666
    check_tensor_parallel(config, "m", 2, fsdp_shards=4)


def test_latent_attention_has_a_key_head_per_query_head():
    check_tensor_parallel(tiny_config("minicpm3"), "m", 4)


def spec_of(path, **changes):
    rule = MicroBatchRule(rows=1, tokens=0)
    spec = EngineSpec(
        head="policy",
        model_path=str(path),
        device=torch.device("cpu"),
        dtype=torch.float32,
        fsdp=FSDPConfig(),
        train_micro_batch_rule=lambda _: rule,
        infer_micro_batch_rule=lambda _: rule,
        response_width=4,
        world_size=2,
        tensor_parallel=2,
    )
    return replace(spec, **changes)


def test_an_engine_refuses_the_heads_before_it_loads_the_model(tmp_path, monkeypatch):
    lm = tiny_lm(40, hidden=32, kv_heads=1)
    path = save_pretrained(lm, character_tokenizer(), tmp_path / "model")
    monkeypatch.setattr("hone.engine.build.load_module", None)
    with pytest.raises(UnsupportedModel, match=r"num_key_value_heads=1, which tensor_parallel"):
        build(spec_of(path))


def test_a_model_of_several_ranks_is_loaded_on_the_host_and_sharded_on_the_device(
    tmp_path, monkeypatch
):
    path = save_pretrained(tiny_lm(40, hidden=32), character_tokenizer(), tmp_path / "model")
    device, built = torch.device("meta"), []
    monkeypatch.setattr("hone.engine.build.build_engine", lambda *a, **kw: built.append((a, kw)))
    build(spec_of(path, device=device, tensor_parallel=1))
    build(spec_of(path, device=device, tensor_parallel=1, world_size=1))
    sharded, alone = [{p.device.type for p in module.parameters()} for (module,), _ in built]
    assert (sharded, alone) == ({"cpu"}, {"meta"})
    assert [options["device"] for _, options in built] == [device, device]
