"""verl's `model_merger` command does what `hone export` does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hone.config import ConfigError
from hone.trainer import export as exports
from hone.verl.model_merger import (
    BaseModelMerger,
    ModelMergerConfig,
    generate_config_from_args,
    main,
    parse_args,
)
from tests.trainer.runs import Task

MERGE = ["merge", "--backend", "fsdp", "--local_dir", "run/global_step_2/actor"]


@pytest.mark.parametrize(
    "more", [[], ["--trust-remote-code"], ["--use_cpu_initialization", "--tie-word-embedding"]]
)
def test_merge_exports(monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    calls: list[tuple[str, str, bool]] = []

    def export(checkpoint: str, out: str, *, trust_remote_code: bool) -> str:
        calls.append((checkpoint, out, trust_remote_code))
        return out

    monkeypatch.setattr(exports, "export", export)
    main([*MERGE, "--target_dir", "merged", *more])
    main([*MERGE[1:], *more])  # older scripts name no operation
    checkpoint, trust = MERGE[-1], "--trust-remote-code" in more
    assert calls == [(checkpoint, "merged", trust), (checkpoint, "tmp", trust)]


def test_what_it_does_not_do_is_said() -> None:
    with pytest.raises(exports.ExportError, match="HF_HUB_OFFLINE is set"):
        main([*MERGE, "--hf_upload_path", "me/it"])
    with pytest.raises(ConfigError, match="is not supported"):
        main(["test", *MERGE[1:], "--test_hf_dir", "other"])


class OwnMerger(BaseModelMerger):
    """A merger of a user's, for weights that are no checkpoint of a run."""

    def merge_and_save(self) -> None:
        lm = AutoModelForCausalLM.from_pretrained(str(self.config.local_dir))
        weights = {f"base_model.model.{name}": value for name, value in lm.state_dict().items()}
        q_proj = "base_model.model.model.layers.0.self_attn.q_proj"
        weights[f"{q_proj}.base_layer.weight"] = weights.pop(f"{q_proj}.weight") + 1
        weights[f"{q_proj}.lora_A.default.weight"] = torch.ones(2, 8)
        weights[f"{q_proj}.lora_B.default.weight"] = torch.ones(8, 2)
        self.save_hf_model_and_tokenizer(weights)


def test_a_users_merger_saves_weights_adapter_and_tokenizer(task: Task, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    config = ModelMergerConfig(
        "merge", "fsdp", str(out), local_dir=str(task.model), hf_model_config_path=str(task.model)
    )
    merger = OwnMerger(config)
    merger.merge_and_save()
    merger.cleanup()
    weight = "model.layers.0.self_attn.q_proj.weight"
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (task.model, out)
    )
    assert torch.equal(after.pop(weight), before.pop(weight) + 1)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert AutoTokenizer.from_pretrained(out).encode("1") == (
        AutoTokenizer.from_pretrained(task.model).encode("1")
    )
    adapter = json.loads((out / "lora_adapter" / "adapter_config.json").read_text("utf-8"))
    assert (adapter["r"], adapter["lora_alpha"], adapter["target_modules"]) == (2, 2, ["q_proj"])


def test_arguments_become_settings_and_the_config_is_the_checkpoints() -> None:
    config = generate_config_from_args(parse_args([*MERGE, "--private"]))
    assert (config.backend, config.target_dir, config.private) == ("fsdp", "tmp", True)
    merger = BaseModelMerger(config)
    assert merger.hf_model_config_path == "run/global_step_2/actor/huggingface"
    assert not config.hf_upload


def test_an_upload_is_as_private_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, str, bool]] = []
    monkeypatch.setattr(
        "hone.trainer.export.push",
        lambda folder, name, *, private: calls.append((folder, name, private)),
    )
    for private in (True, False):
        config = ModelMergerConfig("merge", "fsdp", "out", "me/it", private, local_dir="run")
        BaseModelMerger(config).upload_to_huggingface()
    assert calls == [(Path("out"), "me/it", True), (Path("out"), "me/it", False)]


def test_a_merger_without_folders_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs local_dir"):
        BaseModelMerger(ModelMergerConfig("merge", "fsdp"))
