"""Validation: every held-out row, what n attempts are worth, when it runs and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hone.data.rows import DataError
from hone.trainer.ppo.validation import process_validation_metrics, validation_metrics

from ..runs import Run, Task, scored_text

SAMPLED = (
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    "actor_rollout_ref.rollout.val_kwargs.n=4",
)


def validated_steps(run: Run) -> list[int]:
    return [line["step"] for line in run.metrics if any(k.startswith("val-core/") for k in line)]


def test_it_runs_before_after_and_every_test_freq_steps(
    train: Callable[..., Run], task: Task
) -> None:
    run = train(task.validated(), "trainer.test_freq=2", "trainer.total_training_steps=5")
    assert validated_steps(run) == [0, 2, 4, 5]


def test_it_may_be_left_out_before_training(train: Callable[..., Run], task: Task) -> None:
    run = train(task.validated(), "trainer.val_before_train=false")
    assert validated_steps(run) == [2]


def test_it_may_be_all_there_is(train: Callable[..., Run], task: Task) -> None:
    run = train(task.validated(), "trainer.val_only=true")
    assert validated_steps(run) == [0]
    assert run.steps == []


@pytest.mark.parametrize("none", ["[]", "null"])
def test_without_files_there_is_none(train: Callable[..., Run], none: str) -> None:
    run = train(f"data.val_files={none}", "trainer.total_training_steps=1")
    assert validated_steps(run) == []
    assert [line["step"] for line in run.metrics] == [1]


def test_a_missing_file_says_how_to_train_without(train: Callable[..., Run]) -> None:
    with pytest.raises(DataError, match=r"data\.val_files=\[\] trains without validation"):
        train("data.val_files=nowhere.parquet")
    with pytest.raises(DataError) as caught:
        train("data.train_files=nowhere.parquet")
    assert "without validation" not in str(caught.value)


def test_val_only_judges_the_checkpoint_it_resumes(train: Callable[..., Run], task: Task) -> None:
    train("trainer.save_freq=1")
    run = train(task.validated(), "trainer.val_only=true")
    assert validated_steps(run) == [2]


def test_greedy_by_default_and_equal_twice(train: Callable[..., Run], task: Task) -> None:
    first = train(task.validated(), "trainer.val_only=true", folder="a")
    second = train(task.validated(), "trainer.val_only=true", "trainer.seed=9", folder="b")
    assert first.numbers == second.numbers


def test_the_last_partial_batch_counts(train: Callable[..., Run], task: Task) -> None:
    uninterrupted = train(task.validated(), "trainer.val_only=true", folder="a")
    parts = train(task.validated(), "trainer.val_only=true", "data.val_batch_size=4", folder="b")
    assert uninterrupted.numbers == parts.numbers
    rows = pq.read_table(parts.folder / "validation" / "step_0.parquet").to_pylist()
    assert len({row["uid"] for row in rows}) == 6


def test_samples_go_where_the_user_wants_them(
    train: Callable[..., Run], task: Task, tmp_path: Path
) -> None:
    folder = tmp_path / "answers"
    train(task.validated(), *SAMPLED, f"trainer.validation_data_dir={folder}")
    assert sorted(p.name for p in folder.iterdir()) == ["step_0.parquet", "step_2.parquet"]
    rows = pq.read_table(folder / "step_0.parquet").to_pylist()
    assert len(rows) == 24
    assert {row["data_source"] for row in rows} == {"lexical"}


def test_n_attempts_are_reported_by_mean_best_worst_and_majority(
    train: Callable[..., Run], task: Task
) -> None:
    run = train(
        task.validated(), *SAMPLED, "trainer.val_only=true", "custom_reward_function.name=detailed"
    )
    (line,) = run.metrics
    rows = pq.read_table(run.folder / "validation" / "step_0.parquet").to_pylist()
    groups: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        groups.setdefault(row["uid"], []).append((row["acc"], row["pred"]))
    expected_mean, expected_best2, expected_majority = [], [], []
    for attempts in groups.values():
        values = [acc for acc, _ in attempts]
        expected_mean.append(sum(values) / 4)
        pairs = list(combinations(values, 2))
        expected_best2.append(sum(map(max, pairs)) / len(pairs))
        votes = [pred for _, pred in attempts if pred.strip()]  # an empty answer casts none
        most = max(map(votes.count, votes), default=0)
        wins = [acc for acc, pred in attempts if votes.count(pred) == most]  # ties are shared
        expected_majority.append(sum(wins) / len(wins))
    core = "val-core/lexical/acc"
    assert line[f"{core}/mean@4"] == pytest.approx(sum(expected_mean) / 6)
    assert line["val-aux/lexical/acc/best@2/mean"] == pytest.approx(sum(expected_best2) / 6)
    assert line[f"{core}/maj@4/mean"] == pytest.approx(sum(expected_majority) / 6)
    assert line[f"{core}/best@4/mean"] == pytest.approx(
        sum(max(a for a, _ in g) for g in groups.values()) / 6
    )
    assert "val-aux/lexical/format/mean@4" in line
    assert "val-aux/lexical/reward/mean@4" in line
    assert [line[f"val-aux/num_turns/{kind}"] for kind in ("mean", "max", "min")] == [2, 2, 2]


def test_a_response_without_an_answer_casts_no_vote() -> None:
    metrics = validation_metrics(
        ["s"] * 4, ["a"] * 4,
        {"acc": [1.0, 0.0, 0.0, 0.0], "pred": ["7", "[INVALID]", None, ""], "reward": [0.0] * 4},
    )  # fmt: skip
    assert metrics["val-core/s/acc/maj@4/mean"] == 1.0


def test_names_are_verls_core_is_mean_best_and_majority_of_all_attempts() -> None:
    scores = [1.0, 0.0, 0.0, 1.0]
    metrics = validation_metrics(
        ["s"] * 4, ["a"] * 4, {"acc": scores, "reward": scores, "pred": list("7887")}
    )
    core = {"mean@4", "best@4/mean", "best@4/std", "maj@4/mean", "maj@4/std"}
    aux = {"std@4", "worst@4/mean", "worst@4/std"}
    aux |= {f"{kind}@2/{value}" for kind in ("best", "worst", "maj") for value in ("mean", "std")}
    names = {f"val-core/s/acc/{name}" for name in core} | {f"val-aux/s/acc/{name}" for name in aux}
    names |= {f"val-aux/s/reward/{name}" for name in core | aux}
    assert set(metrics) == names
    assert metrics["val-aux/s/acc/std@4"] == 0.5
    # of the six pairs one holds two wrong answers: the best is 0 once and 1 five times
    assert metrics["val-aux/s/acc/best@2/mean"] == pytest.approx(5 / 6)
    assert metrics["val-aux/s/acc/best@2/std"] == pytest.approx((5 / 36) ** 0.5)
    assert metrics["val-aux/s/acc/worst@2/std"] == pytest.approx((5 / 36) ** 0.5)
    # four pairs tie at 0.5, one is right, one is wrong
    assert metrics["val-aux/s/acc/maj@2/std"] == pytest.approx((0.5 / 6) ** 0.5)
    assert metrics["val-core/s/acc/best@4/std"] == 0.0


def test_a_value_some_rows_lack_does_not_shift_the_others() -> None:
    metrics = validation_metrics(
        ["s"] * 4,
        ["a", "a", "b", "b"],
        {"reward": [1.0, 0.0, 1.0, 1.0], "format": [None, 1.0, 0.0, 0.0]},
    )
    assert metrics["val-core/s/reward/mean@2"] == 0.75
    assert metrics["val-aux/s/format/mean@2"] == 0.5  # 1 and 0: a prompt each
    assert metrics["val-aux/s/format/best@2/mean"] == 0.0  # only prompt b has both


def test_sources_are_reported_apart() -> None:
    metrics = validation_metrics(["x", "y"], ["a", "b"], {"reward": [1.0, 0.0]})
    assert metrics == {"val-core/x/reward/mean@1": 1.0, "val-core/y/reward/mean@1": 0.0}


def test_stop_strings_end_a_turn_in_validation_too(train: Callable[..., Run], task: Task) -> None:
    run = train(
        task.validated(),
        *SAMPLED,
        "trainer.val_only=true",
        "actor_rollout_ref.rollout.stop=['a','b','c','d','e','f','0','1','2','3']",
        "data.max_response_length=16",
    )
    rows = pq.read_table(run.folder / "validation" / "step_0.parquet").to_pylist()
    assert any(scored_text(row)[-1:] in tuple("abcdef0123") for row in rows)
    assert not any(c in scored_text(row)[:-1] for row in rows for c in "abcdef0123")


def test_missing_attempts_count_as_wrong_where_they_were_expected() -> None:
    result = process_validation_metrics(
        ["a", "a", "b"],
        ["p", "p", "p"],
        {"acc": [1.0, 1.0, None], "reward": [0.4, 0.6, 0.5], "pred": ["x", "x", "y"]},
        expected_acc_counts={("a", "p"): 4, ("a", "q"): 4, ("b", "p"): 2},
    )
    assert result["a"]["acc"]["mean@4"] == 0.25
    assert result["a"]["acc_success_only"]["mean@2"] == 1.0
    assert result["a"]["reward"]["mean@2"] == 0.5
    assert "acc" not in result["b"]
    assert result["b"]["reward"] == {"mean@1": 0.5}
