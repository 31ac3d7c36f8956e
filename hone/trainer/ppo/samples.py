"""A few trajectories as text, for trackers that show tables."""

from __future__ import annotations

from hone.protocol import DataProto
from hone.tokenizer import Tokenizer
from hone.trainer.ppo.rollout_file import rollout_table
from hone.types import Row

_SHOWN = ("data_source", "prompt_text", "response_text", "ground_truth", "score")


def sample_rows(batch: DataProto, tokenizer: Tokenizer, count: int) -> list[Row]:
    """The first `count` rows: the same prompts in every validation."""
    first = batch.select_idxs(list(range(min(count, len(batch)))))
    rows: list[Row] = rollout_table(first, tokenizer, step=0).select(_SHOWN).to_pylist()
    return rows
