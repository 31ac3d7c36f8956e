"""Alarms: each sign raises its own, noise and learning raise none, and a resumed run raises the same."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import alarm_tasks
from benchmarks import alarms as benchmark
from hone.config import ConfigError
from hone.config.trainer import AlarmsConfig
from hone.tracking import RunFolder
from hone.trainer.ppo.alarms import RULES, TRUE_SCORE_METRIC, Alarms, AlarmsRaised
from hone.trainer.ppo.checkpoint import prune
from hone.verl.dialect import load_config

from ..runs import Run

BEFORE = 20
HACKED = {
    "repetition": (0.05, 0.5),
    "reflection": (0.5, 6.0),
    "few_steps": (4.0, 1.0),
    "many_steps": (4.0, 30.0),
    "long_steps": (20.0, 200.0),
    "disagreement": (0.9, 0.3),
    "kl": (0.01, 1.0),
    "outcome": (0.3, 4.0),
    "short_responses": (300.0, 20.0),
    "long_responses": (300.0, 2000.0),
}
"""The level of each metric before and after the jump."""


def alarms(folder: Path = Path("nowhere"), **settings: object) -> Alarms:
    return Alarms(AlarmsConfig(enable=True, **settings), RunFolder(folder))  # type: ignore[arg-type]


def noisy(level: float, count: int, seed: int = 0) -> Iterator[float]:
    draw = random.Random(seed)
    return (level * (1 + draw.gauss(0, 0.05)) for _ in range(count))


def lines(name: str, values: Sequence[float], truth: Sequence[float]) -> list[dict[str, float]]:
    metric = RULES[name].metrics[0]
    return [{metric: v, TRUE_SCORE_METRIC: t} for v, t in zip(values, truth, strict=True)]


def raised(watch: Alarms, rows: Sequence[dict[str, float]], first: int = 1) -> dict[int, list[str]]:
    """Step → names of the alarms that its metrics have."""
    result = {}
    for step, row in enumerate(rows, first):
        metrics = watch.observe(row, step)
        names = [key.removeprefix("alarms/") for key in metrics if key != "alarms/raised"]
        assert metrics["alarms/raised"] == len(names)
        if names:
            result[step] = names
    return result


@pytest.mark.parametrize("name", RULES)
def test_a_jump_raises_its_alarm_after_the_steps_of_patience(name: str) -> None:
    before, after = HACKED[name]
    values = [*noisy(before, BEFORE), *noisy(after, 5)]
    rows = lines(name, values, [*noisy(0.5, BEFORE + 5, 1)])
    result = raised(alarms(), rows)
    assert min(result) == BEFORE + 3
    assert all(names == [name] for names in result.values())


@pytest.mark.parametrize("name", RULES)
def test_noise_and_a_single_outlier_raise_nothing(name: str) -> None:
    before, after = HACKED[name]
    values = [*noisy(before, 80)]
    values[40] = values[60] = values[61] = after
    assert raised(alarms(), lines(name, values, [*noisy(0.5, 80, 1)])) == {}


@pytest.mark.parametrize("name", RULES)
def test_a_change_that_the_true_score_shares_is_learning(name: str) -> None:
    before, after = HACKED[name]
    values = [*noisy(before, BEFORE), *noisy(after, 5)]
    truth = [*noisy(0.3, BEFORE, 1), 0.5, 0.6, 0.7, 0.75, 0.8]
    assert raised(alarms(), lines(name, values, truth)) == {}


def test_a_falling_true_score_is_not_learning_although_it_was_lower_once() -> None:
    truth = [*noisy(0.2, 12, 1), *noisy(0.8, 8, 2), *noisy(0.6, 5, 3)]
    values = [*noisy(0.01, BEFORE), *noisy(1.0, 5)]
    assert raised(alarms(), lines("kl", values, truth))


def test_too_little_history_raises_nothing_and_null_switches_a_rule_off() -> None:
    values = [*noisy(0.01, 8), *noisy(1.0, 4)]
    assert raised(alarms(), lines("kl", values, [0.5] * 12)) == {}
    assert raised(alarms(min_history=5), lines("kl", values, [0.5] * 12))
    assert raised(alarms(min_history=5, kl=None), lines("kl", values, [0.5] * 12)) == {}


def test_a_kl_that_leaves_zero_is_no_jump() -> None:
    values = [*noisy(0.0001, BEFORE), *noisy(0.01, 5)]
    assert raised(alarms(), lines("kl", values, [0.5] * 25)) == {}


def test_values_that_are_missing_or_not_finite_are_left_out() -> None:
    rows = lines("kl", [*noisy(0.01, BEFORE), math.nan, math.inf, 1, 1], [0.5] * 24)
    assert raised(alarms(), [{}, *rows, {}]) == {}
    assert raised(alarms(), [*rows, *lines("kl", [1.0], [0.5])]) == {25: ["kl"]}


def test_the_outcome_needs_a_true_score_that_the_validation_may_give() -> None:
    values = [*noisy(0.3, BEFORE), *noisy(4.0, 4)]
    rows = lines("outcome", values, [0.5] * 24)
    blind = [{k: v for k, v in row.items() if k != TRUE_SCORE_METRIC} for row in rows]
    assert raised(alarms(), blind) == {}
    assert raised(alarms(), [row | {TRUE_SCORE_METRIC: 0.0} for row in blind]) == {}
    validated = [row | {"val-core/math500/acc/mean@1": 0.4} for row in blind]
    assert raised(alarms(), validated) == {23: ["outcome"], 24: ["outcome"]}


def test_no_later_step_changes_what_an_earlier_one_raised() -> None:
    values = [*noisy(0.01, 30), *noisy(0.3, 10, 3), *noisy(0.01, 30, 4), *noisy(2.0, 9, 5)]
    rows = lines("kl", values, [*noisy(0.5, len(values), 1)])
    expected = raised(alarms(), rows)
    for length in (25, 33, 41, 74):
        part = raised(alarms(), rows[:length])
        assert part == {step: names for step, names in expected.items() if step <= length}


def test_a_new_alarm_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    values = [*noisy(0.01, BEFORE), *noisy(1.0, 6)]
    raised(alarms(), lines("kl", values, [0.5] * 26))
    (warning,) = caplog.messages
    assert warning.startswith("step 23: alarm kl: the KL to the reference jumps")
    assert "no checkpoint from before it was saved" in warning


@pytest.mark.parametrize("cut", [5, 21, 23, 24])
def test_the_state_in_a_checkpoint_is_all_that_a_resumed_run_needs(
    cut: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "global_step_10").mkdir()
    values = [*noisy(0.01, BEFORE), *noisy(1.0, 6)]
    rows = lines("kl", values, [*noisy(0.5, 26, 1)])
    uninterrupted = alarms(tmp_path, action="keep")
    expected = raised(uninterrupted, rows)
    first, second = alarms(tmp_path, action="keep"), alarms(tmp_path, action="keep")
    caplog.clear()
    before = raised(first, rows[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before | raised(second, rows[cut:], cut + 1) == expected
    assert second.state_dict() == uninterrupted.state_dict()
    assert len(caplog.messages) == 1


def test_the_checkpoint_before_the_jump_is_the_newest_that_did_not_generate_it(
    tmp_path: Path,
) -> None:
    for step in (15, 18, 19, 20):
        (tmp_path / f"global_step_{step}").mkdir()
    values = [*noisy(0.01, BEFORE), *noisy(1.0, 3)]
    watch = alarms(tmp_path, action="keep")
    raised(watch, lines("kl", values, [0.5] * 23))
    # Steps 21 to 23 are beyond the limit; the weights of step 20 generated the first of them.
    assert watch.state_dict()["kept"] == [19]
    assert 19 in watch.protected_steps(90)


def test_the_checkpoint_for_a_later_alarm_is_recent_even_if_only_one_is_kept(
    tmp_path: Path,
) -> None:
    watch, run = alarms(tmp_path, action="keep"), RunFolder(tmp_path)
    for step in range(1, 40):
        run.checkpoint(step).mkdir()
        prune(run, 1, watch.protected_steps(step))
        before_alarm = [number for number, _ in run.checkpoints() if number <= step - 3]
        assert step <= 4 or max(before_alarm) >= step - 6
        assert len(run.checkpoints()) <= 3


LOUD = (
    "trainer.alarms.enable=true",
    "trainer.alarms.min_history=1",
    "trainer.alarms.patience=1",
    "trainer.alarms.deviations=0.001",
    "trainer.alarms.long_responses=1.0001",
    "trainer.alarms.repetition=0.0001",
    "trainer.total_training_steps=8",
    "trainer.save_freq=1",
)


def warnings_of(run: Run) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if k.startswith("alarms/")} for line in run.steps]


@pytest.mark.slow
def test_a_run_keeps_the_checkpoint_and_a_resumed_run_raises_the_same_alarms(
    train: Callable[..., Run],
) -> None:
    settings = (*LOUD, "trainer.alarms.action=keep", "trainer.max_actor_ckpt_to_keep=1")
    uninterrupted = train(*settings)
    assert any(line["alarms/raised"] for line in warnings_of(uninterrupted))
    protected = json.loads((uninterrupted.checkpoint(8) / "trainer_state.json").read_text())[
        "alarms"
    ]["kept"]
    assert protected
    assert uninterrupted.checkpoints() == sorted({f"global_step_{n}" for n in (*protected, 7, 8)})
    train(*settings, "trainer.total_training_steps=4", folder="parts")
    assert warnings_of(train(*settings, folder="parts")) == warnings_of(uninterrupted)


def test_a_run_stops_after_its_step_is_written(train: Callable[..., Run], tmp_path: Path) -> None:
    with pytest.raises(AlarmsRaised, match=r"alarm (long_responses|repetition): .*global_step_\d"):
        train(*LOUD, "trainer.alarms.action=stop", "trainer.save_freq=1")
    interrupted = warnings_of(Run(tmp_path / "run"))
    assert [bool(line["alarms/raised"]) for line in interrupted] == [False] * (
        len(interrupted) - 1
    ) + [True]


def test_a_run_without_a_reward_model_has_no_alarms(train: Callable[..., Run]) -> None:
    assert warnings_of(train()) == [{}, {}]


def test_keeping_needs_checkpoints() -> None:
    with pytest.raises(ConfigError, match=r"action=keep .* use trainer.save_freq=20"):
        load_config(["trainer.alarms.enable=true", "trainer.alarms.action=keep"])


RECORDED = json.loads(benchmark.RESULTS.read_text()) if benchmark.RESULTS.exists() else {"runs": []}


@pytest.mark.parametrize(
    "run", RECORDED["runs"], ids=lambda run: f"{run['task']}-{run['estimator']}-{run['seed']}"
)
def test_the_default_thresholds_judge_the_recorded_runs_as_they_did(run: dict[str, Any]) -> None:
    series = run["series"]
    rows = [dict(zip(series, values, strict=True)) for values in zip(*series.values(), strict=True)]
    first: dict[str, int] = {}
    for step, names in raised(alarms(), rows).items():
        for name in names:
            first.setdefault(name, step)
    assert first == run["alarms"]
    if run["reward_model"] == "word":
        assert min(first.values()) < run["fell_by_a_quarter_at"]
    else:
        assert not first


def copying(draw: random.Random) -> tuple[str, str, str]:
    """A digit is copied; one answer in six has a word behind it."""
    digit = str(draw.randrange(10))
    word = alarm_tasks.SEPARATOR + alarm_tasks.WORD
    return f"{digit}=", digit, digit + (word if draw.random() < 0.16 else "")


def save_judge_of_a_word(folder: Path) -> None:
    """A process reward model that calls a step good when enough of what it reads is the word.

    Its attention head averages over all tokens: the word has the first axis, every other token the second.
    """
    from transformers import AutoConfig, AutoModelForTokenClassification

    tokenizer = alarm_tasks.tokenizer()
    config = AutoConfig.for_model(
        "qwen2", vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, intermediate_size=8, num_labels=2, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForTokenClassification.from_config(config)
    for name, weight in model.named_parameters():
        weight.data.fill_(1.0 if "norm" in name else 0.0)
    attention = model.model.layers[0].self_attn
    for projection in (attention.v_proj, attention.o_proj):
        projection.weight.data.copy_(torch.eye(8))
    table = model.model.embed_tokens.weight.data
    table[:, 1] = 1.0
    table[tokenizer.convert_tokens_to_ids(alarm_tasks.WORD)] = torch.eye(8)[0]
    model.score.weight.data[1, :2] = torch.tensor([10.0, -0.1])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
def test_a_run_that_is_paid_for_a_word_is_flagged_before_its_true_score_falls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = alarm_tasks.Task(copying, "last_number", 24, characters=alarm_tasks.CHARACTERS)
    monkeypatch.setitem(alarm_tasks.TASKS, "copying", task)
    monkeypatch.setattr(alarm_tasks, "SFT_STEPS", 100)
    monkeypatch.setattr(benchmark, "STEPS", 30)
    save_judge_of_a_word(tmp_path / "prm-word")
    lr = "actor_rollout_ref.actor.optim.lr=2e-4"
    settings = (*benchmark.ONLY_THE_MODEL, *benchmark.KL_LOSS, lr)
    case = benchmark.Case("copying", "rloo", 3, settings, judge="word")
    result = benchmark.run_case(case, tmp_path)
    assert result["true_score"]["first"] > 0.8
    outcome = result["series"]["instant_rewards/outcome_reward/mean"]
    assert outcome[-1] > outcome[0] + 0.5
    assert result["alarms"]
    fell = result["fell_by_a_quarter_at"]
    assert fell is None or min(result["alarms"].values()) < fell
