"""`hone export`: from a checkpoint of any shape to a folder that loads, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hone import cli
from hone.config.engine import FSDPConfig
from hone.config.model import ModelConfig
from hone.data.files import remote_files
from hone.engine.build import build_engine
from hone.models.from_config import build_tokenizer
from hone.models.load import load_causal_lm
from hone.models.policy import ValueModel
from hone.models.tiny import character_tokenizer
from hone.ops.rows import MicroBatchRule
from hone.tracking.manifest import MANIFEST, write_manifest
from hone.trainer import export as module
from hone.trainer import main_sft
from hone.trainer.export import ExportError, export, find_model_folder
from hone.verl.dialect import load_config

from .around_fixtures import sums, tiny_model, write_jsonl


def weights(folder: Path) -> dict[str, torch.Tensor]:
    lm: Any = load_causal_lm(str(folder), dtype=torch.float32)
    return {name: p.detach() for name, p in lm.named_parameters()}


def same(a: Path, b: Path) -> bool:
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def trained(folder: Path, *overrides: str) -> Path:
    """A run of two updates; its folder."""
    config = load_config(
        [
            f"data.train_files={write_jsonl(folder / 'rows.jsonl', sums(4))}",
            f"model.path={tiny_model(folder / 'model')}",
            "data.train_batch_size=4",
            "optim.lr=1e-2",
            "trainer.total_training_steps=2",
            "trainer.logger=[jsonl]",
            f"trainer.default_local_dir={folder / 'run'}",
            *overrides,
        ],
        config_name="sft_trainer",
    )
    main_sft.run(config)
    return folder / "run"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("lora"), "model.lora_rank=2", "optim.lr=1e-1")


def without(run: Path, target: Path, *parts: str) -> Path:
    """A copy of the run whose checkpoint was saved without some folders."""
    shutil.copytree(run, target)
    for part in parts:
        shutil.rmtree(target / "global_step_2" / part)
    write_manifest(target / "global_step_2")
    return target / "global_step_2"


def test_an_export_in_the_checkpoint_is_copied(plain: Path, tmp_path: Path) -> None:
    out = export(plain, tmp_path / "out")
    assert same(out, plain / "global_step_2" / "huggingface")
    plain_transformers = AutoTokenizer.from_pretrained(out)
    text = "1+1=\n\n 2"
    assert plain_transformers.encode(text) == character_tokenizer().encode(text)


def test_shards_alone_give_the_same_model(plain: Path, tmp_path: Path) -> None:
    step = without(plain, tmp_path / "run", "huggingface")
    out = export(step, tmp_path / "out")
    assert same(out, plain / "global_step_2" / "huggingface")
    assert (out / "tokenizer.json").is_file()
    assert not list(tmp_path.glob(".*.tmp"))


def test_lora_shards_come_merged_or_as_the_adapter(lora: Path, tmp_path: Path) -> None:
    step = without(lora, tmp_path / "run", "huggingface", "lora_adapter")
    merged = export(step, tmp_path / "merged")
    adapter = export(step, tmp_path / "adapter", adapter_only=True)
    base, result = weights(lora.parent / "model"), weights(merged)
    parts = load_file(adapter / "adapter_model.safetensors")
    scale = json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"] / 2
    changed = {
        name.removeprefix("base_model.model.").replace("lora_A.", ""): (
            parts[name.replace("lora_A", "lora_B")] @ parts[name]
        )
        for name in parts
        if "lora_A" in name
    }
    assert changed.keys() < base.keys()
    for name, weight in base.items():
        expected = weight + scale * changed[name] if name in changed else weight
        torch.testing.assert_close(result[name], expected)
        assert torch.equal(result[name], weight) == (name not in changed), name
    assert sorted(p.name for p in adapter.iterdir() if p.suffix in (".json", ".safetensors")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_an_adapter_that_was_never_trained_is_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="without LoRA"):
        export(plain, tmp_path / "out", adapter_only=True)
    assert not (tmp_path / "out").exists()


def test_a_critic_is_refused_by_what_it_holds(tmp_path: Path) -> None:
    lm: Any = load_causal_lm(str(tiny_model(tmp_path / "model")), dtype=torch.float32)
    rule = MicroBatchRule(None, 64)
    engine = build_engine(
        ValueModel(lm),
        optim=None,
        grad_clip=0.0,
        fsdp=FSDPConfig(),
        train_micro_batch_rule=rule,
        infer_micro_batch_rule=rule,
        response_width=1,
    )
    folder = tmp_path / "global_step_1" / "renamed"
    engine.save(folder, ["model"])
    with pytest.raises(ExportError, match="is a critic"):
        export(folder, tmp_path / "out")


def test_the_actor_is_found_from_the_step_and_the_run(tmp_path: Path) -> None:
    actor = tmp_path / "run" / "global_step_3" / "actor"
    actor.mkdir(parents=True)
    (actor / "state").touch()
    with pytest.raises(ExportError, match="damaged"):  # without a manifest it is no checkpoint
        find_model_folder(tmp_path / "run")
    write_manifest(actor.parent)
    for named in (tmp_path / "run", actor.parent, actor):
        assert find_model_folder(named) == actor


@pytest.mark.parametrize("how", ["truncated", "unsealed"])
def test_a_damaged_checkpoint_is_refused_however_it_is_named(
    plain: Path, tmp_path: Path, how: str
) -> None:
    step = without(plain, tmp_path / "run")
    if how == "unsealed":
        (step / MANIFEST).unlink()
    else:
        weights_file = step / "huggingface" / "model.safetensors"
        weights_file.write_bytes(weights_file.read_bytes()[:-100])
    messages = {
        "unsealed": r"no manifest\.json",
        "truncated": r"model\.safetensors is not what was",
    }
    with pytest.raises(ExportError, match=messages[how]):
        export(step, tmp_path / "out")
    with pytest.raises(ExportError, match="damaged"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (["train.parquet"], r"is not a checkpoint \(it holds train\.parquet\); name a run folder"),
        ([], r"is not a checkpoint \(it holds nothing\)"),
        (["config.json", "model.safetensors"], "is a model folder, not a checkpoint"),
    ],
)
def test_a_folder_that_never_was_a_checkpoint_is_said_to_be_none(
    tmp_path: Path, files: list[str], sentence: str
) -> None:
    (tmp_path / "folder").mkdir()
    for name in files:
        (tmp_path / "folder" / name).write_text("{}")
    with pytest.raises(ExportError, match=sentence):
        export(tmp_path / "folder", tmp_path / "out")


def test_a_checkpoint_saved_without_weights_says_so(tmp_path: Path) -> None:
    step = tmp_path / "run" / "global_step_1"
    step.mkdir(parents=True)
    (step / "trainer_state.json").write_text("{}")
    write_manifest(step)
    with pytest.raises(ExportError, match=r"saved without them \(checkpoint\.save_contents\)"):
        export(step, tmp_path / "out")


def test_shards_keep_their_dtype_and_the_config_the_run_had(tmp_path: Path) -> None:
    run = trained(tmp_path, "engine.dtype=bf16", "model.override_config.rms_norm_eps=0.25")
    step = without(run, tmp_path / "copy", "huggingface")
    out = export(step, tmp_path / "out")
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    written = json.loads((out / "config.json").read_text())
    assert (written["dtype"], written["rms_norm_eps"]) == ("bfloat16", 0.25)


def test_a_checkpoint_is_exported_from_inside(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = without(plain, tmp_path / "run", "huggingface")
    monkeypatch.chdir(step)
    assert same(export(".", tmp_path / "out"), plain / "global_step_2" / "huggingface")


def test_an_empty_folder_is_filled_from_inside(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    export(plain, ".")
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_full_folder_is_not_overwritten(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ExportError, match="not empty"):
        export(plain, tmp_path)


def test_shards_without_their_run_say_what_is_missing(plain: Path, tmp_path: Path) -> None:
    step = without(plain, tmp_path / "run", "huggingface")
    (tmp_path / "run" / "config.yaml").unlink()
    with pytest.raises(ExportError, match=r"no parent folder has the config.yaml"):
        export(step, tmp_path / "out")


@pytest.mark.parametrize("key", ["external_lib", "trust_remote_code"])
def test_the_code_that_a_runs_config_names_is_not_imported(
    plain: Path,
    tmp_path: Path,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from hone import cli

    step = without(plain, tmp_path / "run", "huggingface")
    (tmp_path / "own_code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    text = (tmp_path / "run" / "config.yaml").read_text()
    value = "own_code" if key == "external_lib" else "true"
    changed = re.sub(rf"(?m)^  {key}: .*$", f"  {key}: {value}", text)
    assert changed != text
    (tmp_path / "run" / "config.yaml").write_text(changed)
    calls: list[bool] = []

    def watched(model: ModelConfig) -> Any:
        calls.append(model.trust_remote_code)
        return build_tokenizer(model)

    monkeypatch.setattr("hone.trainer.export.build_tokenizer", watched)
    assert cli.main(["export", str(step), str(tmp_path / "out")]) == 0
    flag = {"external_lib": "--external-lib own_code", "trust_remote_code": "--trust-remote-code"}
    assert flag[key] in capsys.readouterr().out
    assert not (tmp_path / "ran").exists()
    arguments = flag[key].split()
    assert cli.main(["export", str(step), str(tmp_path / "again"), *arguments]) == 0
    assert (tmp_path / "ran").exists() == (key == "external_lib")
    assert calls == [False, key == "trust_remote_code"]


@pytest.mark.parametrize("text", ["[]", "model: 5", "a: [", "!!python/object/apply:os.system [x]"])
def test_a_config_that_is_none_is_a_sentence(plain: Path, tmp_path: Path, text: str) -> None:
    step = without(plain, tmp_path / "run", "huggingface")
    (tmp_path / "run" / "config.yaml").write_text(text)
    with pytest.raises(ExportError, match=r"config\.yaml"):
        export(step, tmp_path / "out")


def test_an_export_to_a_store_is_there_although_its_push_failed(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class UnreachableHub:
        endpoint = "https://hub.example"

        def __init__(self, **options: str) -> None: ...

        def create_repo(self, repo: str, **options: bool) -> None:
            raise OSError("no route")

    monkeypatch.setattr(module, "check_push", lambda repo: None)
    monkeypatch.setattr("huggingface_hub.HfApi", UnreachableHub)
    out = f"memory://{tmp_path.name}/model"
    assert cli.main(["export", str(plain), out, "--push", "me/model"]) == 2
    assert f"(no route); the model is in {out}\n" in capsys.readouterr().err
    assert any(name.endswith("config.json") for name in remote_files(out))
