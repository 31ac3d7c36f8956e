"""The count of verl's commands: what is recorded of a script, and what is said of a command."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.conformance import Command, commands_of, count, kind, verdict

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")

SCRIPTS = {
    "train.sh": """
        set -eu
        PROJECT="$(pwd)"
        batch=$((2 * 4))
        pip install nothing
        arguments=(data.train_batch_size=${batch} "data.train_files=['$HOME/a b.parquet']")
        PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo "${arguments[@]}" \\
            custom_reward_function.path=$PROJECT/score.py $@ | tee log
    """,
    "deep/submit.sh": """
        for lr in 1e-5 2e-5; do
            ray job submit --working-dir . -- python3 -m recipe.dapo.main_dapo actor.lr=$lr
        done
        torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer optim.lr=1e-5
        python3 -c 'print(1)'
    """,
}


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    for name, text in SCRIPTS.items():
        file = tmp_path / "repository" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


@needs_bwrap
def test_scripts_run_with_stubs_and_their_commands_are_recorded(scripts: Path) -> None:
    deep, deeper, sft, train = commands_of(scripts)
    assert [c.program for c in (deep, deeper)] == ["recipe.dapo.main_dapo"] * 2
    assert [c.arguments for c in (deep, deeper)] == [["actor.lr=1e-5"], ["actor.lr=2e-5"]]
    assert (sft.program, sft.arguments) == ("verl.trainer.sft_trainer", ["optim.lr=1e-5"])
    assert train.script == "repository/train.sh"
    assert train.arguments[0] == "data.train_batch_size=8"
    assert train.arguments[1].endswith("/a b.parquet']")
    assert train.arguments[2] == f"custom_reward_function.path={scripts / 'repository'}/score.py"
    assert not (scripts / "repository" / "log").exists()


def command(folder: Path, *arguments: str, program: str = "verl.trainer.main_ppo") -> Command:
    return Command("script.sh", folder, program, list(arguments))


def test_every_reason_of_a_command_is_told_although_composition_stops_at_the_first(
    tmp_path: Path,
) -> None:
    given = ("data.train_batch_size=many", "data.tokens=3", "actor_rollout_ref.rollout.n=4")
    refused = verdict(command(tmp_path, *given))
    assert any("data.train_batch_size" in reason for reason in refused.reasons)
    assert refused.unknown == ["data.tokens"]
    assert not verdict(command(tmp_path, "actor_rollout_ref.rollout.n=4")).reasons


def test_a_program_without_a_name_here_is_a_reason(tmp_path: Path) -> None:
    assert verdict(command(tmp_path, program="recipe.none.main_ppo")).reasons == [
        "no program recipe.none.main_ppo"
    ]


def test_reasons_are_counted_without_the_values_of_one_command(tmp_path: Path) -> None:
    commands = [command(tmp_path, f"data.train_batch_size={word}") for word in ("x", "y", "8")]
    counts = count(commands, [verdict(c) for c in commands])
    assert (counts["commands"], counts["composed"]) == (3, 1)
    assert list(counts["reasons"].values()) == [2]
    assert kind("a.b=3 is out of range; use 8 or more (command line)") == kind(
        "a.b=7 is out of range; use 16 or more (mine.yaml)"
    )
