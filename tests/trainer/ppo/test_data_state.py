"""What data sets and samplers learn on the way is part of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from ..runs import Run, Task

FOUR = ("trainer.save_freq=1", "trainer.total_training_steps=4")
TWO = ("trainer.save_freq=1", "trainer.total_training_steps=2")

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
    uninterrupted = train(*grow, "trainer.total_training_steps=13", folder="whole")
    added = [
        row["prompt_text"]
        for step in range(7, 14)
        for row in uninterrupted.rollouts(step)
        if not row["prompt_text"].count("+")
    ]
    assert added  # from the second epoch on
    train(*grow, "trainer.total_training_steps=10")
    parts = train(*grow, "trainer.total_training_steps=13")
    assert parts.numbers == uninterrupted.numbers
    assert parts.rollouts(13) == uninterrupted.rollouts(13)


def test_another_batch_size_goes_on_with_the_very_next_row(train: Callable[..., Run]) -> None:
    def uids(run: Run, *steps: int) -> list[str]:
        return sorted({row["uid"] for step in steps for row in run.rollouts(step)})

    uninterrupted = train(*FOUR, folder="whole")
    train(*TWO)
    run = train(
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=3",
    )
    assert uids(run, 3) == uids(uninterrupted, 3, 4)


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
    uninterrupted = train(*sampler, "trainer.total_training_steps=5", folder="whole")
    orders = [
        [r["uid"] for s in range(1, 6) for r in run.rollouts(s)] for run in (plain, uninterrupted)
    ]
    assert orders[0] != orders[1]
    train(*sampler, "trainer.total_training_steps=4")
    assert train(*sampler, "trainer.total_training_steps=5").numbers == uninterrupted.numbers


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
