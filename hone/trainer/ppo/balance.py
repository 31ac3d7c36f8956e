"""Reorders rows so that each rank gets its part of every mini-batch, balanced by length if configured.

The column `step_row` has each row's index before the reordering; if trajectories have several rows, it has
the index of the trajectory. It assigns rows to mini-batches, so the updates are the same as with one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from hone.agents.collate import trajectory_indices
from hone.columns import write
from hone.config import ConfigError, PPOTrainerConfig
from hone.config.checks import batch_size_problems
from hone.ops.balancing import calculate_workload, get_seqlen_balanced_partitions
from hone.protocol import DataProto


def check_divisible(config: PPOTrainerConfig, ranks: int) -> None:
    """Raises an error if a mini-batch is not divisible by the number of data-parallel ranks."""
    if problems := list(batch_size_problems(config, ranks)):
        raise ConfigError(problems)


def balance(
    batch: DataProto, *, ranks: int, rows_per_update: Sequence[int], by_length: bool
) -> tuple[DataProto, dict[str, float]]:
    """Writes `step_row`, and orders the rows by rank, so that each rank has its part of every mini-batch."""
    row_trajectories = trajectory_indices(batch)
    step_rows = torch.arange(len(batch)) if row_trajectories is None else row_trajectories
    write(batch, "step_row", step_rows)
    if ranks == 1:
        return batch, {}
    lengths = batch.batch["attention_mask"].sum(1)
    if row_trajectories is not None or len(batch) % ranks:
        # The rows of a mini-batch may not divide evenly, so the ranks take rows in turn, longest first.
        update_numbers = step_rows // min(rows_per_update)
        sorted_rows = torch.from_numpy(np.lexsort((-lengths.numpy(), update_numbers.numpy())))
        return batch.select_idxs(torch.cat([sorted_rows[rank::ranks] for rank in range(ranks)])), {}
    rank_rows = _equal_parts(lengths, ranks, rows_per_update, by_length)
    metrics = _length_metrics(lengths, rank_rows)
    return batch.select_idxs(torch.tensor([row for rows in rank_rows for row in rows])), metrics


def _equal_parts(
    lengths: torch.Tensor, ranks: int, rows_per_update: Sequence[int], by_length: bool
) -> list[list[int]]:
    """Returns the rows of each rank: the same number for every rank, from each mini-batch."""
    block_rows = math.gcd(len(lengths), *rows_per_update)
    rank_rows: list[list[int]] = [[] for _ in range(ranks)]
    for block in torch.arange(len(lengths)).split(
        block_rows if block_rows % ranks == 0 else len(lengths)
    ):
        parts = _partition(lengths[block], ranks, by_length)
        for row_list, part in zip(rank_rows, parts, strict=True):
            row_list += block[part].tolist()
    return rank_rows


def _length_metrics(lengths: torch.Tensor, rank_rows: list[list[int]]) -> dict[str, float]:
    """Returns the tokens per rank of `rank_rows`, and those without a reordering."""
    ranks = len(rank_rows)
    rows_per_rank = len(lengths) // ranks
    contiguous_parts = [range(i * rows_per_rank, (i + 1) * rows_per_rank) for i in range(ranks)]
    tokens_before, tokens_after = (
        [float(lengths[list(part_rows)].sum()) for part_rows in parts]
        for parts in (contiguous_parts, rank_rows)
    )
    return {
        "global_seqlen/min": min(tokens_before),
        "global_seqlen/max": max(tokens_before),
        "global_seqlen/minmax_diff": max(tokens_before) - min(tokens_before),
        "global_seqlen/balanced_min": min(tokens_after),
        "global_seqlen/balanced_max": max(tokens_after),
        "global_seqlen/mean": lengths.sum().item() / ranks,
    }


def _partition(lengths: torch.Tensor, ranks: int, by_length: bool) -> list[list[int]]:
    if not by_length:
        return [part.tolist() for part in torch.arange(len(lengths)).tensor_split(ranks)]
    workloads = calculate_workload(lengths.tolist())
    return get_seqlen_balanced_partitions(workloads, ranks, equal_size=len(lengths) % ranks == 0)
