from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hone.rewards.ground_truth import GroundTruthError
from hone.rewards.scores import qa_em

TRUTH = {"target": ["Beijing", "Peking"]}


def test_normalisation_is_squads() -> None:
    assert qa_em.normalize_answer('The Beatles\' "Hey-Jude"!  (U.S.A.)') == "beatles heyjude usa"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<answer> Beijing </answer>", 1.0),
        ("<answer>the PEKING!</answer>", 1.0),
        ("<answer>Rome</answer><answer>Beijing</answer>", 1.0),
        ("<answer>Beijing</answer><answer>Rome</answer>", 0.0),
        ("<answer>Beijing, China</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("Beijing", 0.0),
        ("<information><answer>Beijing</answer></information>", 0.0),
        ("<information>x</information><answer>Beijing</answer>", 1.0),
    ],
)
def test_the_last_answer_of_the_response_is_matched(text: str, score: float) -> None:
    assert qa_em.compute_score(text, TRUTH) == score


def test_tag_spam_scores_a_quarter() -> None:
    assert qa_em.compute_score("<answer>Beijing</answer>" * 10, TRUTH) == 1.0
    assert qa_em.compute_score("<answer>Beijing</answer>" * 11, TRUTH) == 0.25


def test_a_wrong_answer_scores_format_score_and_no_answer_scores_zero() -> None:
    assert qa_em.compute_score("<answer>Rome</answer>", TRUTH, format_score=0.1) == 0.1
    assert qa_em.compute_score("Rome", TRUTH, format_score=0.1) == 0.0


@pytest.mark.parametrize(
    ("prediction", "golden", "match"),
    [("a", "an", False), ("a", "A", True), ("", "the", False), ("!", "?", False)],
)
def test_answers_of_only_articles_match_only_themselves(
    prediction: str, golden: str, match: bool
) -> None:
    assert qa_em.em_check(prediction, golden) is match


def test_a_reference_inside_the_answer_is_enough_for_subem() -> None:
    assert qa_em.compute_score_subem("<answer>Beijing, China</answer>", TRUTH) == 1.0
    assert qa_em.compute_score_subem("<answer>Rome</answer>", TRUTH) == 0.0
    assert qa_em.subem_check("anything", ["the"]) is False


@pytest.mark.parametrize(
    "truth",
    [
        {"target": np.array(["Beijing", "Peking"], dtype=object)},
        {"target": "Beijing"},
        json.dumps(TRUTH),
        ["Beijing"],
        "Beijing",
    ],
)
def test_references_come_in_several_forms(truth: Any) -> None:
    assert qa_em.compute_score("<answer>Beijing</answer>", truth) == 1.0


def test_a_truth_without_a_target_is_an_error() -> None:
    with pytest.raises(GroundTruthError, match="target"):
        qa_em.compute_score("<answer>x</answer>", {"answers": ["x"]})


def test_compat_ignores_a_single_answer_like_search_r1() -> None:
    assert qa_em.extract_solution("<answer>x</answer>", compat=True) is None
    assert qa_em.extract_solution("<answer>x</answer><answer>y</answer>", compat=True) == "y"


def test_every_reference_answer_of_a_real_set_matches_itself(
    shared_rows: Callable[[str], list[dict[str, Any]]],
) -> None:
    for row in shared_rows("nq_open/dev.jsonl"):
        for answer in row["answer"]:
            text = f"<think>…</think><answer>{answer}</answer>"
            assert qa_em.score_details(text, {"target": row["answer"]}) == {
                "score": 1.0,
                "acc": 1.0,
            }


def test_a_null_among_the_reference_answers_is_no_answer() -> None:
    target = {"target": [None, "Paris"]}
    assert qa_em.compute_score("<answer>None</answer>", target) == 0.0
    assert qa_em.compute_score("<answer>Paris</answer>", target) == 1.0
