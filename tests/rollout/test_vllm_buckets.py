"""Buckets hold every tensor once, in order, in the same memory; experts have the names of checkpoints."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hone.event_loop import run_coroutine
from hone.models.policy import PolicyModel
from hone.rollout.contract import RolloutEngine, RolloutError, RolloutSpec, Sampling
from hone.rollout.server_weights import fill_buckets, split_experts
from hone.rollout.vllm_build import build_vllm
from hone.verl.dialect import load_config

from . import models
from .models import EOS, POSITIONS, TOKENIZER, VOCABULARY
from .test_vllm_process import fake_python
from .vllm_factory import vllm, vllm_python

SAMPLING = Sampling(12, 0.9, 5, ignore_eos=True)


def test_tensors_are_read_back_from_buckets_of_bounded_size() -> None:
    weights = {
        f"w{i}": torch.randn(size).to(kind)
        for i, (size, kind) in enumerate(
            [(10, torch.float32), (33, torch.bfloat16), (200, torch.float32), (1, torch.float16)]
        )
    }
    weights["view"] = torch.randn(4, 6).T
    read: dict[str, Tensor] = {}
    sizes, paths = [], set()
    for bucket in fill_buckets(weights.items(), torch.device("cpu"), 256):
        sizes.append(len(bucket["tensors"]))
        paths.add(bucket["path"])
        with open(bucket["path"], "rb") as file:
            content = file.read()
        for name, kind, shape, offset in bucket["tensors"]:
            dtype = getattr(torch, kind)
            count = torch.Size(shape).numel()
            part = torch.frombuffer(bytearray(content), dtype=dtype, count=count, offset=offset)
            read[name] = part.reshape(shape)
    assert sizes == [2, 1, 2]
    assert len(paths) == 1
    assert list(read) == list(weights)
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def mixture(seed: int, family: str = "qwen3_moe") -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    from hone.models.policy import register_attention

    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=64,
        head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        intermediate_size=48,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.2,
        eos_token_id=EOS,
        bos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=register_attention()
        ).eval()


def spec_of(folder: Path, lm: Any, python: str | None) -> RolloutSpec:
    lm.save_pretrained(folder)
    rollout = "actor_rollout_ref.rollout"
    keys = ["name=vllm", f"vllm.python={python}", "prompt_length=64", "response_length=64"]
    return RolloutSpec(
        load_config([f"{rollout}.{key}" for key in keys]).actor_rollout_ref.rollout,
        model_path=str(folder),
        load_policy=lambda: PolicyModel(lm),
        dtype=torch.float32,
        device=torch.device("cpu"),
        tokenizer=TOKENIZER,
        eos_ids=(EOS,),
    )


def test_experts_get_the_names_and_numbers_of_a_checkpoint(tmp_path: Path) -> None:
    lm = mixture(0)
    lm.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    sent: dict[str, Tensor] = dict(split_experts(lm.named_parameters()))
    assert sent.keys() == written.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in written.items())


def test_updates_of_other_mixtures_are_refused_before_vllm_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hone.rollout.vllm_build.has_vllm", lambda python: True)
    with pytest.raises(
        RolloutError, match=r"mixture of experts of the type qwen2_moe; .* only into qwen3_moe;"
    ):
        build_vllm(spec_of(tmp_path, mixture(0, "qwen2_moe"), "python"))


def test_other_mixtures_generate_from_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hone.rollout.vllm_build.has_vllm", lambda python: True)
    spec = spec_of(tmp_path, mixture(0, "qwen2_moe"), None)
    words = ["rollout.name=vllm", f"rollout.vllm.python={fake_python(tmp_path)}"]
    spec = replace(spec, config=load_config(words, config_name="generation").rollout)
    engine = build_vllm(spec)
    run_coroutine(engine.close())
    with pytest.raises(RolloutError, match="only into qwen3_moe"):
        build_vllm(replace(spec, current_weights=list))  # needs new weights


@vllm
def test_experts_are_new_after_an_update(tmp_path: Path) -> None:
    old, new = mixture(0), mixture(1)
    engine: RolloutEngine = build_vllm(spec_of(tmp_path, old, vllm_python()))
    prompts = models.prompts(4, 8)

    async def worst(lm: Any) -> float:
        """Of the differences to the trainer's log-probs."""
        jobs = [engine.generate(prompt, SAMPLING, str(i)) for i, prompt in enumerate(prompts)]
        differences = []
        for prompt, out in zip(prompts, await asyncio.gather(*jobs), strict=True):
            expected = models.trainer_log_probs(PolicyModel(lm), prompt, out.token_ids, 0.9)
            differences.append(torch.tensor(out.log_probs) - torch.tensor(expected))
        return float(torch.cat(differences).abs().max())

    async def updated() -> None:
        assert await worst(old) < 1e-4
        for version, lm in ((1, new), (2, old)):
            await engine.begin_update()
            await engine.load(lm.named_parameters())
            await engine.commit(version)
            assert await worst(lm) < 1e-4
        assert await worst(new) > 1e-2
        await engine.close()

    run_coroutine(updated())
