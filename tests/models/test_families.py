"""Each decoder family equals plain transformers, or is refused by name before weights are loaded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from benchmarks.families import table
from benchmarks.families.__main__ import GOOD, family_names
from benchmarks.families.measure import CPU_BOUND, GRADIENT_BOUND, examine, measure
from hone.models import families
from hone.models.families import (
    FAMILIES,
    UnsupportedModel,
    disable_dropout,
    key_shape,
    logit_softcap_and_scale,
)
from hone.models.load import load_causal_lm
from hone.models.policy import PolicyModel
from hone.models.tiny import tiny_lm
from hone.rollout.contract import RolloutError, Sampling
from hone.rollout.hf import HFRollout
from hone.rollout.native.paged_cache import PagedCache

CPU = torch.device("cpu")
IMPORTANT = (
    "deepseek_v3",
    "falcon",
    "gemma2",
    "gemma3",
    "glm4",
    "gpt_neox",
    "gpt_oss",
    "nemotron",
    "phi3",
    "qwen3_moe",
    "stablelm",
)
"""Latent attention, several key shapes, soft caps, windows, partial rotation, sinks, experts."""


@pytest.mark.parametrize("family", IMPORTANT)
def test_rollout_and_trainer_equal_plain_transformers(family: str, tmp_path: Path) -> None:
    result = measure(family, tmp_path, CPU, flipped=False)
    assert max(result["rollout_max"], result["trainer_max"]) <= CPU_BOUND
    assert result["gradient"] <= GRADIENT_BOUND


@pytest.mark.slow
def test_every_family_of_transformers_is_equal_or_refused() -> None:
    outcomes = {name: examine(name, CPU) for name in family_names()}
    assert {n: r for n, r in outcomes.items() if r["outcome"] not in GOOD} == {}


def load(folder: Path, device: torch.device = CPU, **config: Any) -> None:
    """Loads a folder with a config and no weights, so that only the config can be refused."""
    (folder / "config.json").write_text(json.dumps(config))
    load_causal_lm(str(folder), dtype=torch.float32, device=device)


@pytest.mark.parametrize("family", ["bloom", "mpt", "lfm2", "llama4", "mamba", "t5", "my_own"])
def test_other_families_are_refused_by_name_without_weights(family: str, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModel, match=f"a {family} model, which is not supported: "
    ) as caught:
        load(tmp_path, model_type=family)
    assert "docs/models.md" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "falcon", "alibi": True}, "alibi=True"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        (
            {
                "model_type": "llama",
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            },
            "dynamic rotary positions",
        ),
        (
            {
                "model_type": "phi3",
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 48,
                    "long_factor": [2.0] * 48,
                },
            },
            "longrope rotary positions",
        ),
    ],
)
def test_unsupported_settings_of_a_supported_family_are_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load(tmp_path, **config)


def test_a_family_can_be_limited_to_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "CPU_ONLY_FAMILIES", frozenset({"llama"}))
    with pytest.raises(UnsupportedModel, match="llama model, which is supported on the CPU only"):
        load(tmp_path, torch.device("cuda"), model_type="llama")
    families.check_family_supported("llama", "here", device=CPU)
    families.check_family_supported("qwen2", "here", device=torch.device("cuda"))


def test_fields_outside_the_config_class_are_ignored() -> None:
    extra = {"num_key_value_heads": 2, "head_dim": 99, "logit_scale": 0.5}
    config = AutoConfig.for_model("gpt_neox", hidden_size=64, num_attention_heads=4, **extra)
    assert key_shape(config) == (4, 16)
    assert logit_softcap_and_scale(config) == (None, 1.0)


def test_the_table_in_the_docs_agrees_with_the_results_and_the_list() -> None:
    cpu, gpu = table.read(table.CPU), table.read(table.GPU)
    assert table.PAGE.read_text() == table.page(cpu, gpu)
    outcomes = {name: result["outcome"] for name, result in cpu["families"].items()}
    assert {n for n, outcome in outcomes.items() if outcome == "equal"} == FAMILIES
    assert set(outcomes.values()) == set(GOOD)
    assert families.CPU_ONLY_FAMILIES <= FAMILIES
    if gpu["families"]:
        equal = {n for n, r in gpu["families"].items() if r["outcome"] == "equal"}
        assert equal == FAMILIES - families.CPU_ONLY_FAMILIES, (
            "CPU_ONLY_FAMILIES lists families not equal on a GPU"
        )


@pytest.mark.parametrize("family", ["falcon", "nemotron", "stablelm"])
def test_the_slow_reference_decodes_families_whose_layers_drop_keywords(family: str) -> None:
    lm = tiny_lm(40, hidden=32, family=family)
    engine = HFRollout(PolicyModel(lm.eval()), eos_ids=(), tokenizer=None)
    out = asyncio.run(engine.generate([3, 4, 5], Sampling(4, 1.0, 0, ignore_eos=True), "one"))
    assert len(out.token_ids) == len(out.log_probs) == 4


def test_keys_whose_shape_differs_from_the_config_are_refused_by_the_cache() -> None:
    cache = PagedCache(
        num_layers=1,
        kv_heads=2,
        head_dim=8,
        num_blocks=3,
        block_size=4,
        dtype=torch.float32,
        device=CPU,
    )
    good, wrong = torch.zeros(5, 2, 8), torch.zeros(5, 4, 8)
    cache.check_shape(good, good)
    with pytest.raises(RolloutError, match=r"head_dim\) \(4, 8\).*config says \(2, 8\)"):
        cache.check_shape(wrong, wrong)


def test_dropout_fields_of_any_name_are_disabled():
    config = AutoConfig.for_model("starcoder2", residual_dropout=0.3, embedding_dropout=0.2)
    disable_dropout(config)
    assert config.residual_dropout == config.embedding_dropout == config.attention_dropout == 0.0
