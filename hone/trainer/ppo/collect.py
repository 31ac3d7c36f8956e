"""Filling a batch: which groups are worth an update, and generating more in place of the others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from hone.algorithms.filter_groups import interquartile, keep_informative, remove_extreme
from hone.config import PPOTrainerConfig
from hone.protocol import DataProto
from hone.trainer.ppo.scoring import numbers_of, said_of_rows
from hone.trainer.ppo.widths import concat_padded


class NotEnoughSignal(RuntimeError):
    """Generation rounds ran out before the batch was full."""


def keep_rows(batch: DataProto, config: PPOTrainerConfig) -> torch.Tensor | None:
    """[B] bool of the rows whose groups pass the configured filters; None where none is configured."""
    uid = batch.non_tensor_batch["uid"]
    keep: torch.Tensor | None = None
    filters, curriculum = config.algorithm.filter_groups, config.curriculum_learning
    if filters.enable:
        metric = _metric(batch, filters.metric or "reward", config)
        keep = keep_informative(metric, uid)
    if curriculum.enable:
        scores = _metric(batch, "score", config)
        if curriculum.fn_name == "interquartile":
            passed = interquartile(scores, uid, **curriculum.fn_params)
        else:
            passed = remove_extreme(scores, uid)
        keep = passed if keep is None else keep & passed
    return keep


def collect(next_scored: Callable[[], DataProto], config: PPOTrainerConfig) -> DataProto:
    """Scored trajectories for one step; with dynamic sampling, rounds until enough groups vary."""
    batch = next_scored()
    keep = keep_rows(batch, config)
    if keep is None:
        return batch
    rounds, wanted = 1, config.data.train_batch_size
    kept = batch.select_idxs(keep)
    limit = config.algorithm.filter_groups.max_num_gen_batches
    while config.algorithm.filter_groups.enable and groups_in(kept) < wanted:
        if 0 < limit <= rounds:
            raise NotEnoughSignal(
                f"{rounds} generation rounds gave {groups_in(kept)} groups with signal, {wanted} are "
                "needed; raise algorithm.filter_groups.max_num_gen_batches (0 is no limit), lower "
                "data.train_batch_size, or use prompts that are neither too easy nor too hard"
            )
        batch = next_scored()
        rounds += 1
        passed = keep_rows(batch, config)
        assert passed is not None
        found = batch.select_idxs(passed)
        # A round that gives nothing is not joined: it may lack columns that the others have.
        kept = concat_padded([kept, found]) if len(kept) and len(found) else (kept or found)
    if len(kept) == 0:
        raise NotEnoughSignal(
            "the curriculum filter kept no group; widen its bounds or switch it off"
        )
    kept = first_groups(kept, wanted)
    kept.meta_info.setdefault("metrics", {})["training/num_gen_batches"] = float(rounds)
    return kept


def groups_in(batch: DataProto) -> int:
    return len(set(batch.non_tensor_batch["uid"])) if len(batch) else 0


def first_groups(batch: DataProto, count: int) -> DataProto:
    """The rows of the first `count` groups."""
    order: dict[str, int] = {}
    rank = [order.setdefault(uid, len(order)) for uid in batch.non_tensor_batch["uid"]]
    return batch.select_idxs(torch.tensor(rank) < count)


def _metric(batch: DataProto, name: str, config: PPOTrainerConfig) -> np.ndarray | torch.Tensor:
    """[B] what groups are judged by: the score, or a number that the scorer gave beside it."""
    if name in ("reward", "score", "seq_reward", "seq_final_reward"):
        return batch.batch["token_level_scores"].sum(-1)
    if name not in batch.non_tensor_batch and not said_of_rows(batch, name):
        raise KeyError(
            f"algorithm.filter_groups.metric={name} is no column of the batch; use reward, or one of "
            f"{', '.join(batch.meta_info.get('reward_extra_names', [])) or 'the reward extras'}"
        )
    return np.array(numbers_of(batch, name, config.reward_model.reward_kwargs.failure_score))
