"""PURE's world: right demonstrations, true step labels, the oracle's scores, and a run of all its parts."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hone.trainer.ppo.plan import Plan
from hone.verl.dialect import load_config

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "pure"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("world")


def test_demonstrations_have_errors_and_restatements_at_their_rates(
    world: Any, tmp_path: Path
) -> None:
    world.make(tmp_path, {"test": 21, "train": 21, "sft": 300}, seed=1)
    rows = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    steps = [row["response"].split("\n\n") for row in rows]
    labels = [world.step_labels(row["prompt"], s) for row, s in zip(rows, steps, strict=True)]
    assert 0.55 < sum(map(all, labels)) / len(rows) < 0.77  # 0.9 to the power of 3 … 5
    restated = sum(step[1:2] == "=" for response in steps for step in response)
    assert 0.03 < restated / sum(map(len, steps)) < 0.09
    prompts: list[str] = []
    for name in ("test", "train", "sft"):
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        mine = [json.loads(line)["prompt"] for line in lines]
        lengths = Counter(prompt.count("+") for prompt in mine)
        assert lengths == dict.fromkeys((3, 4, 5), len(mine) // 3)
        prompts += mine
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize(
    ("steps", "labels"),
    [
        (["a7+5=2", "b2+4=6", "\\boxed{6}"], [1, 1, 1]),
        (["a7+5=2", "2=2", "2=2", "b2+4=6", "\\boxed{6}"], [1, 1, 1, 1, 1]),
        (["a7+5=3", "b3+4=7", "\\boxed{7}"], [0, 0, 0]),  # wrong arithmetic
        (["a7+5=2", "b2+3=5", "\\boxed{5}"], [1, 0, 0]),  # another operation than the prompt's
        (["a7+5=2", "b3+4=7", "\\boxed{7}"], [1, 0, 0]),  # another value than the last
        (["a7+5=2", "\\boxed{2}"], [1, 0]),  # answers before the end
        (["a7+5=2", "3=3", "b2+4=6", "\\boxed{6}"], [1, 0, 0, 0]),
        (["a7+5=2", "b2+4=6", "b6+4=0", "\\boxed{0}"], [1, 1, 0, 0]),
        (["a7+5=2", "", "nonsense"], [1, 0, 0]),
    ],
)
def test_a_step_is_right_if_it_follows_from_right_steps(
    world: Any, steps: list[str], labels: list[int]
) -> None:
    assert world.step_labels("7a+5b+4=", steps) == [bool(label) for label in labels]


def test_the_score_is_of_the_answer_in_the_last_step(world: Any) -> None:
    info = {"prompt": "7a+5b+4="}
    right = world.compute_score("chains", "a7+5=2\n\nb2+4=6\n\n\\boxed{6}", "6", info)
    assert (right["score"], right["steps"], right["right_steps"]) == (1.0, 3.0, 1.0)
    guessed = world.compute_score("chains", "2=2\n\n\\boxed{6}", "6", info)
    assert (guessed["score"], guessed["restated"], guessed["right_steps"]) == (1.0, 1.0, 0.0)
    beyond = world.compute_score("chains", "\\boxed{6}\n\n6=6", "6", info)
    assert beyond["score"] == 0.0


def test_the_oracle_scores_every_step_end_by_the_truth(world: Any, tmp_path: Path) -> None:
    import torch

    from hone.protocol import DataProto
    from hone.protocol.rows import object_array

    oracle = importlib.import_module("oracle")
    world.base_model(tmp_path / "base", 8, 1)
    words = ["reward_model.enable=true", "reward_model.type=prm", "reward_model.model.path=unused"]
    words.append("reward_model.credit_assignment=gamma-decay")
    config = load_config([*words, f"actor_rollout_ref.model.path={tmp_path / 'base'}"])
    scores = {}
    for worker in (oracle.OraclePRM, oracle.NoisyPRM):
        one = worker(config)
        one.init_model()
        text = "a7+5=2\n\nb2+4=5\n\n\\boxed{5}"
        ids = [*one.tokenizer.encode(text, add_special_tokens=False), one.tokenizer.eos_token_id]
        batch = DataProto.from_dict(
            {"responses": torch.tensor([ids] * 40), "response_mask": torch.ones(40, len(ids))},
            {"extra_info": object_array([{"prompt": f"7a+5b+4{'c+1' * i}="} for i in range(40)])},
        )
        out = one.compute_rm_score(batch)
        ends = out.batch["step_mask"][0].nonzero().flatten().tolist()
        assert ends == [6, 13, len(ids) - 1]
        scores[worker] = out.batch["step_rewards"][:, ends]
    assert (scores[oracle.OraclePRM] == torch.tensor([1.0, -1.0, -1.0])).all()
    wrong = (scores[oracle.NoisyPRM] != scores[oracle.OraclePRM]).float().mean()
    assert 0.08 < wrong < 0.35


@pytest.mark.slow
def test_every_cell_has_a_plan(world: Any, tmp_path: Path) -> None:
    cells = importlib.import_module("cells")
    assert len(cells.CELLS) == 12
    for cell in cells.CELLS:
        keys = cells.overrides_of(cell, tmp_path)
        plan = Plan.of(load_config(keys, config_name="pure", config_path=FOLDER))
        assert plan.reward_model == {"vr": None, "prime": "prime"}.get(cell, "prm")


@pytest.mark.slow
def test_the_whole_recipe_runs_at_a_tiny_size(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "CUDA_VISIBLE_DEVICES": "",
        "CELLS": "soft-prm gamma-noisy prime",
        "SAMPLES": "12",
        "LABEL": "--least 0",
        "WORLD": "--hidden 16 --layers 1 --train 64 --test 8 --demonstrations 64",
        "SFT": "trainer.total_training_steps=2",
        "PRM": "trainer.total_training_steps=1 head_stage.total_training_steps=1 data.train_batch_size=16",
    }
    overrides = (
        "trainer.total_training_steps=1",
        "data.train_batch_size=4",
        "data.max_response_length=12",
    )
    done = subprocess.run(
        ["bash", str(FOLDER / "run.sh"), "--small", str(tmp_path / "out"), *overrides,
         "actor_rollout_ref.actor.ppo_mini_batch_size=4"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    logs = "".join(f.read_text()[-800:] for f in (tmp_path / "out" / "logs").glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    cells = [json.loads(f.read_text()) for f in sorted((tmp_path / "out" / "curves").iterdir())]
    assert [cell["cell"] for cell in cells] == ["gamma-noisy-1", "prime-1", "soft-prm-1"]
    assert all(len(cell["held_out"]) == 2 and cell["seconds"] > 0 for cell in cells)
    assert "implicit_reward" in cells[1]["training"]
    assert "prm_reward" in cells[2]["training"]
    assert "labelled_steps" in json.loads((tmp_path / "out" / "prm.json").read_text())["model"]
    again = subprocess.run(
        [sys.executable, str(FOLDER / "cells.py"), "collect", str(tmp_path / "again"),
         str(tmp_path / "out" / "curves")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [line.split("|")[1] for line in again.stdout.splitlines()[2:5]] == [
        " `prime` ", " `soft-prm` ", " `gamma-noisy` "
    ]  # fmt: skip
