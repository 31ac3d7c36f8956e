from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from hone.protocol import DataProto
from hone.rewards.failures import FailurePolicy, RewardError, WrongSetting
from hone.rewards.managers.batch import BatchRewardManager
from hone.rewards.managers.rule import AbstractRewardManager, NaiveRewardManager
from hone.rewards.scorer import ScorerSignatureError, count_mishap
from hone.rewards.scores.table import UnknownSourceError, default_compute_score

MakeBatch = Callable[..., DataProto]
LENIENT = FailurePolicy("score", -1.0, 60.0)
STRICT = FailurePolicy("raise", -1.0, 60.0)


def echo(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> dict[str, Any]:
    return {
        "score": len(solution_str),
        "source": data_source,
        "text": solution_str,
        "truth": ground_truth,
        "extra": extra_info,
    }


def test_the_score_is_on_the_last_token_of_each_response(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    data = make_batch(["#### 1", "so #### 23"], "openai/gsm8k", ["1", "23"])
    rewards = NaiveRewardManager(tokenizer, 0)(data)
    assert isinstance(rewards, torch.Tensor)
    assert rewards.dtype == torch.float32
    assert rewards.shape == data.batch["responses"].shape
    assert rewards.nonzero().tolist() == [[0, 6], [1, 10]]
    assert rewards.sum(1).tolist() == [1.0, 1.0]


def test_the_score_is_on_the_last_policy_token(tokenizer: Any, make_batch: MakeBatch) -> None:
    data = make_batch(["abcdef"], masks=["1110000"])
    manager = NaiveRewardManager(tokenizer, 0, echo)
    result = manager(data, return_dict=True)
    assert result["reward_tensor"].nonzero().tolist() == [[0, 2]]
    assert result["reward_extra_info"]["text"] == ["abc"]


def test_without_a_response_mask_the_attention_mask_is_used(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    data = make_batch(["abc"])
    del data.batch["response_mask"]
    assert NaiveRewardManager(tokenizer, 0, echo)(data).nonzero().tolist() == [[0, 3]]


def test_an_empty_response_gets_no_reward_and_is_counted(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    data = make_batch(["", "ab"])
    manager = NaiveRewardManager(tokenizer, 0, lambda solution_str: 5.0)
    assert manager(data).sum(1).tolist() == [0.0, 5.0]
    assert manager.pop_metrics() == {"reward/failures/no_policy_token": 1.0}


def test_the_scorer_sees_the_response_without_prompt_padding_and_special_tokens(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    data = make_batch(
        ["abc", "z"],
        ["s1", "s2"],
        ["t1", {"target": 3}],
        extra_info=[{"index": 7, "level": "row"}, None],
        __num_turns__=[2, 4],
        reward_scores=[{"tool": [0.5]}, {}],
    )
    data.non_tensor_batch["reward_model"][0].update(keywords=["k"], level="model")
    extras = NaiveRewardManager(tokenizer, 0, echo)(data, return_dict=True)["reward_extra_info"]
    assert extras["text"] == ["abc", "z"]
    assert extras["source"] == ["s1", "s2"]
    assert extras["truth"] == ["t1", {"target": 3}]
    assert extras["extra"][0] == {
        "index": 7,
        "level": "row",
        "keywords": ["k"],
        "num_turns": 2,
        "num_tool_calls": 0,
        "rollout_reward_scores": {"tool": [0.5]},
        "transcript": "abc",
        "transcript_segments": [{"role": "policy", "text": "abc"}],
    }
    assert extras["extra"][1]["num_turns"] == 4
    assert extras["extra"][1]["rollout_reward_scores"] == {}


def test_a_batch_without_tensors_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="the batch has no tensors"):
        NaiveRewardManager(tokenizer, 0)(DataProto())


def test_the_source_column_is_configurable(tokenizer: Any, make_batch: MakeBatch) -> None:
    data = make_batch(["#### 1"], "unknown", ["1"], kind=["openai/gsm8k"])
    assert NaiveRewardManager(tokenizer, 0, reward_fn_key="kind")(data).sum() == 1.0
    with pytest.raises(WrongSetting, match=r"no column 'task'.*data\.reward_fn_key"):
        NaiveRewardManager(tokenizer, 0, reward_fn_key="task")(data)


def test_accuracy_is_added_unless_the_rule_returns_it(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    texts = ["<answer>2*3</answer>", "<answer>2+3</answer>", "Answer: 4"]
    truth = {"target": 6, "numbers": [2, 3]}
    data = make_batch(texts, ["countdown", "countdown", "math_dapo"], [truth, truth, "5"])
    extras = NaiveRewardManager(tokenizer, 0)(data, return_dict=True)["reward_extra_info"]
    assert extras["score"] == [1.0, 0.1, -1.0]
    assert extras["acc"] == [1.0, 0.0, False]
    assert extras["pred"] == [None, None, "4"]


@pytest.mark.parametrize("manager_class", [NaiveRewardManager, BatchRewardManager])
def test_a_rule_of_verl_returns_a_number_and_its_parts_are_columns(
    manager_class: Any, tokenizer: Any, make_batch: MakeBatch
) -> None:
    text = r"<think>a</think>\boxed{80}"
    assert default_compute_score("hiyouga/geometry3k", text, "81") == 0.1
    data = make_batch([text, r"\boxed{80}"], "hiyouga/geometry3k", ["81", "80"])
    for scorer in (None, partial(default_compute_score, format_score=0.1)):
        extras = manager_class(tokenizer, 0, scorer)(data, return_dict=True)["reward_extra_info"]
        assert extras == {"score": [0.1, 0.9], "acc": [0.0, 1.0], "format": [1.0, 0.0]}


def test_no_accuracy_is_added_for_a_users_scorer(tokenizer: Any, make_batch: MakeBatch) -> None:
    manager = NaiveRewardManager(tokenizer, 0, lambda solution_str: 1.0)
    assert manager(make_batch(["a"]), return_dict=True)["reward_extra_info"] == {"score": [1.0]}


def test_options_are_passed_to_the_rule_and_change_the_full_mark(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    data = make_batch(["#### 1", "#### 2"], "openai/gsm8k", ["1", "1"])
    manager = NaiveRewardManager(tokenizer, 0, format_score=0.1, score=0.5)
    extras = manager(data, return_dict=True)["reward_extra_info"]
    assert extras == {"score": [0.5, 0.1], "acc": [1.0, 0.0]}


def test_an_option_that_no_scorer_accepts_is_an_error(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    manager = NaiveRewardManager(tokenizer, 0, policy=LENIENT, fromat_score=0.1)
    with pytest.raises(ScorerSignatureError, match="fromat_score"):
        manager(make_batch(["#### 1"], "openai/gsm8k", ["1"]))


def test_an_unknown_source_is_an_error_under_every_policy(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    manager = NaiveRewardManager(tokenizer, 0, policy=LENIENT)
    with pytest.raises(UnknownSourceError, match=r"'mystery' \(row 1\)"):
        manager(make_batch(["#### 1", "a"], ["openai/gsm8k", "mystery"], ["1", "1"]))
    with pytest.raises(UnknownSourceError, match="'mystery'"):
        manager.check_rows([{"data_source": "mystery"}])
    NaiveRewardManager(tokenizer, 0, echo).check_rows([{"data_source": "mystery"}])


def failing(solution_str: str) -> Any:
    if solution_str == "raise":
        raise ValueError("bad day")
    if solution_str == "hang":
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
        signal.raise_signal(signal.SIGALRM)  # the deadline, which no other row reaches
    return {"nan": float("nan"), "none": None}.get(solution_str, {"score": 1.0, "acc": 1.0})


def test_failures_are_scored_counted_and_named_by_reason(
    tokenizer: Any, make_batch: MakeBatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["ok", "raise", "hang", "nan", "none", "raise"]
    manager = NaiveRewardManager(tokenizer, 0, failing, policy=LENIENT)
    result = manager(make_batch(texts), return_dict=True)
    extras = result["reward_extra_info"]
    assert result["reward_tensor"].sum(1).tolist() == [1.0, -1.0, -1.0, -1.0, -1.0, -1.0]
    assert extras["acc"] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    reasons = [None, "exception", "timeout", "nan", "bad_return", "exception"]
    assert extras["reward_failure"] == reasons
    assert manager.failures == {"exception": 2, "timeout": 1, "nan": 1, "bad_return": 1}
    assert manager.pop_metrics() == {
        "reward/failures/bad_return": 1.0,
        "reward/failures/exception": 2.0,
        "reward/failures/nan": 1.0,
        "reward/failures/timeout": 1.0,
    }
    assert manager.pop_metrics() == {}
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len([w for w in warnings if "ValueError: bad day" in w]) == 1


@pytest.mark.parametrize(("text", "reason"), [("raise", "bad day"), ("nan", "nan")])
def test_the_raise_policy_names_row_source_and_remedy(
    tokenizer: Any, make_batch: MakeBatch, text: str, reason: str
) -> None:
    manager = NaiveRewardManager(tokenizer, 0, failing, policy=STRICT)
    message = rf"row 1 \(data_source 'custom'\).*{reason}.*on_failure=score"
    with pytest.raises(RewardError, match=message):
        manager(make_batch(["ok", text]))
    assert sum(manager.failures.values()) == 1


def test_a_first_batch_without_a_score_is_an_error_and_a_later_one_is_counted(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    manager = NaiveRewardManager(tokenizer, 0, failing, policy=LENIENT)
    message = (
        r"none of the 2 responses of the first batch could be scored.*'custom'\): "
        r"exception: .*failing raised ValueError: bad day at .*test_rule\.py:\d+$"
    )
    with pytest.raises(RewardError, match=message):
        manager(make_batch(["raise", "nan"]))
    manager = NaiveRewardManager(tokenizer, 0, failing, policy=LENIENT)
    assert manager(make_batch(["raise", "ok"])).sum(1).tolist() == [-1.0, 1.0]
    assert manager(make_batch(["raise", "nan"])).sum(1).tolist() == [-1.0, -1.0]
    assert manager.failures == {"exception": 2, "nan": 1}


@pytest.mark.parametrize("truth", [None, "", "  ", "null", "[INVALID]", []])
def test_a_first_batch_without_a_ground_truth_is_an_error(
    tokenizer: Any, make_batch: MakeBatch, truth: Any
) -> None:
    manager = NaiveRewardManager(tokenizer, 0, policy=LENIENT)
    with pytest.raises(RewardError, match=r"no_ground_truth: reward_model\.ground_truth is "):
        manager(make_batch(["#### ,"], "openai/gsm8k", [truth]))


def test_a_missing_ground_truth_is_a_failure_and_not_a_zero(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    data = make_batch(["#### 1", "#### 1"], "openai/gsm8k", ["1", None])
    manager = NaiveRewardManager(tokenizer, 0, policy=LENIENT)
    assert manager(data).sum(1).tolist() == [1.0, -1.0]
    assert manager.failures == {"no_ground_truth": 1}


@pytest.mark.parametrize("truth", [None, "null", ""])
@pytest.mark.parametrize("policy", [LENIENT, STRICT])
def test_with_a_reward_model_a_row_without_a_ground_truth_is_unscored_and_not_a_failure(
    tokenizer: Any, make_batch: MakeBatch, truth: Any, policy: FailurePolicy
) -> None:
    manager = NaiveRewardManager(tokenizer, 0, policy=policy, skips_rows_without_truth=True)
    unscored = make_batch(["#### 1"] * 2, "openai/gsm8k", [truth] * 2)
    assert manager(unscored).sum(1).tolist() == [0.0, 0.0]  # also as the first batch
    result = manager(
        make_batch(["#### 1", "#### 1", "#### 2"], "openai/gsm8k", ["1", truth, "1"]),
        return_dict=True,
    )
    assert result["reward_tensor"].sum(1).tolist() == [1.0, 0.0, 0.0]
    extras = result["reward_extra_info"]
    assert extras["acc"] == [1.0, None, 0.0]
    assert extras["score"] == [1.0, None, 0.0]
    assert extras["reward_failure"] == [None, "no_ground_truth", None]
    assert manager.pop_metrics() == {"reward/rows_without_answer": 3.0}
    assert manager.pop_metrics() == {"reward/rows_without_answer": 0.0}


def needs_a_number(solution_str: str, ground_truth: Any) -> float | None:
    return None if ground_truth == "null" else float(int(ground_truth) == len(solution_str))


def test_with_a_reward_model_a_user_function_may_fail_without_a_ground_truth(
    tokenizer: Any, make_batch: MakeBatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = NaiveRewardManager(
        tokenizer, 0, needs_a_number, policy=STRICT, skips_rows_without_truth=True
    )
    data = make_batch(["ab", "ab", "ab", "ab"], "custom", ["2", None, "null", "3"])
    result = manager(data, return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert result["reward_extra_info"]["score"] == [1.0, None, None, 0.0]
    (warning,) = [
        r.getMessage() for r in caplog.records if "without a ground truth" in r.getMessage()
    ]
    assert "int() argument must be" in warning
    with pytest.raises(RewardError, match="invalid literal"):
        manager(make_batch(["ab"], "custom", ["x"]))


def test_with_a_reward_model_other_failures_of_a_first_batch_are_an_error(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    manager = NaiveRewardManager(
        tokenizer, 0, failing, policy=LENIENT, skips_rows_without_truth=True
    )
    with pytest.raises(RewardError, match="none of the 2 responses"):
        manager(make_batch(["raise", "nan"], "custom", ["1", "1"]))
    rows = make_batch(["raise", "nan"], ["without", "with"], [None, "1"])
    manager.is_first_batch = True
    with pytest.raises(RewardError, match=r"none of the 1 responses.*'with'\): nan"):
        manager(rows)


async def slow_judge(solution_str: str, ground_truth: Any, bonus: float = 0.0) -> float:
    await asyncio.sleep(600 if solution_str == "hang" else 0.01)
    if solution_str == "raise":
        raise ValueError("bad day")
    return 1.0 + bonus


def test_async_scorers_run_concurrently_each_with_its_deadline(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    policy = FailurePolicy("score", -1.0, 4.0)
    manager = NaiveRewardManager(tokenizer, 0, partial(slow_judge, bonus=1.0), policy=policy)
    rewards = manager(make_batch(["a", "hang", "raise", "hang", "b"]))
    assert rewards.sum(1).tolist() == [2.0, -1.0, -1.0, -1.0, 2.0]
    assert manager.failures == {"timeout": 2, "exception": 1}


def test_bound_arguments_keep_the_deadline_of_a_scorer(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    class Server:
        has_own_deadline = True

        async def __call__(self, solution_str: str, bonus: float = 0.0) -> float:
            await asyncio.sleep(0.1)
            return bonus

    manager = NaiveRewardManager(
        tokenizer, 0, partial(Server(), bonus=2.0), policy=FailurePolicy("raise", 0.0, 0.01)
    )
    assert manager(make_batch(["a"])).sum().item() == 2.0


async def hostile_judge(solution_str: str, ground_truth: Any) -> float:
    while solution_str == "swallow":
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
    if solution_str == "exit":
        raise SystemExit(3)
    if solution_str == "cancel":
        raise asyncio.CancelledError
    return 1.0


def test_an_async_scorer_that_does_not_end_or_exits_is_a_failed_score(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    policy = FailurePolicy("score", -1.0, 2.0)
    manager = NaiveRewardManager(tokenizer, 0, hostile_judge, policy=policy)
    rewards = manager(make_batch(["a", "swallow", "exit", "cancel", "b"]))
    assert rewards.sum(1).tolist() == [1.0, -1.0, -1.0, -1.0, 1.0]
    assert manager.failures == {"timeout": 1, "exception": 2}


async def counts_a_mishap(solution_str: str) -> float:
    await asyncio.sleep(0)
    count_mishap("symbolic_timeout")
    return 1.0


def test_mishaps_of_async_scorers_become_metrics(tokenizer: Any, make_batch: MakeBatch) -> None:
    manager = NaiveRewardManager(tokenizer, 0, counts_a_mishap)
    assert manager(make_batch(["a", "b"])).sum().item() == 2.0
    assert manager.pop_metrics() == {"reward/failures/symbolic_timeout": 2.0}


@pytest.mark.parametrize("runs_a_loop", [False, True])
def test_a_plain_wrapper_of_an_async_scorer_works(
    runs_a_loop: bool, tokenizer: Any, make_batch: MakeBatch
) -> None:
    @functools.wraps(slow_judge)
    def wrapper(**arguments: Any) -> Any:
        coroutine = slow_judge(**arguments)
        return asyncio.run(coroutine) if runs_a_loop else coroutine

    manager = NaiveRewardManager(tokenizer, 0, wrapper, policy=LENIENT)
    assert manager(make_batch(["a", "raise"])).sum(1).tolist() == [1.0, -1.0]


def exits(solution_str: str) -> float:
    if solution_str == "exit":
        raise SystemExit(3)
    return 1.0


def test_a_scorer_that_exits_fails_only_its_row(tokenizer: Any, make_batch: MakeBatch) -> None:
    manager = NaiveRewardManager(tokenizer, 0, exits, policy=LENIENT)
    assert manager(make_batch(["a", "exit"])).sum(1).tolist() == [1.0, -1.0]
    assert manager.failures == {"exception": 1}


def test_a_scheduler_that_ends_the_run_does_not_wait_for_the_scorer(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    def on_term(signal_number: int, frame: Any) -> None:
        raise SystemExit(143)

    outer_handler = signal.signal(signal.SIGTERM, on_term)
    try:
        manager = NaiveRewardManager(tokenizer, 0, lambda solution_str: os.kill(os.getpid(), 15))
        with pytest.raises(SystemExit, match="143"):
            manager(make_batch(["a"]))
    finally:
        signal.signal(signal.SIGTERM, outer_handler)


def test_keywords_bound_to_the_table_are_options(tokenizer: Any, make_batch: MakeBatch) -> None:
    scorer = partial(default_compute_score, format_score=0.1, score=0.5)
    manager = NaiveRewardManager(tokenizer, 0, scorer, score=2.0)
    result: Any = manager(make_batch(["#### 1", "#### 2"], "gsm8k", ["1", "1"]), return_dict=True)
    assert result["reward_extra_info"] == {"score": [2.0, 0.1], "acc": [1.0, 0.0]}


def test_a_wrapper_of_the_table_is_called(tokenizer: Any, make_batch: MakeBatch) -> None:
    @functools.wraps(default_compute_score)
    def doubled(*args: Any, **kwargs: Any) -> Any:
        return 2.0 * default_compute_score(*args, **kwargs)

    manager = NaiveRewardManager(tokenizer, 0, doubled)
    assert manager(make_batch(["#### 1"], "gsm8k", ["1"])).sum().item() == 2.0


def test_a_users_manager_need_not_call_our_init(tokenizer: Any, make_batch: MakeBatch) -> None:
    class Mine(AbstractRewardManager):
        def __init__(self, tokenizer: Any, num_examine: int) -> None:
            self.tokenizer = tokenizer

        def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor:
            return torch.zeros(data.batch["responses"].shape)

    manager = Mine(tokenizer, 0)
    assert manager.pop_metrics() == {}
    manager.close()


def test_model_scores_are_used_only_without_ground_truths(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    data = make_batch(["#### 1"], "openai/gsm8k", ["1"])
    data.batch["rm_scores"] = torch.full(data.batch["responses"].shape, 0.5)
    manager = NaiveRewardManager(tokenizer, 0)
    assert manager(data).sum() == 1.0
    del data.non_tensor_batch["reward_model"]
    assert torch.equal(manager(data), data.batch["rm_scores"])


def test_the_first_samples_of_each_source_are_logged(
    tokenizer: Any, make_batch: MakeBatch, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    caplog.set_level(logging.INFO, logger="hone.rewards")
    data = make_batch(["one", "two", "three"], ["s1", "s1", "s2"])
    NaiveRewardManager(tokenizer, 1, echo)(data)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "[s1] score 3.0" in messages[0]
    assert "one" in messages[0]
    assert "three" in messages[1]
    assert capsys.readouterr().out == ""


def test_mishaps_inside_the_symbolic_check_become_metrics(
    tokenizer: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.rewards.failures import Failed
    from hone.rewards.scores import symbolic

    monkeypatch.setattr(symbolic, "is_available", lambda: True)
    monkeypatch.setattr(symbolic, "_cache", {})
    monkeypatch.setattr(
        symbolic, "_compare_in_pool", lambda pairs, cpu_s: [Failed("timeout", "")] * len(pairs)
    )
    data = make_batch([r"\boxed{x^9}"], "lighteval/MATH", [r"\sqrt{y}"])
    manager = NaiveRewardManager(tokenizer, 0, policy=STRICT)
    assert manager(data).sum() == 0.0
    assert manager.pop_metrics() == {"reward/failures/symbolic_timeout": 1.0}


def test_a_missing_sandbox_stops_the_run_under_any_policy(
    tokenizer: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone import sandbox
    from hone.rewards.failures import SetupError

    def closed(*_: Any, **__: Any) -> None:
        raise sandbox.SandboxUnavailable("no bubblewrap")

    monkeypatch.setattr(sandbox, "run_python", closed)
    manager = NaiveRewardManager(tokenizer, 0, policy=LENIENT)
    with pytest.raises(SetupError, match="cannot be run here: no bubblewrap"):
        manager(make_batch(["print(1)"], "taco", [{"inputs": [""], "outputs": ["1"]}]))
