"""`hone sft`: learns from answers only, the same however it is cut, killed and resumed, or started."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.config import ConfigError
from hone.data.rows import DataError
from hone.models.load import load_causal_lm, load_tokenizer
from hone.tracking import read_metrics
from hone.tracking.console import Bar
from hone.trainer import main_sft
from hone.trainer.interrupt import Interrupted
from hone.trainer.ranks import LaunchError, Ranks, must_launch
from hone.trainer.sft.run import SFTRun
from hone.trainer.sft.tasks import SupervisedTask

from .around_fixtures import sft_config, sft_settings, sums, tiny_model, write_jsonl

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(tmp_path: Path, model: Path) -> list[str]:
    return sft_settings(
        tmp_path,
        model,
        f"data.val_files={write_jsonl(tmp_path / 'val.jsonl', sums(5))}",
        "trainer.total_training_steps=6",
    )


@pytest.fixture
def train(settings: list[str], tmp_path: Path) -> Run:
    def go(name: str, *overrides: str) -> Path:
        folder = tmp_path / name
        main_sft.run(sft_config(settings, folder, *overrides))
        return folder

    return go


def numbers(folder: Path) -> list[dict[str, float]]:
    """Metrics without what depends on the clock."""
    rows = read_metrics(folder)
    return [
        {k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))} for row in rows
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    lm = load_causal_lm(str(folder), dtype=torch.float32)
    return {name: p.detach() for name, p in lm.named_parameters()}


def test_the_loss_falls_and_the_validation_loss_is_the_plain_mean_over_answer_tokens(
    train: Run, settings: list[str], tmp_path: Path
) -> None:
    folder = train("run", "trainer.test_freq=3")
    rows = numbers(folder)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert [row["step"] for row in rows if "val/loss" in row] == [3, 6]
    assert rows[-1]["val/loss"] == pytest.approx(_plain_loss(folder, sums(5)), rel=1e-5)


def _plain_loss(folder: Path, rows: list[dict[str, Any]]) -> float:
    """Row by row with transformers' own attention: log p of every answer token, then the mean."""
    from transformers import AutoModelForCausalLM

    export = folder / "global_step_6" / "huggingface"
    tokenizer = load_tokenizer(str(export))
    lm = AutoModelForCausalLM.from_pretrained(export, attn_implementation="eager")
    losses: list[float] = []
    for row in rows:
        prompt = tokenizer.encode(f"u:{row['question']}\na:", add_special_tokens=False)
        answer = tokenizer.encode(row["answer"], add_special_tokens=False)
        ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
        with torch.no_grad():
            log_probs = torch.log_softmax(lm(ids).logits[0, :-1].double(), -1)
        targets = ids[0, 1:]
        picked = log_probs[torch.arange(len(targets)), targets]
        losses += (-picked[len(prompt) - 1 :]).tolist()
    return sum(losses) / len(losses)


def test_how_a_batch_is_cut_changes_nothing(train: Run) -> None:
    uninterrupted = train("whole")
    cut = train("cut", "data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=1")
    for a, b in zip(numbers(uninterrupted), numbers(cut), strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-5)
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-4)


