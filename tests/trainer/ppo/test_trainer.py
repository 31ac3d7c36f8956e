"""The loop as a whole: what a step writes, that a seed fixes everything, and how long it lasts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.rewards.scores.table import UnknownSourceError
from hone.trainer.ppo.memory import OutOfMemory
from hone.verl.dialect import load_config

from ..runs import Run, Task, opened, task_row

GENERATED = {
    "uid",
    "trajectory_id",
    "sample_index",
    "seed",
    "data_source",
    "prompts",
    "responses",
    "response_mask",
    "attention_mask",
    "rollout_log_probs",
    "versions",
    "num_turns",
    "stop_reason",
}
SCORED = {"reward/rule", "token_level_scores"}
CREDITED = {"token_level_rewards", "advantages", "returns"}


def columns_of(task: Task, folder: Path, *overrides: str) -> set[str]:
    with opened(task.overrides(folder, *overrides)) as trainer:
        batch, _ = trainer.step()
    return set(batch.column_names())


def test_a_step_writes_the_columns_of_its_verbs_and_no_others(task: Task, tmp_path: Path) -> None:
    columns = columns_of(task, tmp_path)
    assert columns >= GENERATED | SCORED | CREDITED
    estimated = {"old_log_probs", "ref_log_prob", "values", "entropys", "reward_baselines"}
    assert not columns & estimated  # one update a batch, no KL, no critic: nobody reads them


def test_the_models_say_what_the_algorithm_reads(task: Task, tmp_path: Path) -> None:
    columns = columns_of(
        task,
        tmp_path,
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.rollout.n=1",
    )
    assert columns >= {"old_log_probs", "entropys", "ref_log_prob", "values"}


def test_masks_and_scores_lie_where_the_columns_say(task: Task, tmp_path: Path) -> None:
    with opened(task.overrides(tmp_path)) as trainer:
        batch, metrics = trainer.step()
    mask, scores = batch.batch["response_mask"].bool(), batch.batch["token_level_scores"]
    last = mask.long().cumsum(1).argmax(1)
    elsewhere = torch.ones_like(mask)
    elsewhere[torch.arange(len(batch)), last] = False
    assert not scores[elsewhere].any()
    assert scores.sum(-1).unique().numel() > 1
    assert not batch.batch["advantages"][~mask].any()
    assert metrics["critic/score/mean"] == pytest.approx(scores.sum(-1).mean().item())
    assert list(batch.non_tensor_batch["sample_index"]) == [0, 1] * 4
    groups = batch.non_tensor_batch["uid"].reshape(4, 2)
    assert (groups[:, 0] == groups[:, 1]).all()
    assert len(set(groups[:, 0])) == 4


def test_the_same_seed_gives_the_same_metrics(train: Callable[..., Run]) -> None:
    first, second = train(folder="a"), train(folder="b")
    assert len(first.steps) == 2
    assert first.numbers == second.numbers


def test_full_determinism_trains_and_changes_nothing_on_a_cpu(train: Callable[..., Run]) -> None:
    key = "actor_rollout_ref.actor.fsdp_config.full_determinism=true"
    try:
        assert train(key, folder="asked").numbers == train(folder="plain").numbers
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_another_seed_gives_other_metrics(train: Callable[..., Run]) -> None:
    first, second = train(folder="a"), train("trainer.seed=2", folder="b")
    assert first.numbers != second.numbers


def test_the_seed_of_the_rollout_alone_changes_the_responses(train: Callable[..., Run]) -> None:
    first, second = train(folder="a"), train("actor_rollout_ref.rollout.seed=2", folder="b")
    assert [r["uid"] for r in first.rollouts(1)] == [r["uid"] for r in second.rollouts(1)]
    assert first.rollouts(1) != second.rollouts(1)


def test_the_reward_rises(train: Callable[..., Run]) -> None:
    run = train("trainer.total_training_steps=12", "actor_rollout_ref.rollout.n=8")
    rewards = run.series("reward/mean")
    assert sum(rewards[-3:]) / 3 > 2 * sum(rewards[:3]) / 3


def test_a_run_without_a_length_takes_every_batch_of_every_epoch(train: Callable[..., Run]) -> None:
    run = train("trainer.total_training_steps=null", "trainer.total_epochs=2")
    assert [line["step"] for line in run.steps] == list(range(1, 13))  # 24 rows / 4 × 2 epochs
    seen = [row["uid"] for step in range(1, 13) for row in run.rollouts(step)][::2]
    assert len(set(seen)) == 48
    assert run.series("training/epoch") == [0] * 6 + [1] * 6


def test_the_family_finds_its_metric_names(train: Callable[..., Run]) -> None:
    line = train("custom_reward_function.name=detailed").steps[-1]
    for name in (
        "actor/pg_loss",
        "actor/grad_norm",
        "actor/lr",
        "actor/entropy",
        "critic/score/mean",
        "critic/rewards/max",
        "critic/advantages/min",
        "response_length/mean",
        "response_length/clip_ratio",
        "prompt_length/mean",
        "rollout_corr/kl",
        "reward/mean",
        "accuracy",
        "num_turns/mean",
        "timing_s/gen",
        "timing_s/step",
        "perf/total_num_tokens",
        "perf/throughput",
    ):
        assert name in line, name
    assert 0 <= line["accuracy"] <= 1


def test_every_second_stands_in_the_line_of_its_own_step(
    train: Callable[..., Run], task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    from itertools import count
    from types import SimpleNamespace

    from hone.trainer.ppo import trainer

    ticks = count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(trainer, "time", clock)
    lines = train(task.validated(), "trainer.test_freq=2", "trainer.save_freq=2").metrics
    assert [line["step"] for line in lines] == [0, 1, 2]
    # A timer that runs alone takes one tick of this clock; each step scores once.
    validated, first, second = lines
    assert validated["timing_s/testing"] == 1
    assert "timing_s/reward" not in validated
    assert "timing_s/testing" not in first
    assert "timing_s/save_checkpoint" not in first
    assert first["timing_s/reward"] == second["timing_s/reward"] == 1
    assert second["timing_s/testing"] == second["timing_s/save_checkpoint"] == 1


def test_a_kill_between_a_step_s_line_and_its_checkpoint_leaves_neither(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.trainer.ppo import trainer

    class Killed(BaseException):
        pass

    class Dying(trainer.Tracking):
        def log(self, metrics: Any, step: int) -> None:
            super().log(metrics, step)
            if step == 3:
                raise Killed

    saved = ("trainer.save_freq=1", "trainer.total_training_steps=4")
    uninterrupted = train(*saved, folder="whole")
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "Tracking", Dying)
        with pytest.raises(Killed):
            train(*saved, folder="killed")
    resumed = train(*saved, folder="killed")
    assert [line["step"] for line in resumed.metrics] == [1, 2, 3, 4]
    assert resumed.numbers == uninterrupted.numbers
    assert all("timing_s/save_checkpoint" in line for line in resumed.metrics)


def test_one_token_has_no_explained_variance() -> None:
    import warnings

    from hone.protocol import DataProto
    from hone.trainer.ppo.credit import data_metrics

    def step_metrics(mask: list[int]) -> dict[str, float]:
        names = ("token_level_scores", "token_level_rewards", "advantages", "returns", "values")
        tensors = {name: torch.tensor([[0.5, 1.0]]) for name in names}
        tensors |= {
            "response_mask": torch.tensor([mask]),
            "prompts": torch.ones(1, 1, dtype=torch.int64),
            "responses": torch.ones(1, 2, dtype=torch.int64),
            "attention_mask": torch.ones(1, 3, dtype=torch.int64),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return data_metrics(DataProto.from_dict(tensors), 4, 4)

    assert "critic/vf_explained_var" not in step_metrics([1, 0])
    assert step_metrics([1, 1])["critic/vf_explained_var"] == pytest.approx(1.0)


@pytest.mark.parametrize("where", ["train", "validation"])
def test_an_unknown_data_source_stops_before_the_first_step(
    task: Task, tmp_path: Path, where: str
) -> None:
    good = task_row(0, 1, data_source="arithmetic")
    rows = [good, good, task_row(0, 1, data_source="openai/gsm8"), good]
    files = {"train": tmp_path / "a.jsonl", "validation": tmp_path / "b.jsonl"}
    for name, file in files.items():
        written = rows if name == where else [good] * 4
        file.write_text("".join(json.dumps(row) + "\n" for row in written))
    overrides = task.overrides(
        tmp_path / "run",
        f"data.train_files={files['train']}",
        f"data.val_files={files['validation']}",
        "custom_reward_function.path=null",
    )
    with pytest.raises(UnknownSourceError) as caught:
        Run(tmp_path / "run").train(overrides)
    message = str(caught.value)
    assert "row 2" in message
    assert "Did you mean 'openai/gsm8k'" in message
    assert "countdown" in message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_gradient_that_is_not_finite_skips_the_update_and_says_so(
    train: Callable[..., Run], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.workers import actor

    def broken(log_prob: torch.Tensor, **_: Any) -> tuple[torch.Tensor, dict[str, float]]:
        return log_prob.sum() * float("nan"), {}

    monkeypatch.setattr(actor.TABLE, "get", lambda name: broken)
    with caplog.at_level(logging.WARNING):
        run = train("actor_rollout_ref.actor.ppo_mini_batch_size=2")
    assert run.series("actor/skipped_updates") == [2.0, 4.0]
    messages = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert len(messages) == 2
    assert "lower optim.lr" in messages[0]
    first, second = ({r["uid"]: r["versions"] for r in run.rollouts(s)} for s in (1, 2))
    assert {v for row in (*first.values(), *second.values()) for v in row} == {0}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError("no room"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_running_out_of_memory_says_what_to_change(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    from hone.engine.engine import Engine

    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Engine, "train_minibatch", full)
    with pytest.raises(OutOfMemory, match=r"in step 1: .*ppo_max_token_len_per_gpu") as caught:
        train()
    assert caught.value.__cause__ is error


def test_running_out_of_memory_in_a_prompt_says_what_to_change(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.rollout.native.core import NativeCore

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(NativeCore, "_hidden_states", full)
    with pytest.raises(OutOfMemory, match=r"in step 1: CUDA out of memory.*rollout\.max_num_seqs"):
        train("trainer.val_before_train=false")


def test_samples_reach_the_trackers(
    train: Callable[..., Run], task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.tracking.metrics_file import JsonlTracker

    bars: list[tuple[str, int, int]] = []
    monkeypatch.setattr(
        JsonlTracker,
        "log_samples",
        lambda self, name, rows, step: bars.append((name, len(rows), step)),
    )
    train(
        task.validated(),
        "trainer.log_val_generations=2",
        "trainer.log_train_generations=3",
        "trainer.total_training_steps=1",
    )
    assert bars == [
        ("val/generations", 2, 0),
        ("train/generations", 3, 1),
        ("val/generations", 2, 1),
    ]


def test_every_long_part_of_a_step_is_shown_while_it_lasts(
    train: Callable[..., Run], task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import contextmanager

    from hone.tracking.console import Bar
    from hone.trainer.ppo import trainer

    lines: list[str] = []

    class ListedBar(Bar):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "note" and value:
                lines.append(value)

    @contextmanager
    def bar(description: str, total: float | None = None, **_: Any) -> Any:
        lines.append(description)
        yield ListedBar(description)

    monkeypatch.setattr(trainer, "progress", bar)
    train(
        task.validated(),
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "trainer.save_freq=1",
    )
    updates = ("update_critic", "update_actor", "update_weights")
    step = ("gen", "reward", "old_log_prob", "ref", "values", *updates)
    assert lines == ["step", *step, "validate", "save_checkpoint"]


def test_the_trainer_is_usable_from_python(task: Task, tmp_path: Path) -> None:
    from hone.controller import LocalWorkerGroup, ResourcePoolManager, Role
    from hone.models.load import load_tokenizer
    from hone.trainer.ppo.trainer import PPOTrainer
    from hone.verl.actor_rollout_ref import ActorRolloutRefWorker

    pools = ResourcePoolManager({"mine": [1]}, {Role.ActorRollout: "mine"})
    trainer = PPOTrainer(
        load_config(task.overrides(tmp_path)),
        load_tokenizer(str(task.model)),
        {Role.ActorRollout: ActorRolloutRefWorker},
        pools,
        LocalWorkerGroup,
    )
    trainer.init_workers()
    trainer.fit()
    trainer.shutdown()
    assert len(Run(tmp_path).steps) == 2
