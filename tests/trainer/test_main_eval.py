"""`hone eval --bench`: generated as `hone generate` would, then scored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hone.config import ConfigError
from hone.data.reading import read_rows
from hone.data.rows import BadRowPolicy, DataError, write_parquet
from hone.tracking.console import screen
from hone.trainer import command_line, main_eval, main_generation
from hone.verl.dialect import load_config

from .around_fixtures import prompts, tiny_model


def test_a_model_is_evaluated_on_a_benchmark_by_name(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    rows = prompts(4, "multiply/three")
    write_parquet(rows, tmp_path / "data" / "multiply" / "test.parquet")
    command = [
        *("--model", str(model), "--bench", "multiply", "--data", str(tmp_path / "data")),
        *("--out", str(tmp_path / "out"), "rollout.response_length=4", "data.n_samples=2"),
        *("rollout.do_sample=true", "metrics.bootstrap_samples=10", "num_processes=1"),
    ]
    main_eval.main(command)
    results = tmp_path / "out" / "multiply.json"
    written = json.loads(results.read_text())
    assert written["sources"]["multiply/three"]["responses"] == 8
    assert (tmp_path / "out" / "multiply.png").is_file()
    results.unlink()
    drawn = (tmp_path / "out" / "multiply.parquet").stat().st_mtime_ns
    main_eval.main(command)  # again: scored anew from the responses that are there
    assert json.loads(results.read_text()) == written
    assert (tmp_path / "out" / "multiply.parquet").stat().st_mtime_ns == drawn
    main_eval.main([*command, "data.n_samples=1"])  # its own file is replaced
    assert json.loads(results.read_text())["sources"]["multiply/three"]["responses"] == 4


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """`hone generate` writes the right answers without a model; the configs it was run with."""
    configs: list[Any] = []

    def fake(config: Any) -> Path:
        configs.append(config)
        rows = list(read_rows(config.data.path, BadRowPolicy("raise")).scan())
        for row in rows:
            row["responses"] = [f"<answer>{row['reward_model']['ground_truth']}</answer>"]
        write_parquet(rows, config.data.output_path)
        return Path(config.data.output_path)

    monkeypatch.setattr(main_generation, "run", fake)
    return configs


def bench(tmp_path: Path, name: str, source: str, *overrides: str) -> None:
    write_parquet(prompts(2, source), tmp_path / "data" / name / "test.parquet")
    main_eval.main(
        [
            *("--model", "m", "--bench", name, "--data", str(tmp_path / "data")),
            *("--out", str(tmp_path / "out"), "metrics.bootstrap_samples=5", "num_processes=1"),
            *overrides,
        ]
    )


@pytest.mark.parametrize(
    ("name", "source", "form"),
    [
        ("multiply", "yolo/multiply-3_digit", "raw"),
        ("countdown", "countdown", "raw"),
        ("gsm8k", "openai/gsm8k", "chat"),
    ],
)
def test_whole_texts_get_no_chat_template(
    generated: list[Any], tmp_path: Path, name: str, source: str, form: str
) -> None:
    bench(tmp_path, name, source, f"custom_reward_function.path={write_scorer(tmp_path)}")
    assert [config.data.prompt_format for config in generated] == [form]


def write_scorer(folder: Path) -> Path:
    file = folder / "scorer.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    return file


def test_a_benchmark_is_generated_by_as_many_processes_as_asked(
    generated: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launched: list[tuple[int, str]] = []

    def launch(count: int, module: str, arguments: Sequence[str]) -> None:
        launched.append((count, module))
        main_generation.run(load_config(arguments, config_name="generation"))

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(command_line, "launch", launch)
    screen.cache_clear()
    bench(tmp_path, "multiply", "multiply/three", "trainer.n_gpus_per_node=2", "rollout.mode=sync")
    screen.cache_clear()
    assert launched == [(2, "hone.trainer.main_generation")]
    assert (tmp_path / "out" / "multiply.json").is_file()
    assert "rollout.mode=sync" in capsys.readouterr().out  # what has no effect is said


def test_a_benchmark_under_torchrun_is_refused(
    generated: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="without torchrun"):
        bench(tmp_path, "multiply", "multiply/three")
    assert generated == []


@pytest.mark.parametrize("options", [["--out", "results"], ["--data", "data"]])
def test_an_option_of_benchmarks_without_one_is_not_ignored(options: list[str]) -> None:
    with pytest.raises(ConfigError, match="--model is missing: hone eval --model DIR"):
        main_eval.main([*options, "data.path=responses.parquet"])


def test_a_benchmark_may_be_generated_with_a_search_engine(
    generated: list[Any], tmp_path: Path
) -> None:
    scorer = f"custom_reward_function.path={write_scorer(tmp_path)}"
    bench(tmp_path, "nq", "nq", "search.url=http://127.0.0.1:1/retrieve", "search.topk=2", scorer)
    assert (generated[0].search.url, generated[0].search.topk) == ("http://127.0.0.1:1/retrieve", 2)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["metrics.bootstrap_sample=5"], "bootstrap_samples"),
        (["--bench", "nothing"], "there is no benchmark"),
    ],
)
def test_a_mistake_in_the_scoring_is_found_before_the_generation(
    generated: list[Any], tmp_path: Path, overrides: list[str], problem: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=problem):
        bench(tmp_path, "multiply", "multiply/three", *overrides)
    assert generated == []


def test_a_folder_may_have_any_name(generated: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "it's {a}, b=[c]"
    bench(folder, "multiply", "multiply/three")
    assert (folder / "out" / "multiply.json").is_file()
