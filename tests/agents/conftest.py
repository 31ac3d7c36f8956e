"""Fixtures: a small config, rows, and a runner with a scripted engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hone.agents.collate import collate_outputs, loop_metrics, object_array
from hone.agents.groups import GroupRequest
from hone.agents.runner import LoopRunner
from hone.config import PPOTrainerConfig
from hone.models.tiny import character_tokenizer
from hone.protocol import DataProto
from hone.protocol.rows import row_dicts
from hone.rollout.contract import RolloutEngine
from hone.verl.dialect import load_config

TOKENIZER = character_tokenizer()


@pytest.fixture
def tokenizer() -> Any:
    return TOKENIZER


@pytest.fixture
def config() -> Callable[..., PPOTrainerConfig]:
    def build(*overrides: str) -> PPOTrainerConfig:
        return load_config(
            [
                "data.max_prompt_length=16",
                "data.max_response_length=12",
                "data.prompt_format=raw",
                "actor_rollout_ref.model.path=unused",
                *overrides,
            ]
        )

    return build


@pytest.fixture
def rows() -> Callable[..., DataProto]:
    """Returns rows of prompts; keywords are further columns."""

    def build(
        prompts: Sequence[str], sampling: dict[str, Any] | None = None, **columns: Sequence[Any]
    ) -> DataProto:
        n = len(prompts)
        arrays: dict[str, np.ndarray] = {
            "uid": object_array([f"u{i}" for i in range(n)]),
            "sample_index": object_array([0] * n),
            "trajectory_id": object_array([f"u{i}-0" for i in range(n)]),
            "raw_prompt": object_array(list(prompts)),
        }
        arrays |= {name: object_array(list(values)) for name, values in columns.items()}
        data = DataProto.from_dict(non_tensors=arrays)
        data.meta_info["sampling_params"] = {"temperature": 1.0, **(sampling or {})}
        return data

    return build


class CollatingRunner(LoopRunner):
    """Returns the batch that the trainer would collate."""

    def run(self, rows: DataProto) -> DataProto:
        sampling, row_list = rows.meta_info["sampling_params"], row_dicts(rows.non_tensor_batch)
        self.submit([GroupRequest(i, (row,), (sampling,)) for i, row in enumerate(row_list)])
        self.run_until(lambda: False)  # until no loop runs
        groups = sorted(self.pop_finished(), key=lambda group: group.number)
        outputs = [output for group in groups for output in group.outputs]
        batch = collate_outputs(outputs, pad_token_id=TOKENIZER.pad_token_id)
        batch.meta_info["metrics"] = loop_metrics([output.metrics for output in outputs])
        return batch


@pytest.fixture
def runner(config: Callable[..., PPOTrainerConfig]) -> Callable[..., LoopRunner]:
    def build(
        engine: RolloutEngine, *overrides: str, run_seed: int = 1, tokenizer: Any = TOKENIZER
    ) -> LoopRunner:
        return CollatingRunner(config(*overrides), engine, tokenizer, run_seed=run_seed)

    return build


@pytest.fixture
def requests() -> Callable[..., list[GroupRequest]]:
    """Returns the rows of each uid as a group, with the sampling of the batch."""

    def build(rows: DataProto, first_number: int = 0) -> list[GroupRequest]:
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in row_dicts(rows.non_tensor_batch):
            groups.setdefault(row["uid"], []).append(row)
        sampling = rows.meta_info["sampling_params"]
        return [
            GroupRequest(number, tuple(group), (sampling,) * len(group))
            for number, group in enumerate(groups.values(), first_number)
        ]

    return build
