"""LoRA through the loop: what is trained, kept, continued, and what the reference is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ..runs import Run, Task

TWO = ("trainer.save_freq=1", "trainer.total_training_steps=2")
LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.use_kl_loss=true")


def test_lora_trains_adapters_over_a_frozen_base(train: Callable[..., Run], task: Task) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = train(*TWO, *LORA)
    assert run.series("actor/kl_loss")[0] == pytest.approx(0, abs=1e-7)  # adapters start at zero
    assert run.series("actor/kl_loss")[1] > 0  # the reference is the base, adapters off
    folder = run.checkpoint(2) / "actor"
    base = AutoModelForCausalLM.from_pretrained(task.model)
    adapted = PeftModel.from_pretrained(base, folder / "lora_adapter").merge_and_unload()
    merged = load_file(folder / "huggingface" / "model.safetensors")
    for name, tensor in adapted.state_dict().items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-6)
    original = load_file(task.model / "model.safetensors")
    changed = [name for name in original if not torch.equal(original[name], merged[name])]
    assert changed
    assert all("proj" in name for name in changed)


def test_new_adapters_follow_from_the_seed(train: Callable[..., Run]) -> None:
    first = train(*LORA, folder="a")
    torch.manual_seed(999)  # whatever the process drew before
    assert train(*LORA, folder="b").numbers == first.numbers


def test_an_adapter_may_be_continued(train: Callable[..., Run], tmp_path: Path) -> None:
    first = train(*TWO, *LORA)
    adapter = first.checkpoint(2) / "actor" / "lora_adapter"
    run = train(*LORA, f"actor_rollout_ref.model.lora_adapter_path={adapter}", folder="b")
    assert run.series("actor/kl_loss")[0] > 0  # it starts away from the base
