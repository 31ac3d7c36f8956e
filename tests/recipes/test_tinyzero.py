"""The recipe's own code: worked solutions that are true, a tokenizer that keeps every text, curves."""

from __future__ import annotations

import importlib
import json
import random
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from hone.data.prepare import prepare_from_arguments
from hone.data.preprocess.countdown import TEMPLATES, Ranges, generate_problems, problem_key
from hone.rewards.expressions import evaluate
from hone.rewards.scores.countdown import compute_score

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "tinyzero"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


SMALL = Ranges(max_numbers=3, max_number=20, max_target=40)
"""Of `reproduce.sh --small`."""


def problems(count: int) -> Any:
    return generate_problems(count, seed=5, ranges=Ranges())


def test_every_step_of_every_attempt_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    worked = module("worked", monkeypatch)
    chooser = random.Random(1)
    verdicts = set()
    for problem in problems(200):
        text = worked.worked(problem, chooser)
        for line in text.partition("</think>")[0].strip().splitlines():
            steps, verdict = line.rsplit(", ", 1)
            values = {evaluate(step).value for step in steps.split(" = ")}
            assert len(values) == 1, line
            assert (verdict == "yes") == (values == {problem.target}), line
            verdicts.add(verdict)
    assert verdicts == {"yes", "no"}


def test_the_answer_is_the_last_attempt_and_uses_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worked = module("worked", monkeypatch)
    chooser = random.Random(2)
    right = 0
    for problem in problems(300):
        text = worked.worked(problem, chooser)
        thoughts, answer = text.split("</think>")
        last = thoughts.strip().splitlines()[-1]
        assert last.startswith(re.findall("<answer> (.*) </answer>", answer)[0] + " =")
        truth = {"target": problem.target, "numbers": list(problem.numbers)}
        score = compute_score(text, truth)
        assert (score == 1.0) == last.endswith("yes")
        right += score == 1.0
    assert 30 < right < 150  # the form is taught; most answers are wrong


def test_distinct_attempts_come_to_other_results_and_stay_below_the_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worked = module("worked", monkeypatch)
    chooser, style = random.Random(4), worked.Style(largest=40, distinct=True)
    several = 0
    for problem in generate_problems(300, seed=5, ranges=SMALL):
        text = worked.worked(problem, chooser, style)
        thoughts, _, answer = text.partition("</think>")
        assert max(map(int, re.findall(r"\d+", text))) <= 40
        results = re.findall(r"= (\d+), (?:yes|no)", thoughts)
        assert len(set(results)) == len(results) or len(results) > 6  # few results are left
        assert answer
        several += len(results) > 1
    assert several > 60


def test_each_problem_gets_as_many_texts_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    worked = module("worked", monkeypatch)
    written = worked.rows(problems(20), 7, texts=3)
    assert written[:20] == worked.rows(problems(20), 7)
    prompts = [row["prompt"] for row in written]
    assert prompts == prompts[:20] * 3
    assert len({row["response"] for row in written}) > 40


def test_sft_sees_no_problem_of_the_rl_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked = module("worked", monkeypatch)
    narrow = ["--max_numbers", "3", "--max_number", "9", "--max_target", "20"]
    sizes = ["--train_size", "60", "--test_size", "20"]
    prepare_from_arguments("countdown", ["--local_dir", str(tmp_path), *sizes, *narrow])
    out = tmp_path / "worked.parquet"
    arguments = [str(out), "--rl", str(tmp_path), "--rows", "80", *narrow]
    monkeypatch.setattr("sys.argv", ["worked.py", *arguments])
    worked.main()
    taken = {
        problem_key(row["nums"], row["target"])
        for split in ("train", "test")
        for row in pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
    }
    asked = set()
    for row in pq.read_table(out).to_pylist():
        numbers, target = re.findall(r"numbers (\[.*?\]) .*? equals (\d+)", row["prompt"])[0]
        asked.add(problem_key(json.loads(numbers), int(target)))
    assert len(asked) == 80
    assert not asked & taken


def test_the_tokenizer_keeps_every_text_and_spells_numbers_by_digit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hone.models.tiny import character_tokenizer

    worked, base = module("worked", monkeypatch), module("base_model", monkeypatch)
    tokenizer = character_tokenizer(words=base.vocabulary())
    for problem in problems(20):
        prompt = TEMPLATES["base"].format(numbers=list(problem.numbers), target=problem.target)
        text = prompt + worked.worked(problem, random.Random(3))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert len(tokenizer.encode(prompt, add_special_tokens=False)) <= 160
    assert len(tokenizer.encode("97", add_special_tokens=False)) == 2
    assert len(tokenizer.encode("<answer>", add_special_tokens=False)) == 1


def test_the_coarse_tokenizer_keeps_every_text_and_makes_a_number_one_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hone.models.tiny import character_tokenizer

    worked, base = module("worked", monkeypatch), module("base_model", monkeypatch)
    tokenizer = character_tokenizer(words=base.coarse_vocabulary())
    for problem in [*generate_problems(20, seed=5, ranges=SMALL), *problems(20)]:
        prompt = TEMPLATES["base"].format(numbers=list(problem.numbers), target=problem.target)
        text = prompt + worked.worked(problem, random.Random(3))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert len(tokenizer.encode(prompt, add_special_tokens=False)) <= 16
    assert len(tokenizer.encode("(17 + 5) - 2 = ", add_special_tokens=False)) == 8
    assert tokenizer.encode(prompt, add_special_tokens=False)[-1] == tokenizer.encode("<think>")[-1]


@pytest.mark.parametrize("machine", ["h200", "cpu"])
def test_the_kept_results_are_what_the_page_says(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = module("curves", monkeypatch)
    measured = json.loads((FOLDER / "results" / machine / "curves.json").read_text())
    page = (FOLDER.parents[1] / "docs" / "recipes" / "tinyzero.md").read_text(encoding="utf-8")
    assert curves.table(measured) in page
    assert {(run["algorithm"], run["seed"]) for run in measured["runs"]} == {
        (algorithm, seed) for algorithm in ("ppo", "grpo") for seed in (1, 2, 3)
    }
    assert all(run["points_gained"] >= 25 for run in measured["runs"])


def test_curves_are_collected_from_run_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = module("curves", monkeypatch)
    step = {"timing_s/step": 2.0, "perf/total_num_tokens": 10, "response_length/mean": 5.0}
    lines = [
        {"step": 0, curves.ACCURACY: 0.1},
        {"step": 1, "accuracy": 0.2, **step},
        {"step": 2, "accuracy": 0.4, curves.ACCURACY: 0.5, **step},
    ]
    for name in ("ppo-1", "grpo-2"):
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    (tmp_path / "sft").mkdir()
    sft = {"step": 1, "timing_s/step": 1.0, "train/global_tokens": 7.0, "train/loss": 0.5}
    (tmp_path / "sft" / "metrics.jsonl").write_text(json.dumps(sft) + "\n")
    monkeypatch.setattr("sys.argv", ["curves.py", str(tmp_path), str(tmp_path / "out")])
    curves.main()
    found = json.loads((tmp_path / "out.json").read_text())
    assert [run["points_gained"] for run in found["runs"]] == [40.0, 40.0]
    assert [run["tokens"] for run in found["runs"]] == [20, 20]
    assert (tmp_path / "out.png").stat().st_size > 0
