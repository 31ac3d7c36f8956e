"""Sampling parameters, and the errors of invalid outputs, which name the loop and the problem."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hone.agents.collate import BadTrajectory, check_output, metric_values
from hone.agents.contract import AgentLoopOutput, default_sampling, validation_sampling
from hone.verl.dialect import load_config


def check(row: dict[str, Any] | None = None, **fields: Any) -> None:
    defaults: dict[str, Any] = {"prompt_ids": [5], "response_ids": [1, 2], "response_mask": [1, 1]}
    output = AgentLoopOutput(**(defaults | fields))
    check_output(output, "mine", row={"uid": "u0"} if row is None else row, vocab_size=10)


@pytest.mark.parametrize(
    "score", [float("nan"), float("inf"), 10**400, "high", torch.tensor([1.0, 2.0])]
)
def test_a_score_that_is_no_finite_number_is_refused(score: Any) -> None:
    with pytest.raises(BadTrajectory, match="loop 'mine' returned reward_score="):
        check(reward_score=score)


@pytest.mark.parametrize("score", [None, 0, -1.5, np.float32(0.5), torch.tensor(2.0)])
def test_finite_scores_pass(score: Any) -> None:
    check(reward_score=score)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_ids": [1, 10]}, "response_ids from 1 to 10; the model knows 0 to 9"),
        ({"response_ids": torch.tensor([-1, 3])}, "response_ids from -1 to 3"),
        ({"prompt_ids": [99999]}, "prompt_ids from 99999 to 99999"),
    ],
)
def test_token_ids_the_model_does_not_know_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadTrajectory, match=f"loop 'mine' returned {message}"):
        check(**fields)


def test_routing_that_would_not_be_replayed_is_refused() -> None:
    with pytest.raises(BadTrajectory, match="'mine' returned routed_experts"):
        check(routed_experts=torch.zeros(3, 1))


def test_an_output_has_verls_columns() -> None:
    output = AgentLoopOutput([5], [1, 2], [1, 0], [-0.5, 0.0], reward_score=0.5)
    output.extra_fields |= {"mine": 1, "teacher_ids": [3]}
    columns = output.as_dict()
    assert [columns[n].tolist() for n in ("prompts", "responses", "response_mask")] == [
        [5],
        [1, 2],
        [1, 0],
    ]
    assert columns["rollout_log_probs"].tolist() == [-0.5, 0.0]
    assert columns["rm_scores"].tolist() == [0.0, 0.5]
    assert (columns["extra_fields"], columns["teacher_ids"]) == ({"mine": 1}, [3])
    assert output.extra_fields["teacher_ids"] == [3]


def test_an_empty_response_has_columns_too() -> None:
    columns = AgentLoopOutput([5], [], [], reward_score=0.5).as_dict()
    assert [columns[name].tolist() for name in ("responses", "rm_scores")] == [[], []]


def test_the_last_id_of_the_vocabulary_passes() -> None:
    check(response_ids=[0, 9])


@pytest.mark.parametrize("value", [None, "fast", float("nan")])
def test_a_measurement_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(BadTrajectory, match=r"'mine' returned metrics\['generate_sequences'\]="):
        check(metrics={"generate_sequences": value})


def test_a_measurement_left_out_is_zero() -> None:
    output = AgentLoopOutput([5], [1], [1], metrics={"tool_calls": 3})
    assert metric_values(output.metrics) == {
        "generate_sequences": 0.0,
        "tool_calls": 3,
        "num_preempted": 0.0,
    }


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("uid", "a column of the data row"),
        ("prompts", "built from the output's other fields"),
        ("versions", "built from the output's other fields"),
        ("advantages", "written by the phase 'advantages'"),
        ("reward/rule", "written by the phase 'score'"),
    ],
)
def test_a_column_that_another_writes_is_refused(field: str, message: str) -> None:
    with pytest.raises(
        BadTrajectory, match=f"'mine' returned extra_fields.*'{field}' is {message}"
    ):
        check(extra_fields={field: "x"})


def test_a_column_of_the_row_may_be_handed_through_and_facts_may_be_told() -> None:
    row = {"uid": "u0", "raw_prompt": [{"role": "user", "content": "hi"}]}
    check(row, extra_fields={"raw_prompt": [{"role": "user", "content": "hi"}]})
    check(row, extra_fields={"tool_rewards": [0.5], "found": 3})


@pytest.mark.parametrize(
    "mask", [[1, 0], (True, 1.0), np.array([0, 1]), torch.tensor([1, 1]), [torch.tensor(1), 0]]
)
def test_masks_of_zeros_and_ones_pass_in_any_form(mask: Any) -> None:
    check(response_mask=mask)


@pytest.mark.parametrize("mask", [[1, 0.5], [1, None], [2, 1], [[1], [0]], torch.tensor([1, -1])])
def test_other_masks_are_refused(mask: Any) -> None:
    with pytest.raises(BadTrajectory, match="'mine' returned a response_mask with values other"):
        check(response_mask=mask)


@pytest.mark.parametrize(
    ("setting", "stops"),
    [("'</answer>'", ("</answer>",)), ("['</a>','</b>']", ("</a>", "</b>")), ("[]", ())],
)
def test_one_stop_string_is_not_a_list_of_its_characters(
    setting: str, stops: tuple[str, ...]
) -> None:
    rollout = load_config([f"actor_rollout_ref.rollout.stop={setting}"]).actor_rollout_ref.rollout
    assert default_sampling(rollout)["stop"] == stops
    assert validation_sampling(rollout)["stop"] == stops


@pytest.mark.parametrize("media", [[b"png"], object(), np.zeros(2)])
def test_images_that_no_forward_pass_would_see_are_refused(media: Any) -> None:
    with pytest.raises(BadTrajectory, match="images in multi_modal_data; images, video and audio"):
        check(multi_modal_data={"images": media, "videos": None})
    check(multi_modal_data={"images": None, "videos": []})
