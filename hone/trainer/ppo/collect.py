"""Filling a batch: which groups are worth an update, and generating more in place of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch

from hone.agents.widths import concat_padded
from hone.algorithms.filter_groups import interquartile, keep_informative, remove_extreme
from hone.columns import require
from hone.config import PPOTrainerConfig
from hone.data.loader import LoaderState, PromptLoader
from hone.protocol import DataProto
from hone.tracking.console import screen
from hone.trainer.ppo.scoring import numbers_of, said_of_rows
from hone.trainer.ppo.source import TrajectorySource

_CHUNKS = 4
"""Parts of a round that are scored while the others are still decoded."""


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


@dataclass
class _Round:
    """One draw of prompts: the numbers of its groups, and where the loader stood after it."""

    numbers: range
    loader_after: LoaderState


@dataclass(frozen=True)
class _Judged:
    """One scored group: where its rows lie, and whether it may be learned from."""

    chunk: int
    rows: torch.Tensor
    informative: bool


class DynamicSampling:
    """Rounds of prompts until enough groups have signal; the next one starts while the last goes on.

    The batch is the first informative groups in the order of submission: a group counts when all before
    it are judged. Rounds that turn out not to be needed are aborted, and the loader stands where rounds
    one after the other would have left it. (`filter_groups.order=finish` takes what ends first.)
    """

    def __init__(
        self,
        config: PPOTrainerConfig,
        loader: PromptLoader,
        source: TrajectorySource,
        *,
        submit: Callable[[Mapping[str, np.ndarray]], range],
        take: Callable[[int | None], DataProto],
        score: Callable[[DataProto], DataProto],
    ) -> None:
        self._config, self._loader, self._source = config, loader, source
        self._submit, self._take, self._score = submit, take, score
        self._filters = config.algorithm.filter_groups
        self._wanted = config.data.train_batch_size

    def collect(self) -> DataProto:
        """Scored groups for one step."""
        self._rounds: list[_Round] = []
        self._chunks: list[DataProto] = []
        self._judged: dict[int, _Judged] = {}  # by number, in the order of their judgement
        told = Rounds(self._config)
        told_rounds = 0
        while (accepted := self._accepted()) is None:
            while self._needs_a_round():
                self._begin_round()
            self._judge(self._score(self._take(self._chunk_size())))
            while told_rounds < len(self._rounds) and self._is_over(self._rounds[told_rounds]):
                told.add(*self._groups_of(self._rounds[told_rounds]))
                told_rounds += 1
                if told.groups_kept < self._wanted:
                    told.stop_if_hopeless()
        self._source.abort()
        needed = next(n for n, r in enumerate(self._rounds, 1) if max(accepted) in r.numbers)
        if self._filters.order == "submission":
            self._loader.load_state_dict(self._rounds[needed - 1].loader_after)
        batch = self._joined(accepted)
        batch.meta_info.setdefault("metrics", {})["training/num_gen_batches"] = float(needed)
        return batch

    def _begin_round(self) -> None:
        numbers = self._submit(self._loader.next_batch())
        self._rounds.append(_Round(numbers, self._loader.state_dict()))

    def _needs_a_round(self) -> bool:
        """Whether another round is needed, or likely to be and there is room beside those under way."""
        under_way = [r for r in self._rounds if not self._is_over(r)]
        if not under_way:
            return True
        together = self._filters.max_inflight_gen_batches if self._source.decodes_beside else 1
        limit = self._filters.max_num_gen_batches
        if len(under_way) >= together or 0 < limit <= len(self._rounds):
            return False
        kept = sum(group.informative for group in self._judged.values())
        unjudged = sum(len(r.numbers) for r in self._rounds) - len(self._judged)
        rate = (kept + 1) / (len(self._judged) + 1)
        return kept + rate * unjudged < self._wanted

    def _chunk_size(self) -> int | None:
        """Groups to wait for: a part of a round, so that the next one can start before its end."""
        if not self._source.decodes_beside:
            return None
        return max(1, len(self._rounds[0].numbers) // _CHUNKS)

    def _judge(self, batch: DataProto) -> None:
        keep = keep_rows(batch, self._config)
        assert keep is not None
        uids = batch.non_tensor_batch["uid"]
        rows: dict[str, list[int]] = {}
        for row, uid in enumerate(uids):
            rows.setdefault(uid, []).append(row)
        for number, own in zip(batch.meta_info["group_numbers"], rows.values(), strict=True):
            judged = _Judged(len(self._chunks), torch.tensor(own), bool(keep[own[0]]))
            self._judged[number] = judged
        self._chunks.append(batch)

    def _accepted(self) -> list[int] | None:
        """The numbers of the groups of the step, or None where they are not known yet."""
        if self._filters.order == "finish":
            found = [number for number, group in self._judged.items() if group.informative]
        else:
            order = (number for r in self._rounds for number in r.numbers)
            known = takewhile(lambda number: number in self._judged, order)
            found = [number for number in known if self._judged[number].informative]
        return sorted(found[: self._wanted]) if len(found) >= self._wanted else None

    def _is_over(self, one: _Round) -> bool:
        return all(number in self._judged for number in one.numbers)

    def _groups_of(self, one: _Round) -> tuple[DataProto, DataProto]:
        """All groups of a round, and those of them that are informative."""
        batch = self._joined(list(one.numbers))
        kept = [number for number in one.numbers if self._judged[number].informative]
        return batch, self._joined(kept) if kept else batch.slice(0, 0)

    def _joined(self, numbers: Sequence[int]) -> DataProto:
        """These groups one below the other, in this order."""
        groups = [self._judged[number] for number in numbers]
        used = sorted({group.chunk for group in groups})
        starts: dict[int, int] = {}
        total = 0
        for chunk in used:
            starts[chunk] = total
            total += len(self._chunks[chunk])
        chunks = [self._chunks[chunk] for chunk in used]
        whole = chunks[0] if len(chunks) == 1 else concat_padded(chunks)
        return whole.select_idxs(torch.cat([g.rows + starts[g.chunk] for g in groups]))


def filtered(batch: DataProto, config: PPOTrainerConfig) -> DataProto:
    """The groups of one round that pass the curriculum's filter."""
    keep = keep_rows(batch, config)
    if keep is None:
        return batch
    kept = batch.select_idxs(keep)
    if len(kept) == 0:
        raise NotEnoughSignal(
            "the curriculum filter kept no group; widen its bounds or switch it off"
        )
    kept = first_groups(kept, config.data.train_batch_size)
    kept.meta_info.setdefault("metrics", {})["training/num_gen_batches"] = 1.0
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
        scores: torch.Tensor = require(batch, "token_level_scores")
        return scores.sum(-1)
    if name not in batch.non_tensor_batch and not said_of_rows(batch, name):
        raise KeyError(
            f"algorithm.filter_groups.metric={name} is no column of the batch; use reward, or one of "
            f"{', '.join(batch.meta_info.get('reward_extra_names', [])) or 'the reward extras'}"
        )
    return np.array(numbers_of(batch, name, config.reward_model.reward_kwargs.failure_score))
