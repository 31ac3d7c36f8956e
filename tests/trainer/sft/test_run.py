"""What `hone sft` says and refuses when it is started again, and what its models learn to end with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.data.rows import DataError
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.plugins import PluginError
from hone.tracking import read_metrics
from hone.trainer import main_sft
from hone.trainer.command_line import run_program
from hone.trainer.ranks import Ranks
from hone.trainer.sft.run import SFTRun

from ..around_fixtures import sft_config, sft_settings, sums, tiny_model, write_jsonl

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(tmp_path: Path, model: Path) -> list[str]:
    return sft_settings(tmp_path, model, "trainer.total_training_steps=1")


@pytest.fixture
def train(settings: list[str], tmp_path: Path) -> Run:
    def go(name: str, *overrides: str) -> Path:
        main_sft.run(sft_config(settings, tmp_path / name, *overrides))
        return tmp_path / name

    return go


def test_other_data_cannot_resume_and_the_folder_to_change_is_named(
    train: Run, tmp_path: Path
) -> None:
    train("run")
    write_jsonl(tmp_path / "train.jsonl", [*sums(19), {"question": "8+8=", "answer": "17"}])
    with pytest.raises(DataError, match=r"the data differ.*global_step_1.*default_local_dir"):
        train("run", "trainer.total_training_steps=2")
    write_jsonl(tmp_path / "train.jsonl", sums(19))
    with pytest.raises(DataError, match=r"number of rows 20, .* 19; .*default_local_dir"):
        train("run")


def test_a_resumed_run_names_every_change_of_what_its_rows_teach(
    train: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    train("run", "model.lora_rank=1")
    template = "data.chat_template='{{ messages[0].content }}'"
    changes = [template, "data.prompt_format=raw", "model.lora_alpha=3"]
    train("run", "model.lora_rank=1", "trainer.total_training_steps=2", *changes)
    output = capsys.readouterr().out
    for change in ("data.chat_template=", "data.prompt_format=raw", "model.lora_alpha=3"):
        assert f"from global_step_1 on: {change}" in output


def test_an_unknown_optimizer_is_refused_before_rows_and_model_are_read(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.jsonl").unlink()
    monkeypatch.setattr("hone.trainer.sft.run.build_strategy", None)
    with pytest.raises(PluginError, match=r"optim\.optimizer=AdmW was not found"):
        train("run", "optim.optimizer=AdmW")


def test_data_that_give_no_fingerprint_are_not_compared(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hone.data.sft.SFTDataset.fingerprint", None)
    train("run")
    write_jsonl(tmp_path / "train.jsonl", [*sums(19), {"question": "8+8=", "answer": "17"}])
    monkeypatch.undo()
    assert len(read_metrics(train("run", "trainer.total_training_steps=2"))) == 2


def test_a_run_says_where_its_model_lies_and_a_finished_one_that_nothing_is_left(
    train: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    console = "trainer.logger=[console,jsonl]"
    folder = train("run", console)
    assert f"done at step 1: the model is in {folder / 'global_step_1'}" in capsys.readouterr().out
    files = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    train("run", console, "optim.lr=1e-3")
    output = capsys.readouterr().out
    assert "already at step 1 of 1: nothing to do" in output
    assert "needs another trainer.default_local_dir" in output
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == files
    train("run", "trainer.total_training_steps=2")
    output = capsys.readouterr().out
    assert output == f"resumed from {folder / 'global_step_1'}\n"


def test_a_run_that_names_another_model_than_it_began_with_is_told(
    train: Run, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("run")
    other = tiny_model(tmp_path / "other", seed=1)
    train("run", f"model.path={other}")
    output = capsys.readouterr().out
    assert f"was trained from model.path={model}, not from {other}" in output
    assert "set another trainer.default_local_dir" in output


def test_only_the_first_rank_tells_of_a_resume(
    train: Run, settings: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = train("run")
    run = SFTRun(sft_config(settings, folder), Ranks())
    run.ranks = Ranks(rank=1, world_size=2)
    monkeypatch.setattr(Ranks, "barrier", lambda self: None)
    run.fit()
    assert run.trainer.step_number == 1
    assert capsys.readouterr().out == ""


def test_a_model_that_was_not_named_is_asked_for_by_its_key(
    settings: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/nowhere")
    unnamed = [setting for setting in settings if not setting.startswith("model.path=")]
    assert run_program(lambda: main_sft.main(unnamed)) == 2
    assert "model.path=~/models/deepseek-llm-7b-chat: " in capsys.readouterr().err


def test_conversations_under_a_template_without_an_end_token_teach_the_model_to_stop(
    train: Run, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = character_tokenizer()
    assert tokenizer.eos_token not in str(tokenizer.chat_template)
    fresh = tiny_lm(len(tokenizer), hidden=16, layers=1, heads=2, kv_heads=1, mlp=32)
    save_pretrained(fresh, tokenizer, tmp_path / "fresh")
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "1"}] * 2
    file = write_jsonl(tmp_path / "turns.jsonl", [{"messages": talk}] * 4)
    data = [f"data.train_files={file}", f"model.path={tmp_path / 'fresh'}"]
    folder = train("run", *data, "trainer.total_training_steps=40")
    export = folder / "global_step_40" / "huggingface"
    lm = AutoModelForCausalLM.from_pretrained(export, attn_implementation="eager")
    prompt = torch.tensor([tokenizer.encode("u:?\na:", add_special_tokens=False)])
    written = lm.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(written) == "1</s>"


def test_a_run_folder_below_the_home_is_there(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    main_sft.run(sft_config(settings, Path("~/run")))
    assert (tmp_path / "home/run/global_step_1").is_dir()
    assert not (tmp_path / "~").exists()


OWN_ROWS = """
import torch

