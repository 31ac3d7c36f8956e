"""A scorer is tried on texts that contain the ground truth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hone.plugins import PluginError
from hone.rewards.scorer import ScorerSignatureError
from hone.rewards.trial import TrialRow, ground_truth_scorer

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    "


@pytest.mark.parametrize(
    ("truth", "text"),
    [("42", "42"), (["Paris", "paris"], "paris"), ({"target": 7, "numbers": [1]}, "7"), (None, "")],
)
def test_a_ground_truth_of_any_kind_has_a_plain_text(truth: Any, text: str) -> None:
    row = TrialRow.of({"reward_model": {"ground_truth": truth}}, "", "data_source", "prompt")
    first = row.responses()[0]
    assert first.solution_str == text
    assert first.ground_truth == truth
    assert first.extra_info["transcript"] == text


def test_the_result_is_the_score_or_the_reason_of_the_failure(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + "return {'score': len(ground_truth), 'kind': extra_info['kind']}\n")
    score = ground_truth_scorer(str(file), "data_source", "prompt")
    good = {"reward_model": {"ground_truth": "abc"}, "extra_info": {"kind": 1}}
    assert score(good) == 3.0
    failure = score({"reward_model": {"ground_truth": "abc"}})
    assert str(failure).startswith(f"exception: compute_score of {file} raised KeyError: 'kind' at")


def test_a_scorer_that_is_missing_or_has_a_wrong_signature_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(completions):\n    return 1\n")
    with pytest.raises(PluginError, match=r"has no 'compute_score'; it has score"):
        ground_truth_scorer(str(file), "data_source", "prompt")
    with pytest.raises(ScorerSignatureError, match="cannot be called with data_source"):
        ground_truth_scorer(f"{file}:score", "data_source", "prompt")
