"""Generation with the keys of RL training writes the responses that were asked for."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hone.config import ConfigError
from hone.verl.dialect import load_config
from hone.verl.main_generation_server import generation_config, main
from tests.trainer.runs import Task


def test_the_keys_of_training_say_what_to_generate() -> None:
    config = generation_config(
        load_config(
            [
                "actor_rollout_ref.model.path=m",
                "data.train_files=[a.parquet,b.parquet]",
                "+data.output_path=out.parquet",
                "data.prompt_key=question",
                "actor_rollout_ref.rollout.n=3",
                "actor_rollout_ref.rollout.temperature=0.7",
                "data.max_response_length=9",
                "trainer.n_gpus_per_node=2",
            ]
        )
    )
    assert config.data.path == ("a.parquet", "b.parquet")
    assert (config.data.output_path, config.data.n_samples) == ("out.parquet", 3)
    assert (config.data.prompt_key, config.model.path) == ("question", "m")
    assert (config.rollout.temperature, config.rollout.response_length) == (0.7, 9)
    assert (config.rollout.top_k, config.world_size) == (-1, 2)


def test_responses_are_written_beside_their_rows(task: Task, tmp_path: Path) -> None:
    main(
        [
            f"actor_rollout_ref.model.path={task.model}",
            f"data.train_files={task.train}",
            f"+data.output_path={tmp_path / 'out.parquet'}",
            "data.prompt_format=raw",
            "data.max_prompt_length=16",
            "data.max_response_length=4",
            "actor_rollout_ref.rollout.n=2",
            "trainer.device=cpu",
        ]
    )
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert rows
    assert all(len(row["responses"]) == 2 for row in rows)


def test_the_file_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"data.output_path was not given"):
        main(["actor_rollout_ref.model.path=m", "data.train_files=a.parquet"])
