"""Checkpoints: resumed runs go on as if nothing had happened; damage and full disks are survived."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hone.trainer.ppo import checkpoint
from hone.trainer.ppo.checkpoint import CheckpointError

from ..runs import Run, Task, opened

FOUR = ("trainer.save_freq=1", "trainer.total_training_steps=4")
TWO = ("trainer.save_freq=1", "trainer.total_training_steps=2")
FIXED_SCHEDULE = "actor_rollout_ref.actor.optim.total_training_steps=4"
# What a run to be continued must share with the whole one: nothing but its length differs.


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.adv_estimator=gae"],
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive",
         "algorithm.kl_ctrl.horizon=20", "algorithm.kl_ctrl.target_kl=0.001"],
        ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_epochs=2",
         "actor_rollout_ref.actor.shuffle=true"],
        ["actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", FIXED_SCHEDULE],
        ["actor_rollout_ref.model.lora_rank=4"],
        ["actor_rollout_ref.actor.fsdp_config.dtype=bf16"],
        ["algorithm.use_pf_ppo=true"],
    ],
    ids=["grpo", "critic", "adaptive-kl", "epochs", "cosine", "lora", "bf16", "pf-ppo"],
)  # fmt: skip
def test_a_resumed_run_has_the_metrics_of_an_uninterrupted_one(
    train: Callable[..., Run], overrides: list[str]
) -> None:
    whole = train(*FOUR, *overrides, folder="whole")
    train(*TWO, *overrides, folder="parts")
    parts = train(*FOUR, *overrides, folder="parts")
    assert [line["step"] for line in parts.metrics] == [1, 2, 3, 4]
    assert parts.numbers == whole.numbers


def test_the_adaptive_kl_weight_moves_and_is_kept(train: Callable[..., Run]) -> None:
    run = train(
        *FOUR,
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=20",
    )
    weights = run.series("actor/reward_kl_penalty_coeff")
    assert len(set(weights)) == 4
    state = checkpoint.read_state(run.checkpoint(3))
    assert state["kl_controller"]["value"] == weights[3]


def test_what_lies_in_a_checkpoint(train: Callable[..., Run]) -> None:
    run = train(*TWO, "algorithm.adv_estimator=gae")
    assert run.checkpoints() == ["global_step_1", "global_step_2"]
    names = {p.name for p in run.checkpoint(2).iterdir()}
    assert names == {"actor", "critic", "trainer_state.json", "manifest.json"}
    assert (run.checkpoint(2) / "actor" / "huggingface" / "model.safetensors").is_file()
    assert (run.folder / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_the_last_step_is_saved_whatever_the_frequency(train: Callable[..., Run]) -> None:
    assert train("trainer.save_freq=-1").checkpoints() == ["global_step_2"]
    assert train(
        "trainer.save_freq=3", "trainer.total_training_steps=4", folder="b"
    ).checkpoints() == [
        "global_step_3",
        "global_step_4",
    ]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def delete(file: Path) -> None:
    file.unlink()


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


@pytest.mark.parametrize("harm", [truncate, delete, flip])
@pytest.mark.parametrize(
    "which", ["trainer_state.json", "actor/huggingface/model.safetensors", "manifest.json"]
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    train: Callable[..., Run], caplog: pytest.LogCaptureFixture, harm: Any, which: str
) -> None:
    whole = train(*FOUR, folder="whole")
    train(*TWO)
    harm(Run(whole.folder.parent / "run").checkpoint(2) / which)
    with caplog.at_level(logging.WARNING):
        run = train(*FOUR)
    assert any("global_step_2 is damaged" in r.getMessage() for r in caplog.records)
    assert run.numbers == whole.numbers
    assert checkpoint.damage(run.checkpoint(2)) is None  # written again


def test_without_any_sound_checkpoint_the_run_starts_again(train: Callable[..., Run]) -> None:
    first = train(*TWO)
    before = first.numbers
    for step in (1, 2):
        delete(first.checkpoint(step) / "trainer_state.json")
    assert train(*TWO).numbers == before


def test_old_checkpoints_go_also_after_resuming(train: Callable[..., Run]) -> None:
    keep = "trainer.max_actor_ckpt_to_keep=2"
    assert train(*TWO, keep).checkpoints() == ["global_step_1", "global_step_2"]
    assert train(*FOUR, keep).checkpoints() == ["global_step_3", "global_step_4"]
    assert train(*FOUR, keep, "trainer.max_critic_ckpt_to_keep=1", folder="b").checkpoints() == [
        "global_step_4"
    ]


def test_a_damaged_checkpoint_takes_no_place_among_the_kept(train: Callable[..., Run]) -> None:
    run = train(*FOUR)
    for step in (3, 4):
        truncate(run.checkpoint(step) / "trainer_state.json")
    train(
        "trainer.save_freq=-1", "trainer.total_training_steps=3", "trainer.max_actor_ckpt_to_keep=1"
    )
    assert [n for n in run.checkpoints() if not n.endswith(".earlier")] == ["global_step_3"]
    assert checkpoint.damage(run.checkpoint(3)) is None


def test_disable_starts_anew_and_forgets_the_run_before(
    train: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    first = train(*FOUR).numbers
    with caplog.at_level(logging.WARNING):
        run = train(*TWO, "trainer.resume_mode=disable")
    assert [line["step"] for line in run.metrics] == [1, 2]
    assert run.numbers == first[:2]
    # The earlier run's later checkpoints are not mistaken for this one's.
    assert train(*FOUR).numbers == first
    assert "global_step_4.earlier" in run.checkpoints()
    assert any("kept as global_step_4.earlier" in r.getMessage() for r in caplog.records)


def test_a_path_names_the_checkpoint_to_continue(train: Callable[..., Run]) -> None:
    whole = train(*FOUR, folder="whole")
    source = whole.checkpoint(2)
    run = train(*FOUR, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={source}")
    assert run.numbers == whole.numbers[2:]


def test_a_path_to_nothing_is_told(train: Callable[..., Run], tmp_path: Path) -> None:
    for path, sentence in (("nowhere", "must name a folder global_step_N"),
                           ("global_step_9", "cannot be resumed")):  # fmt: skip
        with pytest.raises(CheckpointError, match=sentence):
            train(
                "trainer.resume_mode=resume_path",
                f"trainer.resume_from_path={tmp_path / path}",
            )


def test_half_a_checkpoint_of_a_killed_process_is_cleared(train: Callable[..., Run]) -> None:
    run = train(*TWO)
    leftover = run.folder / ".global_step_3.tmp"
    (leftover / "actor").mkdir(parents=True)
    train("trainer.total_training_steps=2")
    assert not leftover.exists()


@pytest.mark.parametrize("where", ["state", "model"])
def test_a_full_disk_is_told_and_the_last_checkpoint_stays(
    train: Callable[..., Run], task: Task, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    whole = train(*FOUR, folder="whole")
    full = OSError(errno.ENOSPC, "No space left on device")
    real = checkpoint.write_state

    def no_room(folder: Path, state: dict[str, Any]) -> None:
        if state["step"] == 3:
            raise full
        real(folder, state)

    if where == "state":
        monkeypatch.setattr(checkpoint, "write_state", no_room)
    else:
        from torch.distributed.checkpoint import filesystem

        write = filesystem._write_item

        def no_room_for_3(*arguments: Any, **keywords: Any) -> Any:
            if "global_step_3" in str(arguments[0]) or "global_step_3" in str(
                getattr(arguments[1], "name", "")
            ):
                raise full
            return write(*arguments, **keywords)

        monkeypatch.setattr(filesystem, "_write_item", no_room_for_3)
    with pytest.raises(CheckpointError) as caught:
        train(*FOUR)
    said = str(caught.value)
    assert "the disk is full: step 3" in said
    assert "global_step_2 is untouched" in said
    assert "Free space" in said
    run = Run(whole.folder.parent / "run")
    assert run.checkpoints() == ["global_step_1", "global_step_2"]
    assert not list(run.folder.glob(".global_step_*"))
    monkeypatch.undo()
    assert train(*FOUR).numbers == whole.numbers


def weights_in_training(trainer: Any) -> dict[str, torch.Tensor]:
    worker = trainer.actor._crew.host.worker("actor_rollout")
    return {name: tensor.clone() for name, tensor in worker.engine.named_hf_weights()}


@pytest.mark.parametrize("level", ["checkpoint", "run"])
def test_a_run_may_start_from_another_run(
    train: Callable[..., Run], task: Task, tmp_path: Path, level: str
) -> None:
    first = train(*TWO)
    path = first.checkpoint(2) if level == "checkpoint" else first.folder
    with opened(task.overrides(tmp_path / "b", f"actor_rollout_ref.model.path={path}")) as trainer:
        started = weights_in_training(trainer)
    exported = load_file(first.checkpoint(2) / "actor" / "huggingface" / "model.safetensors")
    assert all(torch.equal(started[name], exported[name]) for name in exported)
    with opened(task.overrides(tmp_path / "c")) as trainer:
        untrained = weights_in_training(trainer)
    assert not all(torch.equal(untrained[name], exported[name]) for name in exported)


def test_the_export_opens_with_transformers_and_is_the_trained_policy(
    train: Callable[..., Run], task: Task
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = train(*TWO)
    folder = run.checkpoint(2) / "actor" / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with opened(task.overrides(run.folder)) as trainer:
        trainer.resume()
        assert trainer.global_step == 2
        batch = trainer.generate(trainer.loader.next_batch())
    row = batch.batch["attention_mask"][0].bool()
    ids = batch.batch["input_ids"][0][row]
    length = int(batch.batch["response_mask"][0].sum())
    log_p = torch.log_softmax(model(ids[None]).logits[0], -1)[-length - 1 : -1]
    expected = log_p.gather(-1, ids[-length:, None]).squeeze(-1)
    found = batch.batch["rollout_log_probs"][0, :length]
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-4)
    assert tokenizer.decode(tokenizer.encode("1+2=", add_special_tokens=False)) == "1+2="


LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.use_kl_loss=true")


def test_lora_trains_adapters_over_a_frozen_base(train: Callable[..., Run], task: Task) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = train(*TWO, *LORA)
    assert run.series("actor/kl_loss")[0] == pytest.approx(0, abs=1e-7)  # adapters start at zero
    assert run.series("actor/kl_loss")[1] > 0  # the reference is the base, adapters off
    folder = run.checkpoint(2) / "actor"
    base = AutoModelForCausalLM.from_pretrained(task.model)
    adapted = PeftModel.from_pretrained(base, folder / "lora_adapter").merge_and_unload()
    merged = load_file(folder / "huggingface" / "model.safetensors")
    changed = 0
    for name, tensor in adapted.state_dict().items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-6)
    original = load_file(task.model / "model.safetensors")
    changed = [name for name in original if not torch.equal(original[name], merged[name])]
    assert changed
    assert all("proj" in name for name in changed)


def test_new_adapters_follow_from_the_seed(train: Callable[..., Run]) -> None:
    first = train(*LORA, folder="a")
    torch.manual_seed(999)  # whatever the process drew before
    assert train(*LORA, folder="b").numbers == first.numbers


def test_an_adapter_may_be_continued(train: Callable[..., Run], tmp_path: Path) -> None:
    first = train(*TWO, *LORA)
    adapter = first.checkpoint(2) / "actor" / "lora_adapter"
    run = train(*LORA, f"actor_rollout_ref.model.lora_adapter_path={adapter}", folder="b")
    assert run.series("actor/kl_loss")[0] > 0  # it starts away from the base


GROWING = """
from hone.data import RLHFDataset

