"""A few trajectories as text, for trackers that show tables."""

from __future__ import annotations

from typing import Any

from hone.protocol import DataProto
from hone.trainer.ppo.rollout_file import rollout_columns

_SHOWN = ("data_source", "prompt_text", "response_text", "ground_truth", "score")


def sample_rows(batch: DataProto, tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """The first `count` rows: the same prompts in every validation."""
    first = batch.select_idxs(list(range(min(count, len(batch)))))
    columns = rollout_columns(first, tokenizer, step=0)
    return [{name: columns[name][row] for name in _SHOWN} for row in range(len(first))]
