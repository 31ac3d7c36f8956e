"""`-m`: every combination runs once, in its own folder; a table and the exit code tell what came of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hone import cli
from hone.config import ConfigError
from hone.trainer import sweep as sweeps
from hone.trainer.ranks import run_python
from hone.trainer.sweep import run_or_sweep, sweep

PPO = ("ppo_trainer", ["-m", "hone.trainer.main_ppo"])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would be started; a run with seed 2 fails, one with seed 9 is stopped by a signal."""
    started: list[list[str]] = []

    def instead(command: Sequence[str]) -> tuple[int, bool]:
        started.append(list(command))
        folders = [w.partition("=")[2].strip("'") for w in command if "default_local_dir" in w]
        for folder in folders[-1:]:
            Path(folder).mkdir(parents=True)
            line = {"step": 4, "val-core/x/acc/mean@1": 0.5, "critic/score/mean": 0.25}
            (Path(folder) / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        return (3 if "trainer.seed=2" in command else 0), "trainer.seed=9" in command

    monkeypatch.setattr(sweeps, "run_python", instead)
    return started


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_without_the_flag_the_program_runs_once_with_its_arguments() -> None:
    calls: list[Sequence[str]] = []
    assert run_or_sweep(calls.append, ["a=1"], *PPO) is None
    assert calls == [["a=1"]]


def test_every_combination_runs_once_in_a_folder_of_its_own(runs: list[list[str]]) -> None:
    arguments = ["-m", "trainer.seed=1,3", "+data.seed=5,6", "trainer.default_local_dir=out"]
    assert run_or_sweep(lambda _: 1, arguments, *PPO) == 0
    assert [run[:3] for run in runs] == [["-m", "hone.trainer.main_ppo", arguments[-1]]] * 4
    assert [run[3:] for run in runs] == [
        [
            f"trainer.seed={a}",
            f"+data.seed={b}",
            f"trainer.default_local_dir='out/trainer.seed={a},data.seed={b}'",
        ]
        for a in (1, 3)
        for b in (5, 6)
    ]


def test_a_run_that_fails_stops_no_other_and_its_code_is_the_sweeps(
    runs: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(["trainer.seed=1,2,3"], *PPO) == 3
    assert len(runs) == 3
    table = capsys.readouterr().out
    for part in ("3 runs", "trainer.seed=2", "val-core", "0.5"):
        assert part in table


def test_a_signal_ends_the_sweep(runs: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(["trainer.seed=9,1"], *PPO) == 130
    assert len(runs) == 1
    assert "started" in capsys.readouterr().out


def test_names_that_already_give_each_run_its_folder_are_left_alone(runs: list[list[str]]) -> None:
    sweep(["trainer.experiment_name=a,b"], *PPO)
    assert [run[-1].rpartition("/")[2] for run in runs] == ["a'", "b'"]


def test_a_mistake_in_any_combination_is_told_before_the_first_run(runs: list[list[str]]) -> None:
    with pytest.raises(ConfigError, match=r"seed=x is a string.*\(run trainer.seed=x\)"):
        sweep(["trainer.seed=1,x"], *PPO)
    assert runs == []


def test_files_of_generation_keep_their_suffix(runs: list[list[str]]) -> None:
    arguments = ["rollout.temperature=0.5,1", "data.output_path=o.parquet"]
    sweep(arguments, "generation", ["-m", "hone.trainer.main_generation"])
    assert runs[0][-1] == "data.output_path='o-temperature=0.5.parquet'"


def paths_of(arguments: Sequence[str], schema: str = "ppo_trainer") -> list[dict[str, str]]:
    return [run.output_paths for run in sweeps.combinations(arguments, schema)[1]]


def test_no_run_resumes_or_overwrites_another_in_any_folder_that_it_writes_to() -> None:
    keys = ("default_local_dir", "default_hdfs_dir", "rollout_data_dir", "validation_data_dir")
    folders = [f"trainer.{key}=s3://bucket/{key}" for key in keys]
    first, second = paths_of([*folders, "algorithm.gamma=0.9,1.0"])
    assert first == {f"trainer.{key}": f"s3://bucket/{key}/gamma=0.9" for key in keys}
    assert not set(first.values()) & set(second.values())


def test_a_file_that_all_runs_share_is_divided_even_if_another_differs() -> None:
    files = ["output.json_path=a.json,b.json", "output.plot_path=p.png"]
    assert [paths["output.plot_path"] for paths in paths_of(files, "evaluation")] == [
        "p-json_path=a.json.png",
        "p-json_path=b.json.png",
    ]


@pytest.mark.parametrize("values", ["org/model,org_model", f"{'a' * 150}1,{'a' * 150}2"])
def test_values_that_look_alike_in_a_file_name_have_folders_of_their_own(values: str) -> None:
    first, second = (
        Path(paths["trainer.default_local_dir"]).name
        for paths in paths_of([f"actor_rollout_ref.model.path={values}"])
    )
    assert first != second
    assert len(first) < 200


def test_flags_of_the_program_reach_every_run(runs: list[list[str]]) -> None:
    sweep(["--dry-run", "trainer.seed=1,3"], *PPO)
    assert [run[2:4] for run in runs] == [["--dry-run", f"trainer.seed={seed}"] for seed in (1, 3)]
    search = ["--search", "http://x/retrieve?index=1"]
    sweep([*search, "data.n_samples=1,2"], "generation", ["-m", "hone.cli", "generate"])
    assert runs[2][3:5] == search


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("optim.lr=interval(0,1)", "does not list its values"),
        ("optim.lr=glob(*)", "does not list its values"),
        ("optim.lr=1,2,1", "lists a value twice"),
        ("--out=x", "-m does not work with --out"),
    ],
)
def test_what_cannot_be_swept_is_a_sentence(
    argument: str, problem: str, runs: list[list[str]]
) -> None:
    with pytest.raises(ConfigError, match=problem):
        sweep([argument], "rm_trainer", ["-m", "hone.cli", "eval-rm"])
    assert runs == []


def test_the_verb_sweeps_too(runs: list[list[str]]) -> None:
    assert cli.main(["sft", "--multirun", "optim.lr=1e-5,1e-4"]) == 0
    assert [run[:4] for run in runs] == [
        ["-m", "hone.cli", "sft", f"optim.lr={rate}"] for rate in ("1e-05", "0.0001")
    ]


def test_a_program_of_its_own_ends_with_its_code() -> None:
    assert run_python(["-c", "raise SystemExit(7)"]) == (7, False)
    assert run_python(["-c", "import os; os.kill(os.getpid(), 9)"]) == (137, False)
