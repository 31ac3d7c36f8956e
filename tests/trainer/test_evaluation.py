"""`hone eval`: scores by source, unbiased pass@k, majorities, intervals."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hone.config import ConfigError, replace
from hone.config.generation import EvaluationMetricsConfig
from hone.data.rows import DataError
from hone.rewards.failures import Scored
from hone.rewards.scorer import ScorerSignatureError
from hone.rewards.scores.table import UnknownSourceError
from hone.tracking.console import screen
from hone.trainer import main_eval
from hone.trainer.evaluation import (
    Estimate,
    Evaluation,
    EvaluationError,
    ScoredRow,
    answer_votes,
    bootstrap_estimates,
    evaluate,
    extract_answer,
    summarize,
)
from hone.verl.dialect import load_config

from .around_fixtures import prompts, write_jsonl

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
    assert result.sources["all"].num_rows == 5
    assert result.sources["all"].metrics["pass@1"].value == pytest.approx((3 * 0.25 + 2) / 5)
    assert [len(row["scores"]) for row in result.rows] == [4] * 5


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer() -> None:
    scores = [1.0, 0.0, 0.0, 1.0, 0.0]
    result = summarize([ScoredRow("s", scores, list("abcde"))], METRICS)["s"]
    for k in (1, 2, 4, 5):
        subsets = list(itertools.combinations(scores, k))
        expected = sum(max(subset) for subset in subsets) / len(subsets)
        assert result.metrics[f"pass@{k}"].value == pytest.approx(expected)


def test_majority_follows_the_most_frequent_answer_not_the_best() -> None:
    attempt = ScoredRow("s", [1.0, 0.0, 0.0], ["right", "wrong", "wrong"])
    metrics = summarize([attempt], METRICS)["s"].metrics
    assert metrics["maj@3"].value == 0.0
    assert metrics["best@3"].value == 1.0


def test_correct_from_decides_what_passes_but_not_the_mean(tmp_path: Path) -> None:
    attempt = ScoredRow("s", [0.1, 0.6], ["a", "b"])
    strict = summarize([attempt], METRICS)["s"].metrics
    lenient = summarize([attempt], EvaluationMetricsConfig(correct_from=0.5))["s"].metrics
    assert (strict["pass@2"].value, lenient["pass@2"].value) == (0.0, 1.0)
    assert strict["mean"].value == lenient["mean"].value == pytest.approx(0.35)


def test_intervals_hold_the_mean_and_narrow_with_rows() -> None:
    values = np.random.default_rng(0).random(400).tolist()
    config = EvaluationMetricsConfig(bootstrap_samples=400)
    wide, narrow = (bootstrap_estimates({"m": values[:n]}, config)["m"] for n in (25, 400))
    (low, high), (nearer_low, nearer_high) = ends(wide), ends(narrow)
    assert low < wide.value < high
    assert nearer_low < narrow.value < nearer_high
    assert high - low > 2 * (nearer_high - nearer_low)
    assert bootstrap_estimates({"m": values}, config) == bootstrap_estimates({"m": values}, config)


@pytest.mark.parametrize(("confidence", "errors"), [(0.95, 1.960), (0.5, 0.6745)])
def test_the_interval_is_as_wide_as_its_confidence_says(confidence: float, errors: float) -> None:
    """The tails are cut on both sides: a 90 % interval, of 1.645 standard errors, is not taken for 95 %."""
    values = np.random.default_rng(0).random(400)
    config = EvaluationMetricsConfig(bootstrap_samples=3000, confidence=confidence)
    estimate = bootstrap_estimates({"m": values.tolist()}, config)["m"]
    (low, high), half = ends(estimate), errors * float(values.std()) / 20
    assert high - estimate.value == pytest.approx(half, rel=0.06)
    assert estimate.value - low == pytest.approx(half, rel=0.06)


def ends(estimate: Estimate) -> tuple[float, float]:
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low, estimate.high


@pytest.mark.parametrize(("rows", "confidence"), [(8, 0.95), (1, 0.95), (30, 0.5)])
def test_rows_all_wrong_or_all_right_get_the_exact_binomial_bound(
    rows: int, confidence: float
) -> None:
    """At the bound, so many rows alike have the probability of one tail."""
    config = EvaluationMetricsConfig(bootstrap_samples=20, confidence=confidence)
    result = bootstrap_estimates({"wrong": [0.0] * rows, "right": [1.0] * rows}, config)
    (low, high), tail = ends(result["wrong"]), (1 - confidence) / 2
    assert low == 0.0
    assert (1 - high) ** rows == pytest.approx(tail)
    assert ends(result["right"]) == pytest.approx((1 - high, 1.0))
    assert (result["wrong"].value, result["right"].value) == (0.0, 1.0)


def test_the_bound_of_eight_rows_is_the_tables() -> None:
    """Clopper-Pearson, 95 %, 0 of 8: 0 to 0.3694."""
    assert ends(bootstrap_estimates({"m": [0.0] * 8}, METRICS)["m"]) == pytest.approx(
        (0, 0.3694), abs=5e-5
    )


def test_rows_all_alike_between_have_no_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = [f"output.{kind}_path={tmp_path / kind}" for kind in ("json", "plot")]
    screen.cache_clear()
    main_eval.run(evaluation(tmp_path, responses(3, 1, 2), *outputs, "metrics.pass_at=[1]"))
    screen.cache_clear()
    written = json.loads((tmp_path / "json").read_text())
    mean = written["sources"]["arithmetic"]["metrics"]["pass@1"]
    assert mean == {"value": 0.5, "low": None, "high": None}
    assert "–: all rows have the same value" in capsys.readouterr().out
    assert (tmp_path / "plot").is_file()


def test_a_source_called_all_keeps_its_line_beside_the_total(tmp_path: Path) -> None:
    attempts = [ScoredRow("all", [1.0], ["x"]), ScoredRow("b", [0.0], ["x"])]
    results = summarize(attempts, METRICS, {"all": {"timeout": 1}})
    assert {name: result.metrics["mean"].value for name, result in results.items()} == {
        "all": 1.0,
        "b": 0.0,
        "all 2 sources": 0.5,
    }
    plain = Evaluation(results, []).as_dict()
    assert {name for name in plain if name != "sources"} == {"test_score/all", "test_score/b"}


def test_the_total_is_no_test_score() -> None:
    results = summarize([ScoredRow("a", [1.0], ["x"]), ScoredRow("b", [0.0], ["x"])], METRICS)
    assert list(results) == ["a", "b", "all"]
    assert "test_score/all" not in Evaluation(results, []).as_dict()


def test_the_rows_are_grouped_in_one_pass_and_votes_drawn_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hone.ops import at_n

    calls: list[str] = []

    class Counted(ScoredRow):
        def __getattribute__(self, name: str) -> Any:
            if name == "source":
                calls.append(name)
            return super().__getattribute__(name)

    samples: list[int] = []

    class Watched(random.Random):
        def sample(self, *args: Any, **kwargs: Any) -> list[Any]:
            samples.append(1)
            return super().sample(*args, **kwargs)

    monkeypatch.setattr("hone.ops.at_n.random.Random", Watched)
    at_n._subsets.cache_clear()
    rows = [
        Counted("s", [float(i % 3 == 0) for i in range(32)], list(range(32))) for _ in range(30)
    ]
    result = summarize(rows, EvaluationMetricsConfig(bootstrap_samples=1))["s"]
    at_n._subsets.cache_clear()
    assert result.metrics["maj@32"].value == pytest.approx(11 / 32)  # 32 answers tie
    assert len(calls) < 100  # 30 rows; one group a row would read it 900 times
    assert len(samples) == 3 * 1000  # of 4, 8 and 16; 2 and 32 have fewer subsets: all are taken


def test_responses_stay_together_when_rows_are_resampled() -> None:
    attempts = [ScoredRow("s", [float(i % 2)] * 8, list("aaaaaaaa")) for i in range(10)]
    low, high = ends(summarize(attempts, METRICS)["s"].metrics["mean"])
    assert high - low > 0.3  # eighty independent responses would give 0.2


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so <answer>1</answer> no <answer> 2 </answer>", "2"),
        (r"thus \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("12 apples\n#### 1,024", "1024"),
        ("it is 3, or -4.5", "-4.5"),
        ("  none ", None),
        ("so <answer> </answer>", None),
    ],
)
def test_the_answer_of_a_response(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


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


def test_a_missing_ground_truth_is_a_failure_that_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = responses(3, 2, 2)
    rows[1]["reward_model"]["ground_truth"] = None
    screen.cache_clear()
    result = main_eval.run(evaluation(tmp_path, rows)).sources["arithmetic"]
    screen.cache_clear()
    output = " ".join(capsys.readouterr().out.split())
    assert result.failures == {"no_ground_truth": 2}
    assert result.metrics["mean"].value == pytest.approx(2 / 3)
    assert "2 responses could not be scored (no_ground_truth); they count as 0" in output
    assert "responses.jsonl, row 1: reward_model.ground_truth is null" in output


def test_a_users_function_may_do_without_a_ground_truth(tmp_path: Path) -> None:
    rows = responses(1, 1, 1)
    rows[0]["reward_model"]["ground_truth"] = None
    file = write_scorer(tmp_path, "return 1.0")
    result = evaluate(evaluation(tmp_path, rows, f"custom_reward_function.path={file}"))
    assert result.sources["arithmetic"].metrics["mean"].value == 1.0
    assert result.first_failures == {}


def write_scorer(folder: Path, body: str) -> Path:
    file = folder / "mine.py"
    file.write_text(
        f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n"
    )
    return file


def test_the_first_message_of_each_reason_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = (
        "i = extra_info['index']; assert i != 1 and i != 2, f'row {i} is odd'; "
        "return 'text' if i == 3 else 1.0"
    )
    file = write_scorer(tmp_path, body)
    screen.cache_clear()
    main_eval.run(evaluation(tmp_path, responses(4, 1, 1), f"custom_reward_function.path={file}"))
    screen.cache_clear()
    output = " ".join(capsys.readouterr().out.split())
    assert "first exception: " in output
    assert "AssertionError: row 1 is odd" in output
    assert "row 2 is odd" not in output
    assert "row 3: text ('text'), not a number" in output


def test_where_nothing_could_be_scored_there_is_no_result(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def compute_score(solution_str):\n    return {}['key']\n")
    config = evaluation(
        tmp_path,
        responses(2, 1, 2),
        f"custom_reward_function.path={file}",
        f"output.json_path={tmp_path / 'scores.json'}",
    )
    with pytest.raises(
        EvaluationError, match=r"none of the 4 responses.*exception: .*compute_score.*mine\.py:2"
    ):
        main_eval.run(config)
    assert not (tmp_path / "scores.json").exists()


def test_a_score_function_that_cannot_be_called_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def compute_score(prompt, completion):\n    return 1\n")
    config = evaluation(tmp_path, responses(2, 1, 2), f"custom_reward_function.path={file}")
    with pytest.raises(ScorerSignatureError, match=r"mine\.py:1: .*compute_score.*TRL"):
        main_eval.run(config)


def test_who_has_no_answer_does_not_vote_and_else_whole_texts_do(tmp_path: Path) -> None:
    empty = Scored(0.0)
    assert answer_votes([empty] * 3, ["#### 2", "no idea", ""]) == ["2", None, None]
    assert answer_votes([empty] * 3, ["yes", " yes ", ""]) == ["yes", "yes", None]
    preds = [Scored(0.0, {"pred": pred}) for pred in ("[INVALID]", None, 7)]
    assert answer_votes(preds, ["#### 1", "#### 2", "#### 3"]) == [None, None, "7"]


def test_a_majority_does_not_hang_on_the_order_of_the_responses(tmp_path: Path) -> None:
    rows = responses(1, 1, 4)
    forward = evaluate(evaluation(tmp_path, rows)).sources["arithmetic"].metrics
    rows[0]["responses"].reverse()
    backward = evaluate(evaluation(tmp_path, rows)).sources["arithmetic"].metrics
    for metrics in (forward, backward):  # the right one last, it won no tie
        assert metrics["maj@2"].value == pytest.approx(metrics["mean"].value)


def test_a_missing_file_names_the_key_it_came_from(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"check data\.path$"):
        evaluate(load_config([f"data.path={tmp_path}/no.parquet"], config_name="evaluation"))


def test_the_file_of_responses_must_be_given() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.path was not given: set it to the file of responses"
    ):
        main_eval.main(["metrics.pass_at=[1]"])


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


@pytest.mark.parametrize(
    ("key", "name", "problem"),
    [
        ("json_path", "responses.jsonl", "would replace a file of data.path"),
        ("scores_path", "scores.jsonl", "must end in .parquet"),
    ],
)
def test_results_replace_no_responses_and_have_the_suffix_of_their_format(
    key: str, name: str, problem: str, tmp_path: Path
) -> None:
    config = evaluation(tmp_path, responses(2, 1, 2))
    file = Path(config.data.path[0] if isinstance(config.data.path, tuple) else config.data.path)
    before = file.read_bytes()
    path = file if problem.startswith("would") else tmp_path / name
    with pytest.raises(ConfigError, match=problem):
        main_eval.run(replace(config, f"output.{key}", str(path)))
    assert file.read_bytes() == before


def test_a_missing_file_of_responses_is_named_if_the_results_exist(tmp_path: Path) -> None:
    config = evaluation(tmp_path, responses(2, 1, 2))
    (tmp_path / "results.json").touch()
    config = replace(config, "data.path", str(tmp_path / "missing.parquet"))
    with pytest.raises(DataError, match=r"missing\.parquet does not exist; check data\.path"):
        main_eval.run(replace(config, "output.json_path", str(tmp_path / "results.json")))


def test_scores_that_could_not_be_written_stop_before_scoring(tmp_path: Path) -> None:
    rows = responses(2, 1, 2)
    rows[1]["reward_model"]["ground_truth"] = "2"
    never = tmp_path / "never.py"
    config = evaluation(
        tmp_path,
        rows,
        f"output.scores_path={tmp_path / 'scores.parquet'}",
        f"custom_reward_function.path={never}",
    )
    with pytest.raises(DataError, match="column 'reward_model'"):
        evaluate(config)


def test_more_attempts_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="use 1 to 2"):
        evaluate(evaluation(tmp_path, responses(1, 1, 2), "metrics.pass_at=[4]"))


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'responses' \(data.response_key\)"):
        evaluate(evaluation(tmp_path, prompts(1)))


def test_an_unknown_source_is_refused_before_scoring(tmp_path: Path) -> None:
    with pytest.raises(UnknownSourceError, match="poetry"):
        evaluate(evaluation(tmp_path, responses(1, 1, 1, "poetry")))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("responses", ["1", None]),
        ("responses", 5),
        ("responses", []),
        ("reward_model", "1"),
        ("extra_info", ["x"]),
    ],
)
def test_a_column_of_another_form_names_the_row(tmp_path: Path, column: str, value: Any) -> None:
    rows = responses(2, 1, 2)
    rows[1][column] = value
    with pytest.raises(DataError, match=rf"responses.jsonl, row 1, column '{column}'"):
        evaluate(evaluation(tmp_path, rows))


def test_a_ground_truth_in_json_text_is_read(tmp_path: Path) -> None:
    rows = responses(2, 1, 2)
    for row in rows:
        row["reward_model"] = json.dumps(row["reward_model"])
    result = evaluate(evaluation(tmp_path, rows))
    assert result.sources["arithmetic"].metrics["pass@1"].value == 0.5
