"""Filling a batch: which groups are worth an update, and generating more in place of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from hone.agents.widths import concat_padded
from hone.algorithms.filter_groups import interquartile, keep_informative, remove_extreme
from hone.config import PPOTrainerConfig
from hone.protocol import DataProto
from hone.tracking.console import screen
from hone.trainer.ppo.scoring import numbers_of, said_of_rows


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
    wanted, dynamic = config.data.train_batch_size, config.algorithm.filter_groups.enable
    kept = batch.select_idxs(keep)
    rounds = Rounds(config)
    rounds.add(batch, kept)
    while dynamic and rounds.groups_kept < wanted:
        rounds.stop_if_hopeless()
        batch = next_scored()
        passed = keep_rows(batch, config)
        assert passed is not None
        found = batch.select_idxs(passed)
        rounds.add(batch, found)
        # A round that gives nothing is not joined: it may lack columns that the others have.
        kept = concat_padded([kept, found]) if len(kept) and len(found) else (kept or found)
    if len(kept) == 0:
        raise NotEnoughSignal(
            "the curriculum filter kept no group; widen its bounds or switch it off"
        )
    kept = first_groups(kept, wanted)
    kept.meta_info.setdefault("metrics", {})["training/num_gen_batches"] = float(rounds.count)
    return kept


class Rounds:
    """What the generation rounds of one step gave: one line per round, and a stop that says it all."""

    def __init__(self, config: PPOTrainerConfig) -> None:
        self._config = config
        self._filters = config.algorithm.filter_groups
        self._metric = self._filters.metric or "reward"
        self._limit = self._filters.max_num_gen_batches
        self._most_empty = self._filters.max_empty_gen_batches
        self._values: Counter[float] = Counter()
        self.count = self.groups_kept = self._groups = self._equal = self._empty = 0

    def add(self, batch: DataProto, kept: DataProto) -> None:
        """Count a round; where groups are generated again, say what it gave."""
        groups, passed = groups_in(batch), groups_in(kept)
        self.count += 1
        self._groups += groups
        self.groups_kept += passed
        self._empty = 0 if passed else self._empty + 1
        if not self._filters.enable:
            return
        values = _metric(batch, self._metric, self._config)
        self._values.update(float(value) for value in values)
        varied = batch.select_idxs(keep_informative(values, batch.non_tensor_batch["uid"]))
        self._equal += groups - groups_in(varied)
        screen().line(
            f"filter_groups, round {self.count}: kept {passed} of {groups} groups; "
            f"{min(self.groups_kept, self._wanted)} of the {self._wanted} needed"
        )

    @property
    def _wanted(self) -> int:
        return self._config.data.train_batch_size

    def stop_if_hopeless(self) -> None:
        """Raise where the rounds of this step have reached a limit."""
        limit, empty = self._limit, self._most_empty
        if 0 < limit <= self.count:
            key = f"max_num_gen_batches={limit} (0 is no limit)"
        elif self._empty >= empty:
            key = f"max_empty_gen_batches={empty}"
        else:
            return
        total = self._values.total()
        common = [
            f"{value:g} in {100 * count / total:.0f} % of the responses"
            for value, count in self._values.most_common(3)
        ]
        raise NotEnoughSignal(
            f"{self.count} generation rounds gave {self.groups_kept} groups with signal, "
            f"{self._wanted} are needed. In {self._equal} of {self._groups} groups all responses "
            f"have the same {self._metric}: {', '.join(common)}. Check the reward, use prompts that "
            "are neither too easy nor too hard, a larger actor_rollout_ref.rollout.n or a smaller "
            f"data.train_batch_size; or raise algorithm.filter_groups.{key}"
        )


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