class Growing(RLHFDataset):
    def on_batch_end(self, batch):
        return [{"data_source": "lexical", "prompt": f"{len(self)}=", "extra_info": {"index": len(self)},
                 "reward_model": {"style": "rule", "ground_truth": "0"}}]
"""


def test_rows_that_batches_added_are_used_and_survive_a_restart(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    (tmp_path / "growing.py").write_text(GROWING)
    grow = (
        f"data.custom_cls.path={tmp_path / 'growing.py'}",
        "data.custom_cls.name=Growing",
        "trainer.save_freq=5",
    )
    whole = train(*grow, "trainer.total_training_steps=13", folder="whole")
    added = [
        row["prompt_text"]
        for step in range(7, 14)
        for row in whole.rollouts(step)
        if not row["prompt_text"].count("+")
    ]
    assert added  # from the second epoch on
    train(*grow, "trainer.total_training_steps=10")
    parts = train(*grow, "trainer.total_training_steps=13")
    assert parts.numbers == whole.numbers
    assert parts.rollouts(13) == whole.rollouts(13)


CURRICULUM = """
class HardestFirst:
    '''Rows by how badly they went so far; ties in order.'''
    def __init__(self, data_source, data_config):
        self.rows, self.scores, self.seen = len(data_source), {}, 0

    def __len__(self):
        return self.rows

    def __iter__(self):
        while True:
            if self.seen == self.rows:
                self.seen = 0
                return
            order = sorted(range(self.rows), key=lambda i: (self.scores.get(i, 0.5), i))
            self.seen += 1
            yield order[self.seen - 1]

    def update(self, batch):
        totals = batch.batch["token_level_scores"].sum(-1).tolist()
        for index, score in zip(batch.non_tensor_batch["dataset_index"], totals):
            self.scores[int(index)] = score

    def state_dict(self):
        return {"scores": list(self.scores.items()), "seen": self.seen}

    def load_state_dict(self, state):
        self.scores, self.seen = {int(i): s for i, s in state["scores"]}, state["seen"]
