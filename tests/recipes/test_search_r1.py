"""The closed world's own code: demonstrations in the loop's form, the three retrievers, the table."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hone.agents.loops.search import INFORMATION_END, INFORMATION_START, read_action
from hone.controller.worker import free_port
from hone.rewards.scores.qa_em_format import is_valid_sequence
from hone.verl.dialect import compose

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "search_r1"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    arguments = ["--made-up", str(folder), "--demonstrations", "40", "--topk", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["world.py", *arguments])
        module("world", patch).main()
    return folder


@pytest.mark.slow
def test_demonstrations_have_the_loops_form_and_are_of_training_questions(world: Path) -> None:
    train, test, rows = (lines(world / f"{name}.jsonl") for name in ("train", "test", "sft"))
    assert (len(train), len(test), len(rows)) == (2100, 300, 54)  # 14 search, two rows each
    questions = {row["prompt"] for row in train}
    whole = 0
    for row in rows:
        question = row["prompt"].splitlines()[0] + "\n"
        assert question in questions
        action = read_action(row["response"])
        assert action is not None
        if INFORMATION_START in row["prompt"]:
            assert row["prompt"].endswith(INFORMATION_END)
            text = row["prompt"].removeprefix(question) + row["response"]
            assert is_valid_sequence(text) == (True, "")
            assert f"is {action.content}" in row["prompt"]
            whole += 1
    assert whole == 14
    assert not questions & {row["prompt"] for row in test}


def test_the_oracle_answers_a_query_like_its_question_and_chance_is_steady(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retrievers = module("retrievers", monkeypatch)
    from hone.retrieval.serve import IndexOptions, open_index

    options = IndexOptions(world / "passages.jsonl.gz", folder=world / "index")
    corpus, real = open_index(options)
    oracle = retrievers.OracleIndex(real, world / "oracle.jsonl")
    golden = lines(world / "oracle.jsonl")
    for at in (0, 7, 2399):
        [hits] = oracle.search([golden[at]["question"].rstrip("?")], 3)
        assert hits[0].number == golden[at]["passages"][0]
        assert len({hit.number for hit in hits}) == 3
    assert oracle.search(["xyz"], 2) == [[]]
    chance = retrievers.RandomIndex(len(corpus))
    [first, other] = chance.search(["a", "b"], 3)
    assert first != other
    assert chance.search(["a"], 3) == [first]


def test_the_small_models_tokenizer_keeps_every_text(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    module("world", monkeypatch)
    small = module("small_model", monkeypatch)
    monkeypatch.setattr("sys.argv", ["small_model.py", str(tmp_path / "base")])
    small.main()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    for row in lines(world / "sft.jsonl"):
        text = row["prompt"] + row["response"]
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert len(ids) < 60


def test_the_table_weighs_sets_by_their_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = module("cells", monkeypatch)
    (tmp_path / "world").mkdir()
    rows = [{"data_source": "nq"}] * 3 + [{"data_source": "popqa"}]
    (tmp_path / "world" / "test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for cell, last in (("real-1", 1.0), ("random-1", 0.0)):
        (tmp_path / cell).mkdir()
        measured = [
            {
                "step": step,
                "val-core/nq/acc/mean@1": nq,
                "val-core/popqa/acc/mean@1": 0.0,
                "val-aux/nq/env/number_of_valid_search/mean@1": 1.0,
                "val-aux/popqa/env/number_of_valid_search/mean@1": 2.0,
                "critic/score/mean": nq,
                "timing_s/step": 2.0,
            }
            for step, nq in ((0, 0.0), (10, last))
        ]
        (tmp_path / cell / "metrics.jsonl").write_text(
            "".join(json.dumps(m) + "\n" for m in measured)
        )
    monkeypatch.setattr("sys.argv", ["cells.py", f"{tmp_path}/curves", str(tmp_path)])
    cells.main()
    found = json.loads((tmp_path / "curves.json").read_text())["cells"]
    assert [(c["cell"], c["points_gained"]) for c in found] == [("random-1", 0.0), ("real-1", 75.0)]
    assert found[1]["held_out"][1]["searches"] == 1.25


@pytest.mark.parametrize(
    ("script", "estimator", "samples"),
    [("train_grpo.sh", "grpo", 5), ("train_ppo.sh", "gae", 1), ("evaluate.sh", "grpo", 5)],
)
def test_the_scripts_ask_for_the_authors_training(
    script: str, estimator: str, samples: int
) -> None:
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "echo", "BASE_MODEL": "M", "DATA_DIR": "D"}
    command = ["bash", str(FOLDER / "scripts" / script), "trainer.n_gpus_per_node=1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    config = compose(shlex.split(done.stdout)[2:]).config
    rollout = config.actor_rollout_ref.rollout
    assert (config.algorithm.adv_estimator, rollout.n) == (estimator, samples)
    assert rollout.default_loop == "search_agent"
    assert (rollout.multi_turn.max_assistant_turns, rollout.max_tokens_per_turn) == (5, 500)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (2048, 4096)
    assert config.trainer.val_only == (script == "evaluate.sh")


@pytest.mark.slow
def test_the_small_size_runs_from_nothing_to_a_table(tmp_path: Path) -> None:
    """A few steps of each part; whether it learns is the recipe's own business."""
    short = ["trainer.total_training_steps=2", "trainer.test_freq=2", "data.val_max_samples=8"]
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "SFT": "trainer.total_training_steps=20",
        "PORT": str(free_port()),
        "CELLS": "random ppo",
    }
    script = ["bash", str(FOLDER / "run.sh"), "--small", str(tmp_path)]
    done = subprocess.run([*script, *short], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "random-1: EM 0.0 -> 0.0 %" in done.stdout
    assert "ppo-1: EM 0.0" in done.stdout
    config = (tmp_path / "ppo-1" / "config.yaml").read_text()
    assert "adv_estimator: gae" in config
