"""Which rollout files a run keeps, and that they are there when its checkpoint counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from hone.config import ConfigError
from hone.config.trainer import TrainerConfig
from hone.models.tiny import character_tokenizer
from hone.protocol import DataProto
from hone.tracking import RunFolder
from hone.tracking.run_folder import step_files
from hone.trainer.ppo.rollout_writer import RolloutWriter, steps_to_keep

from ..runs import Run

DEFAULT = "trainer.rollout_data_dir=null"


def batch() -> DataProto:
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[5]]),
            "responses": torch.tensor([[6, 7]]),
            "response_mask": torch.ones(1, 2, dtype=torch.long),
            "attention_mask": torch.ones(1, 3, dtype=torch.long),
        }
    )


def writer(folder: Path, tokenizer: Any = None, **settings: Any) -> RolloutWriter:
    trainer = TrainerConfig(**settings)
    return RolloutWriter(RunFolder(folder), trainer, tokenizer or character_tokenizer())


def steps_in(folder: Path) -> list[int]:
    return [step for step, _ in step_files(RunFolder(folder).rollouts)]


@pytest.mark.parametrize(
    ("step", "save_freq", "steps"),
    [
        (2, -1, {1, 2}),
        (9, -1, {7, 8, 9}),
        (10, 10, {8, 9, 10}),
        (13, 10, {8, 9, 10, 11, 12, 13}),
        (20, 10, {8, 9, 10, 18, 19, 20}),  # the checkpoint of step 20 is not written yet
        (21, 10, {18, 19, 20, 21}),
    ],
)
def test_the_last_steps_stay_and_those_a_resumed_run_begins_with(
    step: int, save_freq: int, steps: set[int]
) -> None:
    assert {s for s in steps_to_keep(step, 3, save_freq) if s > 0} == steps


def test_a_run_keeps_the_files_of_its_last_steps(train: Callable[..., Run]) -> None:
    run = train(DEFAULT, "trainer.total_training_steps=6")
    assert steps_in(run.folder) == [4, 5, 6]
    assert run.rollouts(6)[0]["step"] == 6
    none = train(DEFAULT, "trainer.rollout_steps_to_keep=0", folder="none")
    assert not none.folder.joinpath("rollouts").exists()


def test_a_run_that_went_on_holds_the_files_of_one_that_never_stopped(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    settings = (DEFAULT, "trainer.save_freq=2", "trainer.rollout_steps_to_keep=2")
    uninterrupted = train(*settings, "trainer.total_training_steps=5", folder="whole")
    parts = train(*settings, "trainer.total_training_steps=5", folder="parts")
    # As a kill after step 5 and before its checkpoint leaves it; one file that is half written.
    for name in ("global_step_5", "latest_checkpointed_iteration.txt"):
        (parts.folder / name).rename(tmp_path / name)
    (parts.folder / "rollouts" / ".step_5.parquet.1.tmp").write_bytes(b"PAR1")
    train(*settings, "trainer.total_training_steps=5", folder="parts")
    files = {p.name: p.read_bytes() for p in (uninterrupted.folder / "rollouts").iterdir()}
    assert sorted(files) == [f"step_{n}.parquet" for n in (3, 4, 5)]
    assert {p.name: p.read_bytes() for p in (parts.folder / "rollouts").iterdir()} == files


def test_files_that_were_asked_for_are_never_deleted(tmp_path: Path) -> None:
    all_steps = writer(tmp_path, rollout_data_dir=str(tmp_path / "rollouts"))
    for step in range(1, 6):
        all_steps.write(batch(), step)
    all_steps.close()
    (tmp_path / "rollouts" / "step_0.parquet").write_bytes(b"not parquet")
    later = writer(tmp_path, rollout_steps_to_keep=1)
    for step in range(6, 9):
        later.write(batch(), step)
    later.close()
    assert steps_in(tmp_path) == [0, 1, 2, 3, 4, 5, 8]


class Slow:
    """A tokenizer that decodes when it is let."""

    def __init__(self) -> None:
        self.may_decode = threading.Event()

    def decode(self, ids: Any) -> str:
        assert self.may_decode.wait(60)
        return "x"


def test_a_step_does_not_wait_for_its_file_and_a_checkpoint_does(tmp_path: Path) -> None:
    tokenizer = Slow()  # cannot be copied: it holds a lock
    rollouts, data = writer(tmp_path, tokenizer), batch()
    rollouts.write(data, 1)
    assert steps_in(tmp_path) == []
    data.batch.pop("responses")  # what is added or taken away now changes nothing in the file
    tokenizer.may_decode.set()
    rollouts.flush()
    [row] = pq.read_table(tmp_path / "rollouts" / "step_1.parquet").to_pylist()
    assert (row["response_ids"], row["response_text"]) == ([6, 7], "x")
    rollouts.close()


def test_a_file_that_cannot_be_written_stops_the_run_at_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    rollouts = writer(tmp_path)
    rollouts.write(batch(), 1)
    with pytest.raises(OSError, match="rollouts"):
        rollouts.write(batch(), 2)
    rollouts.write(batch(), 3)
    with pytest.raises(KeyError, match="the cause"), rollouts:
        raise KeyError("the cause")  # the file's failure does not hide it
    rollouts.close()


def test_one_folder_for_training_and_validation_is_refused(tmp_path: Path) -> None:
    """Their files of a step have the same name."""
    folder = str(tmp_path / "dump")
    with pytest.raises(ConfigError, match=r"are both .*dump, where .* use two folders"):
        writer(tmp_path, rollout_data_dir=folder, validation_data_dir=f"{folder}/")
