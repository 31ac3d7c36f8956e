"""Under every manager, a scorer reads only the text of policy tokens; answers are read between tags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hone.protocol import DataProto
from hone.rewards.managers.registry import get_reward_manager_cls
from hone.rewards.managers.rule import (
    Extras,
    NaiveRewardManager,
    RuleRewardManager,
    move_to_policy_tokens,
    response_tokens,
)
from hone.rewards.scorer import ScorerInput, read_rows

MakeBatch = Callable[..., DataProto]
MANAGERS = ["naive", "batch", "dapo", "prime"]


def conversation(*turns: str) -> tuple[str, str]:
    """Returns the text of turns and its mask; a turn that begins with `>` is an observation."""
    texts = [turn.removeprefix(">") for turn in turns]
    digits = ["0" if turn.startswith(">") else "1" for turn in turns]
    return "".join(texts), "".join(d * len(t) for d, t in zip(digits, texts, strict=True))


def rows_of(tokenizer: Any, data: DataProto, **options: Any) -> list[ScorerInput]:
    columns = data.non_tensor_batch
    return read_rows(columns, *response_tokens(data), tokenizer, "data_source", **options)


def manager_of(name: str, tokenizer: Any, **options: Any) -> RuleRewardManager:
    cls = get_reward_manager_cls(name)
    assert issubclass(cls, RuleRewardManager)
    if name == "prime":
        options["num_processes"] = 1
    return cls(tokenizer, 0, **options)


def test_a_scorer_reads_policy_text_and_the_transcript_has_observations(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    text, mask = conversation("call it", ">tool: #### 42", "#### 7")
    [row] = rows_of(tokenizer, make_batch([text], masks=[mask]))
    assert row.solution_str == "call it\n#### 7"
    assert row.extra_info["transcript"] == text
    assert row.extra_info["transcript_segments"] == [
        {"role": "policy", "text": "call it"},
        {"role": "observation", "text": "tool: #### 42"},
        {"role": "policy", "text": "#### 7"},
        {"role": "observation", "text": ""},
    ]


def test_numbers_of_two_turns_are_not_joined(tokenizer: Any, make_batch: MakeBatch) -> None:
    text, mask = conversation("#### 4", ">ok", "2")
    data = make_batch([text], "openai/gsm8k", ["42"], masks=[mask])
    assert rows_of(tokenizer, data)[0].solution_str == "#### 4\n2"
    assert manager_of("naive", tokenizer)(data).sum() == 0.0


def test_a_single_turn_is_read_as_before(tokenizer: Any, make_batch: MakeBatch) -> None:
    data = make_batch(["so #### 1", ""], "openai/gsm8k", ["1", "1"])
    with_mask = rows_of(tokenizer, data)
    assert [row.solution_str for row in with_mask] == ["so #### 1", ""]
    assert with_mask == rows_of(tokenizer, data, score_observations=True)
    del data.batch["response_mask"]
    assert rows_of(tokenizer, data) == with_mask


def test_a_response_without_a_policy_token_is_empty(tokenizer: Any, make_batch: MakeBatch) -> None:
    text, mask = conversation(">#### 1")
    assert rows_of(tokenizer, make_batch([text], masks=[mask]))[0].solution_str == ""


@pytest.mark.parametrize("name", MANAGERS)
def test_no_manager_scores_the_output_of_tools_and_searches(
    tokenizer: Any, make_batch: MakeBatch, name: str
) -> None:
    conversations = [
        conversation("I ask.", ">#### 42"),
        conversation("<search>q</search>", "><information></information><answer>Paris</answer>"),
        conversation("Hm.", r">\boxed{42}", "I do not know."),
        conversation("Hm.", ">Answer: 42\n", "I do not know."),
        conversation("Hm.", ">the answer is 42", "\nno"),
        conversation("Hm.", "><answer>6*7</answer>"),
    ]
    sources = ["openai/gsm8k", "nq", "lighteval/MATH", "math_dapo", "numina_olympiads", "countdown"]
    truths = ["42", "Paris", "42", "42", "42", {"target": 42, "numbers": [6, 7]}]
    data = make_batch(
        [t for t, _ in conversations], sources, truths, masks=[m for _, m in conversations]
    )
    manager = manager_of(name, tokenizer)
    observation_manager = manager_of(name, tokenizer, score_observations=True)
    try:
        acc = manager(data, return_dict=True)["reward_extra_info"]["acc"]
        assert [float(a) for a in acc] == [0.0] * 6
        acc = observation_manager(data, return_dict=True)["reward_extra_info"]["acc"]
        assert [float(a) for a in acc] == [1.0] * 6
    finally:
        manager.close()
        observation_manager.close()


def test_only_retrieved_passages_count_as_retrieval(tokenizer: Any, make_batch: MakeBatch) -> None:
    head, tail = "<think>x</think><search>q</search>", "<think>y</think><answer>Rome</answer>"
    passage = "<information>Paris is the capital</information>"
    conversations = [
        conversation(head, f">{passage}", tail),
        conversation(head + passage + tail),
        conversation(head + passage, ">", tail),
    ]
    data = make_batch(
        [t for t, _ in conversations], "nq", ["Paris"] * 3, masks=[m for _, m in conversations]
    )
    format_scores = {
        "structure_format_score": 0.2,
        "final_format_score": 0.1,
        "retrieval_score": 0.1,
    }
    manager = manager_of("naive", tokenizer, **format_scores)
    assert manager(data).sum(1).tolist() == pytest.approx([0.3, 0.1, 0.1])
    observation_manager = manager_of("naive", tokenizer, **format_scores, score_observations=True)
    assert observation_manager(data).sum(1).tolist() == pytest.approx([0.3, 0.3, 0.3])


def test_repetition_is_measured_in_the_policys_text(tokenizer: Any, make_batch: MakeBatch) -> None:
    text, mask = conversation("so it is", ">" + "again " * 60, " #### 1")
    data = make_batch([text], "openai/gsm8k", ["1"], masks=[mask])
    manager = manager_of("naive", tokenizer, repeat_threshold=0.2)
    assert manager(data).sum() == 1.0


def test_the_penalty_of_repetition_leaves_the_columns_of_a_users_manager(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    class KeepsScores(NaiveRewardManager):
        def shape_rewards(
            self, scores: list[float], lengths: list[int]
        ) -> tuple[list[float], Extras]:
            return scores, {"before_penalty": scores}

    data = make_batch(["again " * 60 + "#### 1"], "openai/gsm8k", ["1"])
    manager = KeepsScores(tokenizer, 0, repeat_threshold=0.2)
    result = manager(data, return_dict=True)
    assert isinstance(result, dict)
    assert result["reward_tensor"].sum() == 0.0
    assert result["reward_extra_info"]["before_penalty"] == [1.0]


def test_a_reward_on_an_observation_moves_to_the_policy_token_before_it(
    make_batch: MakeBatch,
) -> None:
    data = make_batch(["abcde", "abc"], masks=["11001", "110"])
    rewards = torch.zeros(data.batch["responses"].shape)
    rewards[0, 3], rewards[0, 4], rewards[1, 3] = 2.0, 0.5, 1.0
    moved = move_to_policy_tokens(data, rewards)
    assert moved.nonzero().tolist() == [[0, 1], [0, 4], [1, 1]]
    assert moved[0, [1, 4]].tolist() == [2.0, 0.5]
    assert moved[1, 1] == 1.0


def test_a_reward_before_every_policy_token_moves_to_the_first(make_batch: MakeBatch) -> None:
    data = make_batch(["abcde"], masks=["00110"])
    rewards = torch.zeros(data.batch["responses"].shape)
    rewards[0, 1] = 1.0
    assert move_to_policy_tokens(data, rewards).nonzero().tolist() == [[0, 2]]


def test_rewards_on_policy_tokens_stay(make_batch: MakeBatch) -> None:
    data = make_batch(["abcde"], masks=["11001"])
    rewards = torch.rand(data.batch["responses"].shape) * data.batch["response_mask"]
    assert torch.equal(move_to_policy_tokens(data, rewards), rewards)
