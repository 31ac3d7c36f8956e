from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hone.plugins import PluginError
from hone.protocol import DataProto
from hone.rewards import compute_reward, load_reward_manager, loading
from hone.rewards.failures import FailurePolicy, WrongSetting
from hone.rewards.managers.dapo import DAPORewardManager
from hone.rewards.managers.prime import PrimeRewardManager
from hone.rewards.managers.rule import NaiveRewardManager
from hone.rewards.scorer import ScorerInput, ScorerSignatureError
from hone.rewards.scores import table
from hone.verl.dialect import load_config

MakeBatch = Callable[..., DataProto]


@pytest.fixture
def load(tokenizer: Any) -> Callable[..., Any]:
    def load(*overrides: str, **keywords: Any) -> Any:
        return load_reward_manager(load_config(overrides), tokenizer, 0, **keywords)

    return load


def test_the_default_scores_by_source_with_the_configured_policy(
    load: Callable[..., Any], make_batch: MakeBatch
) -> None:
    manager = load()
    assert type(manager) is NaiveRewardManager
    assert manager.failure_policy == FailurePolicy("score", 0.0, 300.0)
    rewards, extras = compute_reward(make_batch(["#### 1"], "openai/gsm8k", ["1"]), manager)
    assert rewards.sum() == 1.0
    assert extras == {"score": [1.0], "acc": [1.0]}


@pytest.mark.parametrize("key", ["reward_manager.name", "reward_model.reward_manager"])
def test_either_config_key_selects_the_manager(load: Callable[..., Any], key: str) -> None:
    assert type(load(f"{key}=prime", num_processes=3)) is PrimeRewardManager


def test_manager_settings_come_from_reward_kwargs(load: Callable[..., Any]) -> None:
    kwargs = "reward_model.reward_kwargs"
    manager = load(
        "reward_model.reward_manager=dapo",
        "data.max_response_length=64",
        f"{kwargs}.overlong_buffer_cfg.enable=true",
        f"{kwargs}.overlong_buffer_cfg.len=16",
        f"{kwargs}.on_failure=raise",
        f"{kwargs}.timeout_s=7",
    )
    assert isinstance(manager, DAPORewardManager)
    assert (manager.max_resp_len, manager.buffer.len) == (64, 16)
    assert manager.failure_policy == FailurePolicy("raise", 0.0, 7.0)
    assert load("reward_model.reward_manager=prime", f"{kwargs}.num_processes=5").num_processes == 5


def test_the_number_of_scoring_processes_is_that_of_the_services_slots(
    load: Callable[..., Any],
) -> None:
    sandbox = "reward_model.sandbox_fusion"
    manager = load(
        "reward_model.reward_manager=prime",
        f"{sandbox}.url=http://localhost:1/run",
        f"{sandbox}.max_concurrent=9",
        f"{sandbox}.memory_limit_mb=77",
    )
    assert manager.num_processes == 9
    assert manager.options["sandbox_fusion_url"] == "http://localhost:1/run"
    assert manager.options["memory_limit_mb"] == 77


def test_format_scores_are_passed_to_rules_only_when_set(
    load: Callable[..., Any], make_batch: MakeBatch
) -> None:
    wrong = make_batch(["#### 1"], "openai/gsm8k", ["2"])
    countdown = make_batch(["<answer>1</answer>"], "countdown", [{"target": 2, "numbers": [1]}])
    assert load()(wrong).sum() == 0.0
    assert load()(countdown).sum() == pytest.approx(0.1)
    assert load("reward_model.format_score=0.2")(wrong).sum() == pytest.approx(0.2)
    assert load("reward_model.format_score=0.2")(countdown).sum() == pytest.approx(0.2)
    assert load("reward_model.format_score=null")(countdown).sum() == pytest.approx(0.1)


def test_a_format_score_of_zero_is_a_setting_and_not_the_default(
    load: Callable[..., Any], make_batch: MakeBatch
) -> None:
    countdown = make_batch(["<answer>1</answer>"], "countdown", [{"target": 2, "numbers": [1]}])
    assert load("reward_model.format_score=0.0")(countdown).sum() == 0.0
    assert load("reward_model.format_score=0")(countdown).sum() == 0.0