"""


def test_a_curriculum_learns_from_batches_and_survives_a_restart(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    (tmp_path / "curriculum.py").write_text(CURRICULUM)
    sampler = (
        f"data.sampler.class_path={tmp_path / 'curriculum.py'}",
        "data.sampler.class_name=HardestFirst",
        "trainer.save_freq=2",
    )
    plain = train("trainer.total_training_steps=5", "data.shuffle=false", folder="plain")
    whole = train(*sampler, "trainer.total_training_steps=5", folder="whole")
    orders = [[r["uid"] for s in range(1, 6) for r in run.rollouts(s)] for run in (plain, whole)]
    assert orders[0] != orders[1]
    train(*sampler, "trainer.total_training_steps=4")
    assert train(*sampler, "trainer.total_training_steps=5").numbers == whole.numbers


def test_data_sets_are_mixed_by_their_weights(
    train: Callable[..., Run], task: Task, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in task.train.read_text().splitlines()]
    other = [row | {"data_source": "other"} for row in rows]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    mixed = (
        f"data.train_files=[{task.train},{tmp_path / 'other.jsonl'}]",
        "data.dataset_weights=[0.75,0.25]",
    )
    run = train(*FOUR, *mixed)
    sources = [row["data_source"] for step in range(1, 5) for row in run.rollouts(step)][::2]
    assert sources.count("other") == 4  # of 16 prompts
    train(*TWO, *mixed, folder="parts")
    assert train(*FOUR, *mixed, folder="parts").numbers == run.numbers