def test_a_killed_run_resumes_with_the_numbers_of_the_uninterrupted_one(
    train: Run, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted = train("whole", "trainer.save_freq=2")
    run = SFTRun(sft_config(settings, tmp_path / "killed", "trainer.save_freq=2"), Ranks())
    monkeypatch.setattr(run.trainer, "step", _dying_after(run, 5))
    with pytest.raises(KeyboardInterrupt):
        run.fit()
    assert [row["step"] for row in numbers(tmp_path / "killed")] == [1, 2, 3, 4, 5]
    killed = train("killed", "trainer.save_freq=2")
    assert numbers(killed) == numbers(uninterrupted)
    for name, tensor in weights(uninterrupted).items():
        assert torch.equal(tensor, weights(killed)[name]), name


def test_a_run_that_starts_anew_is_resumed_from_its_own_checkpoints(
    train: Run, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train("run", "trainer.save_freq=3")
    half_written = folder / ".global_step_9.tmp"
    half_written.mkdir()
    often = ["trainer.save_freq=1", "trainer.max_ckpt_to_keep=2", "optim.lr=1e-3"]
    anew = sft_config(settings, folder, *often, "trainer.resume_mode=disable")
    run = SFTRun(anew, Ranks())
    monkeypatch.setattr(run.trainer, "step", _dying_after(run, 2))
    with pytest.raises(KeyboardInterrupt):
        run.fit()
    assert not half_written.exists()
    assert sorted(p.name for p in folder.glob("global_step_*")) == [
        "global_step_1",
        "global_step_2",
        "global_step_3.earlier",
        "global_step_6.earlier",
    ]
    train("run", *often, "trainer.total_training_steps=4")
    rows = numbers(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["train/lr"] for row in rows) <= 1e-3


def test_a_run_that_trains_nothing_or_fails_to_load_discards_nothing(
    train: Run, tmp_path: Path
) -> None:
    folder = train("run", "trainer.save_freq=2")
    before, names = numbers(folder), sorted(p.name for p in folder.iterdir())
    earlier = [
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={folder}/global_step_2",
    ]
    train("run", *earlier, "trainer.total_training_steps=2")  # no step is left
    other = write_jsonl(tmp_path / "other.jsonl", sums(41))
    with pytest.raises(DataError, match="number of rows 20, this run has 41"):
        train("run", *earlier, f"data.train_files={other}")
    assert numbers(folder) == before
    assert sorted(p.name for p in folder.iterdir()) == names


def _dying_after(run: SFTRun, steps: int) -> Callable[[], dict[str, float]]:
    step = run.trainer.step

    def dying() -> dict[str, float]:
        if run.trainer.step_number == steps:
            raise KeyboardInterrupt
        return step()

    return dying


def test_the_other_ranks_look_for_a_checkpoint_after_the_first(
    train: Run, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train("run", "trainer.total_training_steps=1")
    (folder / ".global_step_9.tmp").mkdir()
    run = SFTRun(sft_config(settings, folder), Ranks())
    run.ranks = Ranks(rank=1, world_size=2)
    barriers: list[bool] = []
    monkeypatch.setattr(Ranks, "barrier", lambda self: barriers.append(True))
    run.resume()
    assert len(barriers) == 2
    assert run.trainer.step_number == 1
    assert (folder / ".global_step_9.tmp").is_dir()
    assert numbers(folder)
    with run._checkpoint_folder(5) as shared:
        assert shared == folder / ".global_step_5.tmp"


def test_the_epochs_set_the_number_of_steps_and_the_learning_rate_falls_over_all_of_them(
    train: Run,
) -> None:
    epochs = ["trainer.total_training_steps=null", "trainer.total_epochs=2", "optim.lr=1e-3"]
    rows = numbers(train("run", *epochs, "optim.lr_warmup_steps=2"))
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["train/epoch"] for row in rows] == [0.0] * 5 + [1.0] * 5
    warm = [1 / 3, 2 / 3]
    falling = [0.5 * (1 + math.cos(math.pi * update / 8)) for update in range(8)]
    rates = [row["train/lr"] for row in rows]
    assert rates == pytest.approx([1e-3 * factor for factor in warm + falling])
    assert [row["step"] for row in rows if "val/loss" in row] == [10]


@pytest.mark.parametrize("truncation", ["error", "right"])
def test_a_row_that_is_too_long_is_known_before_the_first_step(
    train: Run, tmp_path: Path, truncation: str
) -> None:
    long = {"question": "1" * 300, "answer": "2"}
    file = write_jsonl(tmp_path / "long.jsonl", [*sums(8), long])
    overrides = [f"data.train_files={file}", "data.max_length=64", f"data.truncation={truncation}"]
    with pytest.raises(DataError, match=r"long\.jsonl, row 8: .*data\.max_length=64"):
        train("refused", *overrides)
    assert not (tmp_path / "refused" / "metrics.jsonl").exists()
    skipping = [*overrides, "data.on_bad_row=skip", "trainer.total_training_steps=null"]
    assert len(numbers(train("skipped", *skipping, "trainer.total_epochs=3"))) == 6


def test_skipped_rows_are_told_and_only_the_first_rank_tells_or_shows_progress(
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines: list[str] = []

    @contextmanager
    def progress(what: str, total: float) -> Iterator[Any]:
        lines.append(what)
        yield Bar(what, total, lambda bar: None)

    monkeypatch.setattr("hone.trainer.sft.run.progress", progress)
    file = write_jsonl(tmp_path / "bad.jsonl", [*sums(8), {"question": "1" * 300, "answer": "2"}])
    overrides = [f"data.train_files={file}", "data.max_length=64", "data.on_bad_row=skip"]
    run = SFTRun(sft_config(settings, tmp_path / "run", *overrides), Ranks())
    run.validate()
    assert lines == ["encode train rows", "encode validation rows", "validate"]
    assert "left out 1 bad train rows (too long: 1), such as:" in caplog.text
    lines.clear()
    caplog.clear()
    run.ranks = Ranks(rank=1, world_size=2)
    data = run.config.data
    run._encode("train rows", data.train_files, -1)
    assert run.validate()["val/loss"] > 0
    assert lines == []
    assert caplog.text == ""


def test_an_interrupt_saves_and_ends_with_its_code(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.trainer.interrupt import GracefulStop

    run = SFTRun(sft_config(settings, tmp_path / "run"), Ranks())
    monkeypatch.setattr(GracefulStop, "__enter__", lambda self: _requested(self))
    with pytest.raises(Interrupted):
        run.fit()
    assert (tmp_path / "run" / "global_step_1" / "manifest.json").is_file()


def _requested(stop: Any) -> Any:
    stop.signal_number = signal.SIGINT
    return stop


def test_only_assistant_turns_are_learnt(train: Run, tmp_path: Path, model: Path) -> None:
    messages = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "content": "4"},
    ]
    file = write_jsonl(tmp_path / "turns.jsonl", [{"messages": messages}] * 4)
    folder = train("run", f"data.train_files={file}", "data.val_files=null")
    assert len(numbers(folder)) == 6
    config = sft_config([], folder, f"data.train_files={file}", f"model.path={model}")
    from hone.data.create import create_sft_dataset

    tokenizer = load_tokenizer(str(model))
    row = create_sft_dataset(config.data.train_files, config.data, tokenizer)[0]
    batch = SupervisedTask().collate([row], tokenizer.pad_token_id).batch
    learnt = batch["responses"][batch["response_mask"].bool()]
    assert tokenizer.decode(learnt) == "2</s>4</s>"


def test_lora_trains_the_adapter_alone_and_exports_both(train: Run, model: Path) -> None:
    folder = train("run", "model.lora_rank=2", "optim.lr=1e-1")
    step = folder / "global_step_6"
    assert (step / "lora_adapter" / "adapter_model.safetensors").is_file()
    before, after = weights(model), weights(step / "huggingface")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("proj" in name for name in changed)


def test_old_checkpoints_are_pruned_and_the_config_keeps_its_origins(
    train: Run, settings: list[str], tmp_path: Path
) -> None:
    main_sft.main(
        [
            *settings,
            f"trainer.default_local_dir={tmp_path / 'run'}",
            "trainer.save_freq=2",
            "trainer.max_ckpt_to_keep=1",
        ]
    )
    folder = tmp_path / "run"
    assert [p.name for p in folder.glob("global_step_*")] == ["global_step_6"]
    origins = json.loads((folder / "config_origins.json").read_text())
    assert origins["optim.lr"] == "command line"


def test_another_batch_size_cannot_resume(train: Run) -> None:
    train("run")
    with pytest.raises(DataError, match=r"data\.train_batch_size 4, this run has 2"):
        train("run", "data.train_batch_size=2", "trainer.total_training_steps=8")


def test_fewer_rows_than_a_batch_are_named(train: Run) -> None:
    with pytest.raises(DataError, match=r"use data\.train_batch_size=20 or less"):
        train("run", "data.train_batch_size=64")


def test_ray_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="torchrun"):
        main_sft.main(["trainer.controller=ray"])


def test_ranks_that_disagree_with_the_config_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not must_launch(1, 1, "m")
    assert must_launch(2, 1, "m")
    with pytest.raises(LaunchError, match="--nproc_per_node=4"):
        must_launch(8, 2, "m")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert not must_launch(4, 1, "m")
    assert not must_launch(1, 1, "m")
    with pytest.raises(LaunchError, match="asks for 2 ranks, but 4"):
        must_launch(2, 1, "m")


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [1, 2])
def test_two_ranks_give_the_numbers_of_one(
    train: Run, settings: list[str], tmp_path: Path, sequence: int
) -> None:
    import subprocess
    import sys

    one = train("one", "trainer.test_freq=3")
    two = tmp_path / "two"
    overrides = [*settings, "trainer.test_freq=3", f"trainer.default_local_dir={two}"]
    overrides += [f"ulysses_sequence_parallel_size={sequence}"]
    command = [sys.executable, "-m", "hone.trainer.main_sft", *overrides]
    subprocess.run([*command, "trainer.n_gpus_per_node=2"], check=True, timeout=1200)
    for a, b in zip(numbers(one), numbers(two), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    for name, tensor in weights(one).items():
        assert torch.allclose(tensor, weights(two)[name], atol=1e-4), name
