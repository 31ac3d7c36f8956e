"""Benchmarks by name: a prepared file only where it is the benchmark's own, else upstream's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.data.reading import read_rows
from hone.data.rows import BadRowPolicy, DataError, write_parquet
from hone.rewards.scores.table import find_entry
from hone.trainer.benchmarks import BENCHMARKS, MATH_BENCHMARKS, benchmark_file, split_overrides

from .around_fixtures import prompts, write_jsonl


def test_a_benchmark_is_built_from_upstreams_files(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "math_eval"
    folder.mkdir(parents=True)
    write_jsonl(folder / "amc23.jsonl", [{"problem": "1+1?", "answer": "2.0"}])
    file = benchmark_file("amc23", tmp_path / "data", tmp_path / "work")
    assert file == tmp_path / "work" / "amc23" / "test.parquet"
    assert file.is_file()


def test_another_data_set_is_not_taken_for_a_benchmark(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_parquet(prompts(2, "openai/gsm8k"), data / "test.parquet")
    with pytest.raises(DataError, match=r"holds rows of openai/gsm8k, not of math500"):
        benchmark_file("math500", data, tmp_path / "work")
    assert benchmark_file("gsm8k", data, tmp_path / "work") == data / "test.parquet"
    # Where the benchmark's own file lies there too, it is taken.
    write_jsonl(data / "math500.jsonl", [{"problem": "1+1?", "answer": "2"}])
    file = benchmark_file("math500", data, tmp_path / "work")
    assert file == tmp_path / "work" / "math500" / "test.parquet"


def test_a_folder_called_after_a_benchmark_must_hold_it_alone(tmp_path: Path) -> None:
    mixed = [*prompts(1, "searchR1_nq"), *prompts(1, "searchR1_triviaqa")]
    write_parquet(mixed, tmp_path / "nq" / "test.parquet")
    with pytest.raises(DataError, match="holds rows of searchR1_triviaqa, not of nq alone"):
        benchmark_file("nq", tmp_path, tmp_path / "work")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("HuggingFaceH4/MATH-500", "math500"),
        ("aime_2024", "aime24"),
        ("yolo/multiply-3_digit", "multiply"),
        ("searchR1_2wikimultihopqa", "2wiki"),
    ],
)
def test_the_usual_names_of_a_source_are_known(tmp_path: Path, source: str, name: str) -> None:
    write_parquet(prompts(1, source), tmp_path / "test.parquet")
    assert benchmark_file(name, tmp_path, tmp_path / "work") == tmp_path / "test.parquet"


def test_upstreams_own_test_file_is_not_taken_for_a_prepared_one(tmp_path: Path) -> None:
    raw = {"question": "1+1?", "answer": "It is two.\n#### 2"}
    write_parquet([raw], tmp_path / "gsm8k" / "test.parquet")
    file = benchmark_file("gsm8k", tmp_path, tmp_path / "work")
    assert file == tmp_path / "work" / "gsm8k" / "test.parquet"
    (row,) = read_rows(file, BadRowPolicy("raise")).scan()
    assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("openai/gsm8k", "2")


def test_an_unknown_benchmark_says_which_are_known(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Did you mean 'gsm8k'"):
        benchmark_file("gsm8", tmp_path, tmp_path)


def test_every_benchmark_can_be_built_and_the_maths_ones_scored() -> None:
    from hone.data.prepare import DATASETS

    assert set(BENCHMARKS) <= set(DATASETS)
    assert all(
        find_entry(name) is not None for name in (*MATH_BENCHMARKS, "gsm8k", "humaneval", "mbpp")
    )


def test_overrides_go_to_the_half_they_belong_to() -> None:
    overrides = ["rollout.top_k=-1", "metrics.pass_at=[1]", "+data.n_samples=4", "timeout_s=3"]
    assert split_overrides(overrides) == (
        ["rollout.top_k=-1", "+data.n_samples=4"],
        ["metrics.pass_at=[1]", "timeout_s=3"],
    )