class Lists:
    def __init__(self, files, tokenizer, config, max_samples):
        self.tokenizer = tokenizer

    def __len__(self):
        return 9

    def __getitem__(self, i):
        prompt = self.tokenizer.encode(f"{i}+1=", add_special_tokens=False)
        answer = self.tokenizer.encode(str(i + 1), add_special_tokens=False)
        ids = [*prompt, *answer, self.tokenizer.eos_token_id]
        mask = [0] * len(prompt) + [i > 0] * (len(ids) - len(prompt))  # row 0 has nothing to learn
        return {"input_ids": ids, "loss_mask": mask}

class Padded(Lists):
    def __getitem__(self, i):
        row = super().__getitem__(i)
        row["attention_mask"] = [1] * len(row["input_ids"])
        padded = {k: torch.tensor([0] * (3 + i) + [int(x) for x in v]) for k, v in row.items()}
        return padded | {"position_ids": torch.arange(len(padded["input_ids"]))}

class Weights(Lists):
    def __getitem__(self, i):
        row = super().__getitem__(i)
        return row | {"loss_mask": [0.5 * x for x in row["loss_mask"]]}

class NoMask(Lists):
    def __getitem__(self, i):
        return {"input_ids": super().__getitem__(i)["input_ids"]}
"""


def test_a_data_set_of_ones_own_may_return_lists_or_padded_tensors(
    train: Run, tmp_path: Path
) -> None:
    (tmp_path / "own_rows.py").write_text(OWN_ROWS)

    def own(name: str) -> list[float]:
        words = [f"data.custom_cls.path={tmp_path / 'own_rows.py'}", f"data.custom_cls.name={name}"]
        steps = ["trainer.total_training_steps=4", "data.train_batch_size=2", "data.shuffle=false"]
        return [row["train/loss"] for row in read_metrics(train(name, *words, *steps))]

    losses = own("Lists")
    assert losses == own("Padded")
    assert all(0 < loss < 10 for loss in losses)
    with pytest.raises(DataError, match="row 1 of Weights has other values than 0 and 1"):
        own("Weights")
    with pytest.raises(DataError, match="row 0 of NoMask has no loss_mask"):
        own("NoMask")
