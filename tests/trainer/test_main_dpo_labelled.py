"""`hone dpo algorithm.loss_type=kto`: the KL is over the mini-batch and all ranks, however it is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hone import cli
from hone.config import load_config
from hone.data.rows import DataError
from hone.trainer import main_dpo
from hone.trainer.ranks import launch
from hone.trainer.sft.reference import FILE

from .around_fixtures import tiny_model, write_jsonl
from .test_main_dpo import ROWS as PAIRS
from .test_main_dpo import plain_log_probs
from .test_sft import numbers

Run = Callable[..., Path]
BETA = 0.3
ROWS: list[dict[str, Any]] = [
    {
        "prompt": pair["prompt"],
        "completion": pair["chosen" if i % 3 else "rejected"],
        "label": bool(i % 3),
    }
    for i, pair in enumerate(PAIRS)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(tmp_path: Path, model: Path) -> list[str]:
    return [
        f"data.train_files={write_jsonl(tmp_path / 'train.jsonl', ROWS)}",
        f"data.val_files={write_jsonl(tmp_path / 'val.jsonl', ROWS[:6])}",
        f"model.path={model}",
        "data.train_batch_size=6",
        "algorithm.loss_type=kto",
        f"algorithm.beta={BETA}",
        "algorithm.undesirable_weight=1.5",
        "optim.lr=1e-2",
        "optim.lr_warmup_steps_ratio=0",
        "optim.lr_scheduler_type=constant",
        "trainer.total_training_steps=4",
        "trainer.logger=[jsonl]",
    ]


@pytest.fixture
def train(settings: list[str], tmp_path: Path) -> Run:
    def go(name: str, *overrides: str) -> Path:
        run_folder = f"trainer.default_local_dir={tmp_path / name}"
        config: Any = load_config([*settings, run_folder, *overrides], config_name="dpo_trainer")
        main_dpo.run(config)
        return tmp_path / name

    return go


def mismatched(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as pairs: its own completion, and that of the row before it."""
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}
        for row, other in zip(rows, [rows[-1], *rows[:-1]], strict=True)
    ]


def test_the_validation_loss_is_ktos_over_the_exported_policy(train: Run, model: Path) -> None:
    folder = train("run")
    pairs = mismatched(ROWS[:6])
    log_ratios, kl_terms = (plain_log_probs(folder, pairs) - plain_log_probs(model, pairs)).unbind(
        1
    )
    kl = kl_terms.mean().clamp(min=0)
    labels = torch.tensor([row["label"] for row in ROWS[:6]])
    signed = torch.where(labels, log_ratios - kl, kl - log_ratios)
    weights = torch.where(labels, 1.0, 1.5)
    expected = (weights * (1 - torch.sigmoid(BETA * signed))).mean()
    last = numbers(folder)[-1]
    assert last["val/loss"] == pytest.approx(float(expected), rel=1e-5)
    assert last["val/kl"] == pytest.approx(float(kl), rel=1e-4, abs=1e-6)
    assert last["val/rewards/chosen"] == pytest.approx(
        BETA * float(log_ratios[labels].mean()), rel=1e-4
    )
    assert last["val/rewards/rejected"] == pytest.approx(
        BETA * float(log_ratios[~labels].mean()), rel=1e-4
    )


def test_the_reference_scores_the_response_and_the_mismatched_one(train: Run, model: Path) -> None:
    reference = load_file(train("run") / FILE)["train"]
    expected = plain_log_probs(model, mismatched(ROWS))
    torch.testing.assert_close(reference, expected, rtol=1e-5, atol=1e-5)


def test_how_a_batch_is_cut_and_ordered_changes_nothing(train: Run) -> None:
    whole = numbers(train("whole"))
    assert whole[-1]["train/kl"] > 0.0 or whole[-2]["train/kl"] > 0.0
    one = ("data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=1")
    for a, b in zip(whole, numbers(train("one", *one)), strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)
    full = ("data.train_batch_size=24", "trainer.total_training_steps=2")
    runs = [numbers(train(f"seed{seed}", *full, f"data.seed={seed}")) for seed in (1, 2)]
    for a, b in zip(*runs, strict=True):
        assert b == pytest.approx(a, rel=1e-5, abs=1e-6)


def test_a_resumed_run_has_the_numbers_of_the_uninterrupted_one(train: Run) -> None:
    uninterrupted = numbers(train("whole"))
    train("part", "trainer.total_training_steps=2")
    for a, b in zip(uninterrupted, numbers(train("part")), strict=True):
        assert {k: v for k, v in a.items() if k.startswith("train/")} == {
            k: v for k, v in b.items() if k.startswith("train/")
        }


def test_a_response_is_never_mismatched_with_its_own_prompt(train: Run, tmp_path: Path) -> None:
    rows = [row for row in ROWS[:6] for _ in range(2)]
    file = f"data.train_files={write_jsonl(tmp_path / 'twice.jsonl', rows)}"
    reference = load_file(train("twice", file) / FILE)["train"]
    assert (reference[:, 0] - reference[:, 1]).abs().min() > 1e-3
    same = write_jsonl(tmp_path / "same.jsonl", [ROWS[0] | {"completion": c} for c in "abcdef"])
    with pytest.raises(DataError, match="all rows have the same prompt"):
        train("same", f"data.train_files={same}")


def test_apo_zero_unpaired_needs_no_mismatched_responses(train: Run) -> None:
    folder = train("apo", "algorithm.loss_type=apo_zero_unpaired", "data.val_files=null")
    assert load_file(folder / FILE)["train"].shape == (24, 1)
    rows = numbers(folder)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert "train/kl" not in rows[0]


def test_pairs_are_refused_with_the_missing_column(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    words = [*settings, f"data.train_files={pairs}", f"trainer.default_local_dir={tmp_path / 'x'}"]
    assert cli.main(["dpo", *words]) == 2
    assert "column 'completion' is missing or empty; the row has prompt" in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_give_the_numbers_of_one(train: Run, settings: list[str], tmp_path: Path) -> None:
    one, two = train("one"), tmp_path / "two"
    launch(2, "hone.trainer.main_dpo", [*settings, f"trainer.default_local_dir={two}"])
    for a, b in zip(numbers(one), numbers(two), strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5)
    first, other = numbers(one)[1], numbers(two)[1]
    for name in ("train/loss", "train/grad_norm"):
        assert other[name] == pytest.approx(first[name], rel=1e-5, abs=1e-7)
