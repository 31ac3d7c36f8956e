"""What rows ask for is checked before a model loads: scorers, ground truths, prompt lengths."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.ppo.dry_runs import (  # noqa: F401
    MULTI_TURN,
    TOOL_LOOP,
    dry_run,
    no_models,
    problems_of,
    write_rows,
)
from tests.trainer.runs import Task, task_row


def test_prompts_are_measured_once_per_data_set(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.data.dataset import RLHFDataset

    lengths: list[int] = []
    plain = RLHFDataset.prompt_lengths

    def counted(self: RLHFDataset) -> Any:
        lengths.append(len(self))
        return plain(self)

    monkeypatch.setattr(RLHFDataset, "prompt_lengths", counted)
    data = write_rows(tmp_path / "rows.jsonl", ability=str(tmp_path))
    for _ in range(2):
        dry_run(task, tmp_path / "run", data)
    assert lengths == [6]
    dry_run(task, tmp_path / "run", data, "data.max_prompt_length=15")
    assert lengths == [6, 6]
    for name in ("rows.jsonl", "copy.jsonl"):  # the message names the file of this run
        data = write_rows(tmp_path / name, ability=str(tmp_path))
        (problem,) = problems_of(task, tmp_path / "run", data, "data.max_prompt_length=3")
        assert f"{name}, row 0" in problem
    assert len(lengths) == 3


def test_a_file_is_scanned_once_for_all_checks_and_once_to_count_tokens(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.data.prompts import FileRows

    scans: list[str] = []
    scan = FileRows.scan

    def counted(self: FileRows, *columns: Any) -> Any:
        scans.append(Path(self.path).name)
        return scan(self, *columns)

    monkeypatch.setattr(FileRows, "scan", counted)
    data = write_rows(tmp_path / "rows.jsonl", ability=str(tmp_path), agent_name="tool_agent")
    dry_run(task, tmp_path / "run", data)
    assert scans == ["rows.jsonl"] * 2
    dry_run(task, tmp_path / "run", data)  # the lengths are cached
    assert scans == ["rows.jsonl"] * 3


def test_measuring_ends_when_enough_prompts_are_too_long(task: Task, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(task_row(i % 6, i)) + "\n" for i in range(600)))
    overrides = (f"data.train_files={rows}", "data.max_prompt_length=2")
    (problem,) = problems_of(task, tmp_path / "run", *overrides)
    assert "256 of the first 256 prompts have more than data.max_prompt_length=2" in problem
    dry_run(task, tmp_path / "run", *overrides, "data.truncation=left")


def test_an_agent_name_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from hone.agents.loop_names import LoopNames
    from hone.checks.row_checks import check_rows
    from hone.data.create import create_run_dataset
    from hone.models.tiny import character_tokenizer
    from hone.verl.dialect import load_config

    names: list[object] = []
    plain = LoopNames.name_of_row

    def counted(self: LoopNames, name: object) -> str:
        names.append(name)
        return plain(self, name)

    monkeypatch.setattr(LoopNames, "name_of_row", counted)
    config = load_config(["data.train_files=[]", "data.prompt_format=raw"])
    rows: Any = [{"prompt": "a", "agent_name": "tool_agent"} for _ in range(9)]
    dataset = create_run_dataset(rows, config.data, character_tokenizer("a"), is_train=True)
    check_rows(lambda batch: None, dataset, config)
    assert names == ["tool_agent"]


def scorer(folder: Path, body: str) -> str:
    file = folder / "scorer.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        + "".join(f"    {line}\n" for line in body.splitlines())
    )
    return f"custom_reward_function.path={file}"


@pytest.mark.parametrize("manager", ["naive", "prime", "batch"])
def test_the_scorer_is_called_where_it_will_run(task: Task, tmp_path: Path, manager: str) -> None:
    calls = tmp_path / "calls"
    body = (
        f"import os\nwith open({str(calls)!r}, 'a') as file:\n"
        "    file.write(f'{os.getpid()} {solution_str} {ground_truth}\\n')\nreturn 0"
    )
    if manager == "batch":
        (tmp_path / "scorer.py").write_text(
            "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
            f"    open({str(calls)!r}, 'a').write(f'0 {{solution_strs[0]}} {{ground_truths[0]}}\\n')\n"
            "    return [0] * len(solution_strs)\n"
        )
        settings = f"custom_reward_function.path={tmp_path}/scorer.py"
    else:
        settings = scorer(tmp_path, body)
    overrides = f"reward_model.reward_manager={manager}"
    dry_run(
        task, tmp_path / "run", settings, overrides, "reward_model.reward_kwargs.num_processes=1"
    )
    (line,) = calls.read_text().splitlines()
    process, response, truth = line.split()
    assert response == truth == "0"
    assert (process != str(os.getpid())) is (manager != "naive")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", "scorer.py raised ZeroDivisionError: division by zero at"),
        ("return undefined", "scorer.py raised NameError: name 'undefined' is not defined at"),
        ("return 'good'", "scorer.py:1: text ('good'), not a number"),
        ("return float('nan')", "scorer.py:1: the score is NaN"),
        ("return {'accuracy': 1}", "scorer.py:1: a dict without 'score': keys"),
    ],
)
def test_a_scorer_that_can_never_work_is_refused_with_its_line(
    task: Task, tmp_path: Path, body: str, message: str
) -> None:
    (problem,) = problems_of(task, tmp_path / "run", scorer(tmp_path, body))
    assert "train.jsonl, row 0 (data_source 'lexical') cannot be scored, whatever the" in problem
    assert message in problem


@pytest.mark.parametrize(
    "body",
    [
        "return float(solution_str.split('<answer>')[1].split('<')[0] == ground_truth)",
        "return float(solution_str.split('####')[1].strip() == ground_truth)",
        "import json\nreturn float(json.loads(solution_str)['answer'] == ground_truth)",
        "return 0.0",
        "return 1 / len(solution_str)",
    ],
)
def test_a_scorer_that_works_on_some_text_is_taken_in_silence(
    task: Task, tmp_path: Path, body: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dry_run(task, tmp_path / "run", scorer(tmp_path, body))
    assert "score function" not in capsys.readouterr().out


def test_a_scorer_that_parses_a_form_of_its_own_is_warned_of(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry_run(task, tmp_path / "run", scorer(tmp_path, "return len(solution_str.split('@@')[1])"))
    output = capsys.readouterr().out
    assert "the score function failed on" in output
    assert "IndexError: list index out of range" in output
    assert f"{tmp_path}/scorer.py:2; such a response scores 0" in output


def test_rows_without_a_ground_truth_are_refused_or_counted(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = "custom_reward_function.path=null"
    bare = {"style": "rule", "ground_truth": None}
    data = write_rows(tmp_path / "bare.jsonl", data_source="openai/gsm8k", reward_model=bare)
    (problem,) = problems_of(task, tmp_path / "run", data, plain)
    assert "bare.jsonl, row 0 (data_source 'openai/gsm8k') cannot be scored" in problem
    assert "reward_model.ground_truth is None" in problem
    rows = [task_row(i, i, data_source="openai/gsm8k") for i in range(6)]
    rows[4]["reward_model"]["ground_truth"] = ""
    some = tmp_path / "some.jsonl"
    some.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = (f"data.train_files={some}", plain)
    dry_run(task, tmp_path / "run", *overrides)
    assert "1 of 6 rows have no reward_model.ground_truth" in capsys.readouterr().out
    raising = "reward_model.reward_kwargs.on_failure=raise"
    (problem,) = problems_of(task, tmp_path / "run", *overrides, raising)
    assert "some.jsonl, row 4" in problem