def test_a_users_function_is_loaded_with_its_arguments_bound(
    load: Callable[..., Any], make_batch: MakeBatch, scorer_file: Callable[[str], str]
) -> None:
    path = scorer_file(
        "def grade(data_source, solution_str, ground_truth, extra_info=None, weight=1, **rest):\n"
        "    assert not rest, rest\n"
        "    return {'score': weight * len(solution_str), 'keywords': extra_info['keywords']}\n"
    )
    manager = load(
        f"custom_reward_function.path={path}",
        "custom_reward_function.name=grade",
        "+custom_reward_function.reward_kwargs.weight=2",
        "reward_model.format_score=0.5",
    )
    data = make_batch(["abc"], "anything")
    data.non_tensor_batch["reward_model"][0]["keywords"] = ["k"]
    rewards, extras = compute_reward(data, manager)
    assert rewards.sum() == 6.0
    assert extras == {"score": [6.0], "keywords": [["k"]]}


def test_the_table_is_extended_by_config(
    load: Callable[..., Any], make_batch: MakeBatch, scorer_file: Callable[[str], str]
) -> None:
    before = table.registered_scores()
    path = scorer_file("def grade(solution_str, weight=1): return weight * len(solution_str)\n")
    try:
        manager = load(
            f"+reward_model.scores.my_set='{path}:grade'", "+reward_model.score_kwargs.weight=3"
        )
        assert manager(make_batch(["abc"], "my_set")).sum() == 9.0
    finally:
        table.restore_scores(before)


def test_options_of_a_rule_come_from_score_kwargs(
    load: Callable[..., Any], make_batch: MakeBatch
) -> None:
    manager = load("+reward_model.score_kwargs.method=flexible")
    assert manager(make_batch(["it is 7."], "openai/gsm8k", ["7"])).sum() == 1.0


def test_a_built_in_scorer_may_be_chosen_for_all_rows(
    load: Callable[..., Any], make_batch: MakeBatch
) -> None:
    manager = load("custom_reward_function.path=pkg://hone.rewards.scores.gsm8k")
    assert manager(make_batch(["#### 1"], "my own numbers", ["1"])).sum() == 1.0


@pytest.mark.parametrize("manager", ["naive", "dapo"])
def test_repeatness_punishment_removes_the_reward_of_repetitive_responses(
    load: Callable[..., Any], make_batch: MakeBatch, manager: str
) -> None:
    data = make_batch(["so #### 1", "again " * 40 + "#### 1"], "openai/gsm8k", ["1", "1"])
    setting = f"reward_model.reward_manager={manager}"
    assert load(setting)(data).sum(1).tolist() == [1.0, 1.0]
    punishing_manager = load(setting, "reward_model.repeatness_punishment=true")
    result = punishing_manager(data, return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.0, 0.0]
    assert result["reward_extra_info"]["acc"] == [1.0, 1.0]
    low, high = result["reward_extra_info"]["repeat_score"]
    assert low < 0.2 < high


def test_score_observations_logs_one_warning(
    load: Callable[..., Any], make_batch: MakeBatch, caplog: pytest.LogCaptureFixture
) -> None:
    loading._warn_about_observations.cache_clear()
    data = make_batch(["ask #### 1"], "openai/gsm8k", ["1"], masks=["111100000000"])
    assert load()(data).sum() == 0.0
    assert caplog.records == []
    for _ in range(2):
        assert load("reward_model.score_observations=true")(data).sum() == 1.0
    [record] = caplog.records
    assert "reward_model.score_observations=true" in record.getMessage()


def test_a_missing_user_function_is_an_error(load: Callable[..., Any]) -> None:
    with pytest.raises(PluginError, match="no such file"):
        load("custom_reward_function.path=/nowhere/reward.py")


MANAGER = """
from hone.rewards import AbstractRewardManager

class Mine(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source",
                 max_resp_len=None):
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.limit = max_resp_len

    def __call__(self, data, return_dict=False):
        return data.batch["responses"].float()
"""


