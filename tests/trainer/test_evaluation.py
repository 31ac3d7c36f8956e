"""`hone eval`: scores by source, unbiased pass@k, majorities, intervals, and benchmarks by name."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hone.config import load_config
from hone.config.evaluation import EvaluationMetricsConfig
from hone.data.rows import DataError, write_parquet
from hone.rewards.scores.table import UnknownSourceError, find
from hone.trainer import main_eval
from hone.trainer.benchmarks import (
    MATHS,
    NAMES,
    benchmark_file,
    split_overrides,
)
from hone.trainer.evaluation import (
    Attempts,
    EvaluationError,
    answer_of,
    evaluate,
    intervals,
    summarise,
)

from .around_fixtures import prompts, tiny_model, write_jsonl

METRICS = EvaluationMetricsConfig(bootstrap_samples=50)


def responses(count: int, right: int, of: int, source: str = "arithmetic") -> list[dict[str, Any]]:
    """Rows of which the first `right` of `of` responses are right."""
    rows = prompts(count, source)
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        row["responses"] = [
            f"<answer>{truth if i < right else truth + 1 + i}</answer>" for i in range(of)
        ]
    return rows


def evaluation(tmp_path: Path, rows: list[dict[str, Any]], *overrides: str) -> Any:
    file = write_jsonl(tmp_path / "responses.jsonl", rows)
    small = ["num_processes=1", "metrics.bootstrap_samples=50"]
    return load_config([f"data.path={file}", *small, *overrides], config_name="evaluation")


def test_rows_are_scored_by_their_source_without_a_function_of_the_users(tmp_path: Path) -> None:
    rows = [*responses(3, 1, 4), *responses(2, 4, 4, "multiply/three")]
    result = evaluate(evaluation(tmp_path, rows))
    assert result.sources["arithmetic"].metrics["pass@1"].value == pytest.approx(0.25)
    assert result.sources["arithmetic"].metrics["pass@4"].value == 1.0
    assert result.sources["multiply/three"].metrics["pass@1"].value == 1.0
    assert result.sources["all"].rows == 5
    assert result.sources["all"].metrics["pass@1"].value == pytest.approx((3 * 0.25 + 2) / 5)
    assert [len(row["scores"]) for row in result.rows] == [4] * 5


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer() -> None:
    scores = [1.0, 0.0, 0.0, 1.0, 0.0]
    result = summarise([Attempts("s", scores, list("abcde"))], METRICS)["s"]
    for k in (1, 2, 4, 5):
        subsets = list(itertools.combinations(scores, k))
        expected = sum(max(subset) for subset in subsets) / len(subsets)
        assert result.metrics[f"pass@{k}"].value == pytest.approx(expected)


def test_majority_follows_the_most_frequent_answer_not_the_best() -> None:
    attempt = Attempts("s", [1.0, 0.0, 0.0], ["right", "wrong", "wrong"])
    metrics = summarise([attempt], METRICS)["s"].metrics
    assert metrics["maj@3"].value == 0.0
    assert metrics["best@3"].value == 1.0


def test_correct_from_decides_what_passes_but_not_the_mean(tmp_path: Path) -> None:
    attempt = Attempts("s", [0.1, 0.6], ["a", "b"])
    strict = summarise([attempt], METRICS)["s"].metrics
    lenient = summarise([attempt], EvaluationMetricsConfig(correct_from=0.5))["s"].metrics
    assert (strict["pass@2"].value, lenient["pass@2"].value) == (0.0, 1.0)
    assert strict["mean"].value == lenient["mean"].value == pytest.approx(0.35)


def test_intervals_hold_the_mean_and_narrow_with_rows() -> None:
    values = np.random.default_rng(0).random(400).tolist()
    config = EvaluationMetricsConfig(bootstrap_samples=400)
    wide, narrow = (intervals({"m": values[:n]}, config)["m"] for n in (25, 400))
    for estimate in (wide, narrow):
        assert estimate.low < estimate.value < estimate.high
    # About ±1.96 standard errors of a uniform variable.
    assert narrow.high - narrow.low == pytest.approx(2 * 1.96 * 0.2887 / 20, rel=0.25)
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)
    assert intervals({"m": values}, config) == intervals({"m": values}, config)


def test_responses_stay_together_when_rows_are_resampled() -> None:
    attempts = [Attempts("s", [float(i % 2)] * 8, list("aaaaaaaa")) for i in range(10)]
    estimate = summarise(attempts, METRICS)["s"].metrics["mean"]
    assert estimate.high - estimate.low > 0.3  # eighty independent responses would give 0.2


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so <answer>1</answer> no <answer> 2 </answer>", "2"),
        (r"thus \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("12 apples\n#### 1,024", "1024"),
        ("it is 3, or -4.5", "-4.5"),
        ("  none ", "none"),
    ],
)
def test_the_answer_of_a_response(text: str, answer: str) -> None:
    assert answer_of(text) == answer


def test_a_users_function_scores_and_its_failures_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if extra_info['index'] == 1:\n"
        "        raise RuntimeError('no')\n"
        "    return {'score': 0.5, 'pred': 'x'}\n"
    )
    config = evaluation(tmp_path, responses(2, 0, 2), f"custom_reward_function.path={file}")
    result = evaluate(config).sources["arithmetic"]
    assert result.metrics["mean"].value == pytest.approx(0.25)
    assert result.failures == {"exception": 2}


def test_the_results_are_written_as_asked(tmp_path: Path) -> None:
    outputs = {key: tmp_path / key for key in ("json_path", "plot_path", "scores_path")}
    overrides = [f"output.{key}={path}" for key, path in outputs.items()]
    main_eval.run(evaluation(tmp_path, responses(2, 1, 2), *overrides))
    written = json.loads(outputs["json_path"].read_text())
    assert written["test_score/arithmetic"] == pytest.approx(0.5, abs=0.06)
    assert set(written["sources"]["arithmetic"]["metrics"]) == {
        *("mean", "pass@1", "pass@2", "best@2", "maj@2"),
    }
    assert outputs["plot_path"].read_bytes()[:4] == b"\x89PNG"
    assert outputs["scores_path"].is_file()


def test_more_attempts_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="use 1 to 2"):
        evaluate(evaluation(tmp_path, responses(1, 1, 2), "metrics.pass_at=[4]"))


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'responses' \(data.response_key\)"):
        evaluate(evaluation(tmp_path, prompts(1)))


def test_an_unknown_source_is_refused_before_scoring(tmp_path: Path) -> None:
    with pytest.raises(UnknownSourceError, match="poetry"):
        evaluate(evaluation(tmp_path, responses(1, 1, 1, "poetry")))


def test_a_model_is_evaluated_on_a_benchmark_by_name(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    write_parquet(prompts(4), tmp_path / "data" / "multiply" / "test.parquet")
    main_eval.main(
        [
            *("--model", str(model), "--bench", "multiply", "--data", str(tmp_path / "data")),
            *("--out", str(tmp_path / "out"), "rollout.response_length=4", "data.n_samples=2"),
            *("rollout.do_sample=true", "metrics.bootstrap_samples=10", "num_processes=1"),
        ]
    )
    written = json.loads((tmp_path / "out" / "multiply.json").read_text())
    assert written["sources"]["arithmetic"]["responses"] == 8
    assert (tmp_path / "out" / "multiply.png").is_file()


def test_a_benchmark_is_built_from_upstreams_files(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "math_eval"
    folder.mkdir(parents=True)
    write_jsonl(folder / "amc23.jsonl", [{"problem": "1+1?", "answer": "2.0"}])
    file = benchmark_file("amc23", tmp_path / "data", tmp_path / "work")
    assert file == tmp_path / "work" / "amc23" / "test.parquet"
    assert file.is_file()


def test_an_unknown_benchmark_says_which_are_known(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Did you mean 'gsm8k'"):
        benchmark_file("gsm8", tmp_path, tmp_path)


def test_every_benchmark_can_be_built_and_the_maths_ones_scored() -> None:
    from hone.data.prepare import RECIPES

    assert set(NAMES) <= set(RECIPES)
    assert all(find(name) is not None for name in (*MATHS, "gsm8k", "humaneval", "mbpp"))


def test_overrides_go_to_the_half_they_belong_to() -> None:
    given = ["rollout.top_k=-1", "metrics.pass_at=[1]", "+data.n_samples=4", "timeout_s=3"]
    assert split_overrides(given) == (
        ["rollout.top_k=-1", "+data.n_samples=4"],
        ["metrics.pass_at=[1]", "timeout_s=3"],
    )
