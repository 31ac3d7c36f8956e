"""`hone dpo`: equal to plain transformers in float64, however the batch is cut, killed and resumed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hone import cli
from hone.config import load_config
from hone.data.rows import DataError
from hone.models.load import load_causal_lm, resolve_model_path
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.trainer import main_dpo
from hone.trainer.ranks import launch
from hone.trainer.sft.reference import FILE

from .around_fixtures import MARKED_TEMPLATE, write_jsonl
from .test_sft import numbers

Run = Callable[..., Path]
BETA = 0.3
_DRAW = random.Random(1)
ROWS: list[dict[str, Any]] = [
    {
        "prompt": f"{i}+1=",
        "chosen": "n" * _DRAW.randint(1, 6) + str(i),
        "rejected": "y" * _DRAW.randint(1, 6) + str(i),
    }
    for i in range(24)
]
CONSTANT = ("optim.lr_warmup_steps_ratio=0", "optim.lr_scheduler_type=constant")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with more output tokens than its tokenizer has."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = MARKED_TEMPLATE
    lm = tiny_lm(len(tokenizer) + 13, hidden=16, layers=1, heads=2, kv_heads=1, mlp=32, seed=0)
    return save_pretrained(lm, tokenizer, tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(tmp_path: Path, model: Path) -> list[str]:
    return [
        f"data.train_files={write_jsonl(tmp_path / 'train.jsonl', ROWS)}",
        f"data.val_files={write_jsonl(tmp_path / 'val.jsonl', ROWS[:6])}",
        f"model.path={model}",
        "data.train_batch_size=4",
        f"algorithm.beta={BETA}",
        "optim.lr=1e-2",
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


def weights(folder: Path) -> dict[str, torch.Tensor]:
    lm = load_causal_lm(str(folder), dtype=torch.float32)
    return {name: p.detach() for name, p in lm.named_parameters()}


def plain_log_probs(folder: Path, rows: Sequence[dict[str, Any]]) -> torch.Tensor:  # [rows, 2]
    """The log-probability of each response and its end token, by transformers alone in float64."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_model_path(str(folder))
    tokenizer = AutoTokenizer.from_pretrained(path)
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    values = []
    for row in rows:
        turn = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        for response in (row["chosen"], row["rejected"]):
            ids = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
            with torch.no_grad():
                logits = lm(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            log_probs = logits.log_softmax(-1)
            values.append(log_probs[torch.arange(len(ids)), torch.tensor(ids)].sum())
    return torch.stack(values).view(-1, 2)


def plain_gaps(folder: Path, model: Path, rows: Sequence[dict[str, Any]]) -> torch.Tensor:
    """How much more the trained policy prefers the chosen responses than the model did."""
    chosen, rejected = (plain_log_probs(folder, rows) - plain_log_probs(model, rows)).unbind(1)
    return chosen - rejected


def test_the_validation_loss_is_that_of_the_exported_policy_against_the_starting_model(
    train: Run, model: Path
) -> None:
    folder = train("run")
    gaps = plain_gaps(folder, model, ROWS[:6])
    last = numbers(folder)[-1]
    expected = -torch.nn.functional.logsigmoid(BETA * gaps).mean()
    assert last["val/loss"] == pytest.approx(float(expected), rel=1e-5)
    assert last["val/rewards/margins"] == pytest.approx(BETA * float(gaps.mean()), rel=1e-4)
    assert last["val/rewards/accuracies"] == 1.0
    assert float(gaps.min()) > 0.1  # it learnt


def test_the_reference_is_the_starting_model_and_the_first_loss_is_log_two(
    train: Run, model: Path
) -> None:
    folder = train("run", *CONSTANT)
    reference = load_file(folder / FILE)
    torch.testing.assert_close(
        reference["train"], plain_log_probs(model, ROWS), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(reference["val"], reference["train"][:6], rtol=1e-6, atol=1e-5)
    first = numbers(folder)[0]
    assert first["train/loss"] == pytest.approx(0.6931472, rel=1e-6)
    assert first["train/grad_norm"] > 0.01


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm", "cpo"])
def test_how_a_batch_is_cut_changes_nothing(train: Run, loss_type: str) -> None:
    common = (f"algorithm.loss_type={loss_type}", *CONSTANT)
    whole = train("whole", *common)
    tokens = train("tokens", *common, "data.max_token_len_per_gpu=64", "data.max_length=32")
    pairs = train("pairs", *common, "data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=2")
    for cut in (tokens, pairs):
        for a, b in zip(numbers(whole), numbers(cut), strict=True):
            assert b == pytest.approx(a, rel=1e-4, abs=1e-6)
        first, cut_first = numbers(whole)[0], numbers(cut)[0]
        assert cut_first["train/grad_norm"] == pytest.approx(first["train/grad_norm"], rel=1e-5)


def test_the_order_of_the_pairs_of_a_batch_changes_nothing(train: Run) -> None:
    common = ("data.train_batch_size=24", "trainer.total_training_steps=2", *CONSTANT)
    runs = [numbers(train(f"seed{seed}", *common, f"data.seed={seed}")) for seed in (1, 2)]
    for a, b in zip(*runs, strict=True):
        assert b == pytest.approx(a, rel=1e-5, abs=1e-6)


def test_a_resumed_run_has_the_numbers_of_the_uninterrupted_one(train: Run, tmp_path: Path) -> None:
    uninterrupted = train("whole", *CONSTANT)
    train("part", *CONSTANT, "trainer.total_training_steps=2")
    before = (tmp_path / "part" / FILE).stat()
    part = train("part", *CONSTANT)
    after = (part / FILE).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)  # it was read
    for a, b in zip(numbers(uninterrupted), numbers(part), strict=True):
        assert {k: v for k, v in a.items() if k.startswith("train/")} == {
            k: v for k, v in b.items() if k.startswith("train/")
        }
    assert all(torch.equal(p, weights(part)[name]) for name, p in weights(uninterrupted).items())


def test_a_resumed_run_reads_the_reference_and_refuses_another_model(
    train: Run, model: Path, tmp_path: Path
) -> None:
    folder = train("run", *CONSTANT, "trainer.total_training_steps=2")
    other = train("other", "trainer.total_training_steps=1")
    path = f"model.path={resolve_model_path(str(other))}"
    kept = (folder / FILE).read_bytes()
    with pytest.raises(DataError, match="was trained with another reference"):
        train("run", *CONSTANT, path)
    assert (folder / FILE).read_bytes() == kept


def test_without_a_reference_none_is_computed(train: Run) -> None:
    for loss_type in ("simpo", "orpo", "cpo"):
        folder = train(loss_type, f"algorithm.loss_type={loss_type}")
        assert not (folder / FILE).exists()
        first, last = numbers(folder)[0], numbers(folder)[-1]
        assert last["train/loss"] < first["train/loss"]


def test_the_reference_of_adapters_is_the_policy_as_it_started(train: Run, model: Path) -> None:
    fresh = train("fresh", "model.lora_rank=2", "optim.lr=1e-1")
    gaps = plain_gaps(fresh, model, ROWS[:6])
    expected = -torch.nn.functional.logsigmoid(BETA * gaps).mean()
    assert numbers(fresh)[-1]["val/loss"] == pytest.approx(float(expected), rel=1e-4)
    assert float(gaps.abs().max()) > 1e-3
    adapter = fresh / "global_step_4" / "lora_adapter"
    warm = train("warm", f"model.lora_adapter_path={adapter}", *CONSTANT)
    torch.testing.assert_close(
        load_file(warm / FILE)["train"], plain_log_probs(fresh, ROWS), rtol=1e-4, atol=1e-4
    )
    assert numbers(warm)[0]["train/loss"] == pytest.approx(0.6931472, rel=1e-5)


def test_margins_are_read_or_refused(train: Run, tmp_path: Path) -> None:
    rows = [row | {"margin": 1.5} for row in ROWS]
    file = f"data.train_files={write_jsonl(tmp_path / 'margins.jsonl', rows)}"
    first = numbers(train("margins", file, *CONSTANT))[0]
    expected = -torch.nn.functional.logsigmoid(torch.tensor(-1.5))
    assert first["train/loss"] == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(DataError, match=r"margins, which algorithm\.loss_type=orpo does not read"):
        train("orpo", file, "algorithm.loss_type=orpo")


def test_the_command_names_wrong_losses_and_bad_rows(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = f"trainer.default_local_dir={tmp_path / 'cli'}"
    assert cli.main(["dpo", *settings, run_folder, "algorithm.loss_type=sigmod"]) == 2
    assert "algorithm.loss_type=sigmod is unknown. Did you mean" in capsys.readouterr().err
    same = {"prompt": "1", "chosen": "a", "rejected": "a "}
    bad = write_jsonl(tmp_path / "bad.jsonl", [*ROWS[:4], same])
    assert cli.main(["dpo", *settings, run_folder, f"data.train_files={bad}"]) == 2
    error = capsys.readouterr().err
    assert "bad.jsonl, row 4: the two responses of the pair are the same" in error
    assert cli.main(["dpo", *settings, run_folder, "trainer.total_training_steps=1"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["sigmoid", "orpo"])
def test_two_ranks_give_the_numbers_of_one(
    train: Run, settings: list[str], tmp_path: Path, loss_type: str
) -> None:
    loss = f"algorithm.loss_type={loss_type}"
    one, two = train("one", loss), tmp_path / "two"
    launch(2, "hone.trainer.main_dpo", [*settings, loss, f"trainer.default_local_dir={two}"])
    for a, b in zip(numbers(one), numbers(two), strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5)
    first, other = numbers(one)[0], numbers(two)[0]
    for name in ("train/loss", "train/grad_norm"):
        assert other[name] == pytest.approx(first[name], rel=1e-5, abs=1e-7)