def test_a_users_manager_is_loaded_from_its_file_with_the_arguments_it_accepts(
    load: Callable[..., Any], scorer_file: Callable[[str], str]
) -> None:
    manager = load(
        "reward_manager.source=importlib",
        f"reward_manager.module.path={scorer_file(MANAGER)}",
        "reward_manager.module.name=Mine",
        "data.max_response_length=33",
        "data.reward_fn_key=kind",
    )
    assert type(manager).__name__ == "Mine"
    assert manager.limit == 33
    assert manager.reward_fn_key == "kind"
    assert manager.pop_metrics() == {}


def test_a_users_manager_gets_its_own_reward_kwargs_as_in_verl(
    load: Callable[..., Any], scorer_file: Callable[[str], str]
) -> None:
    own = MANAGER.replace("max_resp_len=None", "weight=0, timeout_s=0").replace(
        "self.limit = max_resp_len", "self.limit = weight, timeout_s"
    )
    settings = [
        "reward_manager.source=importlib",
        f"reward_manager.module.path={scorer_file(own)}",
        "reward_manager.module.name=Mine",
        "reward_model.reward_kwargs.timeout_s=7",
    ]
    assert load(*settings, "reward_model.reward_kwargs.weight=5").limit == (5, 7)
    assert load(*settings, weight=6).limit == (6, 7)
    with pytest.raises(WrongSetting, match="Mine takes no argument wieght"):
        load(*settings, "reward_model.reward_kwargs.wieght=5")


def test_reward_kwargs_that_nothing_reads_are_an_error(
    load: Callable[..., Any], make_batch: MakeBatch
) -> None:
    unknown = "reward_model.reward_kwargs.weight=60"
    with pytest.raises(ScorerSignatureError, match="weight"):
        load(unknown)(make_batch(["#### 1"], "openai/gsm8k", ["2"]))
    with pytest.raises(WrongSetting, match="has no setting"):
        load(unknown, "reward_model.reward_manager=rate_limited")
    manager = load("reward_model.reward_manager=rate_limited", max_rpm=60, failure_score=-1)
    assert manager.limits.requests.rate_limit == 1.0
    assert manager.config.reward_model.reward_kwargs.failure_score == -1


def test_keyword_arguments_override_the_config_and_reach_the_scorer(
    load: Callable[..., Any], make_batch: MakeBatch
) -> None:
    manager = load("reward_model.format_score=0.2", format_score=0.3)
    assert manager(make_batch(["#### 1"], "openai/gsm8k", ["2"])).sum() == pytest.approx(0.3)


def test_compute_reward_accepts_any_manager_that_returns_a_dict() -> None:
    manager = SimpleNamespace(result={"reward_tensor": 1})
    assert compute_reward(None, lambda data, return_dict: manager.result) == (1, {})  # type: ignore[arg-type]


def test_a_score_function_gets_the_address_of_the_reward_models_server(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def compute_score(solution_str, reward_router_address=None):\n"
        "    return {'score': 1.0, 'router': reward_router_address}\n"
    )
    config = load_config(
        [f"custom_reward_function.path={tmp_path / 'own.py'}",
         "reward_model.server.url=http://127.0.0.1:8000/v1"]
    )  # fmt: skip
    manager = load_reward_manager(config, None, num_examine=0)
    (result,) = manager.score_rows([ScorerInput("s", "a", None, {})])
    assert result.extras["router"] == "127.0.0.1:8000"


@pytest.mark.parametrize("name", ["naive", "dapo", "prime"])
def test_reward_kwargs_are_passed_as_verl_does(name: str) -> None:
    settings = ["actor_rollout_ref.model.path=x", f"reward_model.reward_manager={name}"]
    config = load_config([*settings, "reward_model.reward_kwargs.failure_score=-2"])
    kwargs: Any = config.reward_model.get("reward_kwargs", {})
    tokenizer: Any = None
    manager: Any = load_reward_manager(config, tokenizer, num_examine=0, **kwargs)
    assert manager.options == {"memory_limit_mb": 1024}
    assert manager.failure_policy.failure_score == -2
    manager = load_reward_manager(config, tokenizer, 0, on_failure="raise", method="flexible")
    assert (manager.failure_policy.on_failure, manager.failure_policy.failure_score) == (
        "raise",
        -2,
    )
    assert manager.options["method"] == "flexible"
