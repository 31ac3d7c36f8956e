"""`hone train-rm`, `eval-rm` and `eval-prm`: Bradley–Terry on pairs, and what the commands report."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from hone import cli
from hone.data.rows import DataError, write_parquet
from hone.models.load import load_classifier
from hone.models.paths import resolve_model_path
from hone.trainer import main_rm
from hone.trainer.ranks import launch
from hone.verl.dialect import load_config

from .around_fixtures import tiny_model, write_jsonl
from .test_sft import numbers

Run = Callable[..., Path]
_DRAW = random.Random(1)
ROWS: list[dict[str, Any]] = [
    {
        "prompt": f"{i}+1=",
        "chosen": "n" * _DRAW.randint(1, 6) + str(i),
        "rejected": "y" * _DRAW.randint(1, 6) + str(i),
    }
    for i in range(24)
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
        "data.train_batch_size=4",
        "optim.lr=1e-2",
        "trainer.total_training_steps=4",
        "trainer.logger=[jsonl]",
    ]


@pytest.fixture
def train(settings: list[str], tmp_path: Path) -> Run:
    def go(name: str, *overrides: str) -> Path:
        run_folder = f"trainer.default_local_dir={tmp_path / name}"
        config: Any = load_config([*settings, run_folder, *overrides], config_name="rm_trainer")
        main_rm.run(config)
        return tmp_path / name

    return go


def weights(folder: Path) -> dict[str, torch.Tensor]:
    lm = load_classifier(str(folder), ("reward",), dtype=torch.float32)
    return {name: p.detach() for name, p in lm.named_parameters()}


def plain_loss(folder: Path, rows: Sequence[dict[str, Any]]) -> float:
    """Bradley–Terry in float64, from transformers' own decoder and head."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    path = resolve_model_path(str(folder))
    tokenizer = AutoTokenizer.from_pretrained(path)
    lm = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64).eval()
    losses = []
    for row in rows:
        scores = []
        for response in (row["chosen"], row["rejected"]):
            turn = [{"role": "user", "content": row["prompt"]}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
            ids = tokenizer.encode(text + response, add_special_tokens=False)
            hidden = lm.model(torch.tensor([[*ids, tokenizer.eos_token_id]])).last_hidden_state
            scores.append(lm.score(hidden[0, -1])[0])
        losses.append(-torch.nn.functional.logsigmoid(scores[0] - scores[1]))
    return float(torch.stack(losses).mean().detach())


def test_the_validation_loss_is_bradley_terrys_over_the_exported_classifier(train: Run) -> None:
    folder = train("run")
    rows = numbers(folder)
    assert rows[-1]["val/loss"] == pytest.approx(plain_loss(folder, ROWS[:6]), rel=1e-5)
    assert rows[-1]["val/accuracy"] == 1.0


def test_how_a_batch_is_cut_changes_nothing_and_adapters_train_too(train: Run) -> None:
    uninterrupted = train("whole")
    tokens = train("tokens", "data.max_token_len_per_gpu=64", "data.max_length=32")
    for a, b in zip(numbers(uninterrupted), numbers(tokens), strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)
    lora = train("lora", "model.lora_rank=2", "optim.lr=1e-1")
    assert (lora / "global_step_4" / "lora_adapter" / "adapter_model.safetensors").is_file()
    last = numbers(lora)[-1]["val/loss"]
    assert last == pytest.approx(plain_loss(lora, ROWS[:6]), rel=1e-5)


def test_a_resumed_run_has_the_numbers_of_the_uninterrupted_one(train: Run) -> None:
    constant = "optim.lr_warmup_steps_ratio=0"
    uninterrupted = train("whole", constant)
    train("part", constant, "trainer.total_training_steps=2")
    part = train("part", constant)
    for a, b in zip(numbers(uninterrupted), numbers(part), strict=True):
        assert {k: v for k, v in a.items() if k.startswith("train/")} == {
            k: v for k, v in b.items() if k.startswith("train/")
        }
    assert all(torch.equal(p, weights(part)[name]) for name, p in weights(uninterrupted).items())


def test_the_worker_of_rl_scores_a_response_as_the_training_did(train: Run) -> None:
    from hone.agents.collate import collate_outputs
    from hone.agents.contract import AgentLoopOutput
    from hone.data.prompt_ids import render_prompt
    from hone.models.load import load_tokenizer
    from hone.workers.reward_model import RewardModelWorker

    folder = train("run")
    path = resolve_model_path(str(folder))
    tokenizer = load_tokenizer(path)
    outputs = []
    for response in (ROWS[0]["chosen"], ROWS[0]["rejected"]):
        ids = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
        prompt = render_prompt(ROWS[0]["prompt"], tokenizer)
        outputs.append(AgentLoopOutput(prompt, ids, [1] * len(ids)))
    data = collate_outputs(outputs, pad_token_id=tokenizer.pad_token_id)
    settings = [f"reward_model.model.path={path}", f"actor_rollout_ref.model.path={path}"]
    worker = RewardModelWorker(
        load_config([*settings, "reward_model.enable=true", "trainer.device=cpu"])
    )
    worker.init_model()
    scores = worker.compute_rm_score(data).batch["rm_scores"].sum(1)
    loss = float(torch.nn.functional.softplus(scores[1] - scores[0]))
    assert loss == pytest.approx(plain_loss(folder, ROWS[:1]), rel=1e-4)


def test_the_commands_report_accuracy_with_its_interval(
    settings: list[str], tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    run_folder = f"trainer.default_local_dir={tmp_path / 'run'}"
    assert cli.main(["train-rm", *settings, run_folder]) == 0
    judged = ["eval-rm", "--baseline", str(model), "--out", str(out), *settings]
    assert cli.main([*judged, f"model.path={tmp_path / 'run'}"]) == 0
    results = json.loads(out.read_text())
    assert (results["model"]["pairs"], results["model"]["accuracy"]) == (6, 1.0)
    assert results["model"]["low"] == pytest.approx(0.6096657)
    assert results["baseline"]["accuracy"] < 1.0
    assert "accuracy" in capsys.readouterr().out
    assert cli.main(["eval-rm", "--folds", "1", *settings]) == 2
    assert "use 2 or more" in capsys.readouterr().err
    bad = write_jsonl(tmp_path / "bad.jsonl", [ROWS[0], ROWS[1] | {"chosen": ""}])
    assert cli.main(["train-rm", *settings, run_folder, f"data.train_files={bad}"]) == 2
    assert "bad.jsonl, row 1: a response of the pair is empty" in capsys.readouterr().err


def test_cross_validation_tests_every_pair_once_and_never_on_a_prompt_it_was_trained_on(
    settings: list[str], tmp_path: Path
) -> None:
    rows = [*ROWS[:12], *(row | {"chosen": row["chosen"] + "!"} for row in ROWS[:6])]
    rows = [row | {"date": datetime(2025, 1, 1)} for row in rows]
    file, out = tmp_path / "pairs.parquet", tmp_path / "out.json"
    write_parquet(rows, file)
    overrides = [f"data.train_files={file}", f"trainer.default_local_dir={tmp_path / 'cv'}"]
    fewer = "trainer.total_training_steps=2"
    assert (
        cli.main(["eval-rm", "--folds", "3", "--out", str(out), *settings, *overrides, fewer]) == 0
    )
    pooled = json.loads(out.read_text())["cross_validation"]
    assert pooled["pairs"] == 18 == sum(fold["pairs"] for fold in pooled["folds"].values())
    assert pooled["right"] == sum(fold["right"] for fold in pooled["folds"].values())
    for fold in range(3):
        parts = [
            {
                json.loads(line)["prompt"]
                for line in (tmp_path / f"cv/fold_{fold}/{part}.jsonl").open()
            }
            for part in ("train", "test")
        ]
        assert not parts[0] & parts[1]


def test_cross_validation_and_its_baseline_share_their_pairs(
    settings: list[str], tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"prompt": "2+2=", "chosen": "n" * 300, "rejected": "y"}
    train = write_jsonl(tmp_path / "train.jsonl", [long, *ROWS, ROWS[0] | {"chosen": "n"}])
    (tmp_path / "mine.py").write_text(
        "from hone.data.pairs import PairDataset\n"
        "class Mine(PairDataset):\n"
        "    def pair(self, row):\n"
        "        return super().pair({**row, 'prompt': row['prompt'].replace('1', '2')})\n"
    )
    out = tmp_path / "out.json"
    words = ["eval-rm", "--folds", "2", "--baseline", str(model), "--out", str(out), *settings]
    words += [f"data.train_files={train}", "data.max_length=100", "data.on_bad_row=skip"]
    words += [f"trainer.default_local_dir={tmp_path / 'cv'}", "data.train_max_samples=12"]
    words += [f"data.custom_cls.path={tmp_path / 'mine.py'}", "data.custom_cls.name=Mine"]
    words += ["trainer.total_training_steps=1", "data.shuffle=false"]
    assert cli.main(words) == 0
    results = json.loads(out.read_text())
    for name in ("cross_validation", "baseline"):
        assert results[name]["pairs"] == 11
        assert results[name]["left_out"] == {"too long": 1}
    assert cli.main([*words, "data.val_max_samples=3"]) == 2
    assert "no effect with --folds" in capsys.readouterr().err
    (tmp_path / "other.py").write_text("class Mine(list):\n    def __init__(s, *a, **k): ...\n")
    assert cli.main([*words, f"data.custom_cls.path={tmp_path / 'other.py'}"]) == 2
    assert "not a subclass of PairDataset" in capsys.readouterr().err


def test_a_process_reward_model_is_judged_beside_its_base(tmp_path: Path, model: Path) -> None:
    bench = [{"problem": f"{i}+1", "steps": ["a", "b", "c"], "label": i % 4 - 1} for i in range(12)]
    files = {
        "gsm8k": write_jsonl(tmp_path / "gsm8k.jsonl", bench),
        "math": write_jsonl(tmp_path / "math.jsonl", bench[:8]),
    }
    responses = ["a\n\n#### 2", "b\n\n#### 3", "b\n\n#### 3", "c"]
    row = {"prompt": "1+1=", "responses": responses, "scores": [1.0, 0.0, 0.0, 0.0]}
    ranked = write_jsonl(tmp_path / "ranked.jsonl", [row] * 3)
    labelled = write_jsonl(
        tmp_path / "val.jsonl",
        [{"prompt": "1", "completions": ["a", "b"], "labels": [True, False]}],
    )
    out = tmp_path / "out.json"
    flags = [word for file in files.values() for word in ("--processbench", str(file))]
    flags += ["--best-of-n", str(ranked), "--baseline", str(model), "--out", str(out)]
    settings = [f"model.path={model}", f"data.val_files={labelled}"]
    assert cli.main(["eval-prm", *flags, *settings]) == 0
    results = json.loads(out.read_text())
    assert results["model"] == results["baseline"]  # the same base and the same new head
    judged = results["model"]["processbench"]
    assert judged["tuned_on"] == "gsm8k"
    assert judged["subsets"]["math"]["chance_f1"] == pytest.approx(0.25)
    assert (judged["subsets"]["gsm8k"]["wrong"], judged["subsets"]["gsm8k"]["right"]) == (9, 3)
    assert results["model"]["labelled_steps"]["steps"] == 2
    scores = results["model"]["best_of_n"]["metrics"]
    assert scores["oracle@4"]["value"] == 1.0
    assert scores["majority@4"]["value"] == 0.0
    assert scores["mean@1"]["value"] == 0.25


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["eval-prm", "model.path=m"], "nothing to evaluate on"),
        (["eval-prm", "--processbench", "x.jsonl"], "model.path was not given"),
        (["eval-rm", "model.path=m"], "data.val_files was not given"),
        (
            ["eval-prm", "model.path=m", "data.val_files=x", "--aggregate", "min"],
            "need --best-of-n",
        ),
        (["eval-prm", "model.path=m", "--best-of-n", "x", "--split", ""], "--split is empty"),
        (
            ["eval-rm", "model.path=m", "data.val_files=x", "trainer.n_gpus_per_node=2"],
            "one process",
        ),
    ],
)
def test_what_is_missing_is_named(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert reason in capsys.readouterr().err


def test_a_budget_below_the_longest_pair_is_raised_before_the_run(
    settings: list[str], tmp_path: Path
) -> None:
    long = [{"prompt": "1+1=", "chosen": "n" * 90, "rejected": "y" * 90}] * 2
    file = write_jsonl(tmp_path / "long.jsonl", long)
    words = [*settings, f"data.train_files={file}", "data.max_length=60", "data.val_files=null"]
    config: Any = load_config(
        [*words, "data.max_token_len_per_gpu=64", "data.on_bad_row=skip"], config_name="rm_trainer"
    )
    assert config.data.max_token_len_per_gpu == 120
    with pytest.raises(DataError, match="no prompt is left"):
        main_rm.run(config)
    for row in long:
        row |= {"prompt": "1" * 50, "chosen": "n" * 50, "rejected": "y" * 49}
    write_jsonl(tmp_path / "long.jsonl", long)
    last = f"trainer.default_local_dir={tmp_path / 'long'}"
    words = [*words, "data.max_token_len_per_gpu=64", "data.train_batch_size=2", last]
    main_rm.run(load_config([*words, "trainer.total_training_steps=1"], config_name="rm_trainer"))
    assert numbers(tmp_path / "long")[-1]["train/loss"] > 0


@pytest.mark.slow
def test_two_ranks_give_the_numbers_of_one(train: Run, settings: list[str], tmp_path: Path) -> None:
    one, two = train("one"), tmp_path / "two"
    launch(2, "hone.trainer.main_rm", [*settings, f"trainer.default_local_dir={two}"])
    for a, b in zip(numbers(one), numbers(two), strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5)
    assert all(torch.allclose(p, weights(two)[name], atol=1e-4) for name, p in weights(one).items())
