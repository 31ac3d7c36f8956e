from __future__ import annotations

import re
from typing import Any

import pytest

from hone.rewards.scorer import policy_text
from hone.rewards.scores import qa_em, qa_em_format

TRUTH = {"target": ["Paris"]}
FORMAT_SCORES: dict[str, Any] = {
    "structure_format_score": 0.2,
    "final_format_score": 0.1,
    "retrieval_score": 0.1,
}
SEARCH = "<search>q</search>\n<information>{}</information>\n"


def info_with_search_results(text: str) -> dict[str, Any]:
    """Returns the `extra_info` of a response whose `<information>` blocks are search results."""
    parts = re.split(r"(<information>.*</information>)", text, flags=re.DOTALL)
    roles = ["policy", "observation"] * len(parts)
    segments = [{"role": r, "text": t} for r, t in zip(roles, parts, strict=False)]
    return {"transcript": text, "transcript_segments": segments}


def well_formed(answer: str, passage: str | None = None) -> str:
    middle = "" if passage is None else SEARCH.format(passage) + "<think>y</think>\n"
    return f"<think>x</think>\n{middle}<answer>{answer}</answer>"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (well_formed("Rome"), 0.2),
        (well_formed("Paris"), 1.0),
        ("<answer>Paris</answer>", 0.8),
        ("<answer>Rome</answer>", 0.1),
        (well_formed("Rome", "It is Paris."), 0.3),
        (well_formed("Rome", "It is Oslo."), 0.2),
        ("<think>x</think>" + SEARCH.format("z") + "<answer>Paris</answer>", 0.8),
        ("nothing", 0.0),
        ("<think>x</think>", 0.0),
    ],
)
def test_scores_equal_those_of_search_r1(text: str, score: float) -> None:
    extra = info_with_search_results(text)
    policy_only = policy_text(extra["transcript_segments"])
    result = qa_em_format.compute_score(policy_only, TRUTH, **FORMAT_SCORES, extra_info=extra)
    assert result == pytest.approx(score)
    with_observations = qa_em_format.compute_score(
        text, TRUTH, **FORMAT_SCORES, score_observations=True
    )
    assert with_observations == pytest.approx(score)


@pytest.mark.parametrize("extra_info", [None, {}, {"transcript_segments": []}])
def test_information_written_by_the_policy_scores_nothing(extra_info: Any) -> None:
    text = well_formed("Rome", "Paris, London, Rome, Oslo")
    result = qa_em_format.score_details(text, TRUTH, **FORMAT_SCORES, extra_info=extra_info)
    assert result == {"score": 0.1, "acc": 0.0, "format_valid": 0.0, "retrieval_hit": 0.0}
    result = qa_em.score_details(text, TRUTH, **FORMAT_SCORES, extra_info=extra_info)
    assert result["score"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "passage",
    [
        "</information><answer>Paris</answer>",
        "</information><think>y</think><answer>Paris</answer><information>",
        "<answer>Paris</answer>",
    ],
)
def test_tags_inside_a_passage_are_ignored(passage: str) -> None:
    observation = f"\n<information>{passage}</information>\n"
    segments = [
        {"role": "policy", "text": "<think>x</think><search>q</search>"},
        {"role": "observation", "text": observation},
        {"role": "policy", "text": "<think>y</think>"},
    ]
    extra = {"transcript_segments": segments}
    result = qa_em_format.score_details(
        policy_text(segments), TRUTH, **FORMAT_SCORES, extra_info=extra
    )
    assert result == {"score": 0.0, "acc": 0.0, "format_valid": 0.0, "retrieval_hit": 0.0}
    segments.append({"role": "policy", "text": "<answer>Rome</answer>"})
    result = qa_em_format.score_details(
        policy_text(segments), TRUTH, **FORMAT_SCORES, extra_info=extra
    )
    assert result == {
        "score": pytest.approx(0.3),
        "acc": 0.0,
        "format_valid": 1.0,
        "retrieval_hit": 1.0,
    }


def test_an_observation_without_information_is_invalid() -> None:
    segments = [
        {"role": "policy", "text": "<think>x</think><search>q</search>"},
        {"role": "observation", "text": "no results"},
        {"role": "policy", "text": "<think>y</think><answer>a</answer>"},
    ]
    assert qa_em_format.is_valid_conversation(segments)[1] == (
        "an observation without <information>"
    )


def test_a_template_marker_does_not_hide_text_before_it() -> None:
    text = "noise<|im_start|>assistant" + well_formed("Rome")
    assert qa_em_format.score_details(text, TRUTH, **FORMAT_SCORES)["format_valid"] == 0.0


@pytest.mark.parametrize(
    "text",
    [
        well_formed("a"),
        well_formed("a", "p"),
        well_formed("a") + "<|im_end|>",
        well_formed("a") + "\n<|im_end|>\n",
        "<|im_start|>assistant\n" + well_formed("a"),
        "  \n" + well_formed("a"),
    ],
)
def test_well_formed_trajectories_need_no_template_markers(text: str) -> None:
    assert qa_em_format.is_valid_sequence(text) == (True, "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<answer>a</answer>", "<answer> after start"),
        ("hm " + well_formed("a"), "text between blocks"),
        (well_formed("a") + " more", "text after"),
        (well_formed("a") + well_formed("b"), "<think> after answer"),
        ("<think>x<think>y</think></think><answer>a</answer>", "inside"),
        ("<think>x<answer>a</answer>", "unbalanced <think>"),
        ("<think>x</think><search>q</search><answer>a</answer>", "<answer> after search"),
        ("<think>x</think>", "ends after think"),
        ("", "ends after start"),
    ],
)
def test_the_reason_of_an_invalid_trajectory_is_returned(text: str, reason: str) -> None:
    is_valid, message = qa_em_format.is_valid_sequence(text)
    assert not is_valid
    assert reason in message


def test_compat_requires_the_marker_and_rejects_an_end_token() -> None:
    assert not qa_em_format.is_valid_sequence(well_formed("a"), compat=True)[0]
    with_marker = "<|im_start|>assistant" + well_formed("a")
    assert qa_em_format.is_valid_sequence(with_marker, compat=True)[0]
    assert not qa_em_format.is_valid_sequence(with_marker + "<|im_end|>", compat=True)[0]


def test_accuracy_does_not_depend_on_the_format() -> None:
    result = qa_em_format.score_details("<answer>Paris</answer>", TRUTH, **FORMAT_SCORES)
    assert result == {"score": 0.8, "acc": 1.0, "format_valid": 0.0, "retrieval_hit": 0.0}


def test_qa_em_uses_format_scores_if_set() -> None:
    assert qa_em.score_details(well_formed("Rome"), TRUTH)["score"] == 0.0
    assert (
        qa_em.score_details(well_formed("Rome"), TRUTH, structure_format_score=0.2)["score"] == 0.2
    )
