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
from hone.trainer.ppo.scoring import has_extra, numbers_of
from hone.trainer.ppo.source import TrajectorySource

_CHUNKS = 4
"""Parts of a round that are scored while the others are still decoded."""


class NotEnoughSignal(RuntimeError):
    """Generation rounds ran out before the batch was full."""


@dataclass
class _Round:
    """One draw of prompts: the numbers of its groups, and the loader's state after it."""

    numbers: range
    loader_state: LoaderState


@dataclass(frozen=True)
class _Group:
    """One scored group: where its rows lie, its values of the metric, and whether it is trained on."""

    chunk: int
    rows: torch.Tensor
    values: list[float]
    informative: bool


class DynamicSampling:
    """Rounds of prompts until enough groups have signal; the next one starts while the last goes on.

    The batch is the first informative groups in the order of submission: a group counts when all before
    it are scored. Rounds that turn out not to be needed are aborted, and the loader stands where rounds
    one after the other would have left it. (`filter_groups.order=finish` takes those that end first.)
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
        self._metric = self._filters.metric or "reward"
        self._needed = config.data.train_batch_size

    def collect(self) -> DataProto:
        """Scored groups for one step."""
        self._rounds: list[_Round] = []
        self._chunks: list[DataProto] = []
        self._groups: dict[int, _Group] = {}  # by number, in the order of scoring
        reported = 0
        while (accepted := self._accepted()) is None:
            while self._needs_a_round():
                numbers = self._submit(self._loader.next_batch())
                self._rounds.append(_Round(numbers, self._loader.state_dict()))
            self._add(self._score(self._take(self._chunk_size())))
            while reported < len(self._rounds) and self._is_over(self._rounds[reported]):
                reported += 1
                self._report(reported)
        self._source.abort()
        needed = next(n for n, r in enumerate(self._rounds, 1) if max(accepted) in r.numbers)
        if self._filters.order == "submission":
            self._loader.load_state_dict(self._rounds[needed - 1].loader_state)
        batch = self._joined(accepted)
        batch.meta_info.setdefault("metrics", {})["training/num_gen_batches"] = float(needed)
        return batch

    def _needs_a_round(self) -> bool:
        """Whether another round is needed, or likely to be and there is room beside those running."""
        running = [r for r in self._rounds if not self._is_over(r)]
        if not running:
            return True
        together = self._filters.max_inflight_gen_batches if self._source.decodes_beside else 1
        limit = self._filters.max_num_gen_batches
        if len(running) >= together or 0 < limit <= len(self._rounds):
            return False
        informative = sum(group.informative for group in self._groups.values())
        unscored = sum(len(r.numbers) for r in self._rounds) - len(self._groups)
        rate = (informative + 1) / (len(self._groups) + 1)
        return informative + rate * unscored < self._needed

    def _chunk_size(self) -> int | None:
        """Groups to wait for: a part of a round, so that the next one can start before its end."""
        if not self._source.decodes_beside:
            return None
        return max(1, len(self._rounds[0].numbers) // _CHUNKS)

    def _add(self, batch: DataProto) -> None:
        keep = keep_rows(batch, self._config)
        assert keep is not None
        values = [float(v) for v in _metric(batch, self._metric, self._config)]
        rows: dict[str, list[int]] = {}
        for row, uid in enumerate(batch.non_tensor_batch["uid"]):
            rows.setdefault(uid, []).append(row)
        for number, own in zip(batch.meta_info["group_numbers"], rows.values(), strict=True):
            of_group = [values[row] for row in own]
            self._groups[number] = _Group(
                len(self._chunks), torch.tensor(own), of_group, bool(keep[own[0]])
            )
        self._chunks.append(batch)

    def _accepted(self) -> list[int] | None:
        """The numbers of the groups of the step, or None until they are settled."""
        scored = iter(self._groups)
        if self._filters.order != "finish":
            order = (number for r in self._rounds for number in r.numbers)
            scored = takewhile(self._groups.__contains__, order)
        informative = [number for number in scored if self._groups[number].informative]
        enough = len(informative) >= self._needed
        return sorted(informative[: self._needed]) if enough else None

    def _is_over(self, one: _Round) -> bool:
        return all(number in self._groups for number in one.numbers)

    def _joined(self, numbers: Sequence[int]) -> DataProto:
        groups = [self._groups[number] for number in numbers]
        used = sorted({group.chunk for group in groups})
        starts: dict[int, int] = {}
        total = 0
        for chunk in used:
            starts[chunk] = total
            total += len(self._chunks[chunk])
        chunks = [self._chunks[chunk] for chunk in used]
        whole = chunks[0] if len(chunks) == 1 else concat_padded(chunks)
        return whole.select_idxs(torch.cat([g.rows + starts[g.chunk] for g in groups]))

    def _report(self, count: int) -> None:
        """Print what the last of `count` rounds gave; stop where the rounds have reached a limit."""
        rounds = [[self._groups[number] for number in r.numbers] for r in self._rounds[:count]]
        informative = [sum(group.informative for group in groups) for groups in rounds]
        total = sum(informative)
        screen().line(
            f"filter_groups, round {count}: kept {informative[-1]} of {len(rounds[-1])} groups; "
            f"{min(total, self._needed)} of the {self._needed} needed"
        )
        empty = len(list(takewhile(lambda n: n == 0, reversed(informative))))
        limit, most_empty = self._filters.max_num_gen_batches, self._filters.max_empty_gen_batches
        if total >= self._needed or not (0 < limit <= count or empty >= most_empty):
            return
        key = f"max_empty_gen_batches={most_empty}"
        if 0 < limit <= count:
            key = f"max_num_gen_batches={limit} (0 is no limit)"
        groups = [group for groups in rounds for group in groups]
        values = Counter(value for group in groups for value in group.values)
        common = [
            f"{value:g} in {100 * of_value / values.total():.0f} % of the responses"
            for value, of_value in values.most_common(3)
        ]
        equal = sum(len(group.values) > 1 and len(set(group.values)) == 1 for group in groups)
        raise NotEnoughSignal(
            f"{count} generation rounds gave {total} groups with signal, {self._needed} are needed. In "
            f"{equal} of {len(groups)} groups all responses have the same {self._metric}: "
            f"{', '.join(common)}. Check the reward, use prompts that are neither too easy nor too "
            "hard, a larger actor_rollout_ref.rollout.n or a smaller data.train_batch_size; or raise "
            f"algorithm.filter_groups.{key}"
        )


def keep_rows(batch: DataProto, config: PPOTrainerConfig) -> torch.Tensor | None:
    """[B] bool of the rows whose groups pass the configured filters; None where none is configured."""
    uid = batch.non_tensor_batch["uid"]
    keep: torch.Tensor | None = None
    filters, curriculum = config.algorithm.filter_groups, config.curriculum_learning
    if filters.enable:
        keep = keep_informative(_metric(batch, filters.metric or "reward", config), uid)
    if curriculum.enable:
        scores = _metric(batch, "score", config)
        if curriculum.fn_name == "interquartile":
            passed = interquartile(scores, uid, **curriculum.fn_params)
        else:
            passed = remove_extreme(scores, uid)
        keep = passed if keep is None else keep & passed
    return keep


def filtered(batch: DataProto, config: PPOTrainerConfig) -> DataProto:
    """The groups of one round that pass the curriculum's filter, at most a batch of them."""
    keep = keep_rows(batch, config)
    if keep is None:
        return batch
    rest = batch.select_idxs(keep)
    if len(rest) == 0:
        raise NotEnoughSignal(
            "the curriculum filter kept no group; widen its bounds or switch it off"
        )
    order: dict[str, int] = {}
    group = [order.setdefault(uid, len(order)) for uid in rest.non_tensor_batch["uid"]]
    rest = rest.select_idxs(torch.tensor(group) < config.data.train_batch_size)
    rest.meta_info.setdefault("metrics", {})["training/num_gen_batches"] = 1.0
    return rest


def _metric(batch: DataProto, name: str, config: PPOTrainerConfig) -> np.ndarray | torch.Tensor:
    """[B] the score, or a number that the scorer returned beside it."""
    if name in ("reward", "score", "seq_reward", "seq_final_reward"):
        scores: torch.Tensor = require(batch, "token_level_scores")
        return scores.sum(-1)
    if name not in batch.non_tensor_batch and not has_extra(batch, name):
        raise KeyError(
            f"algorithm.filter_groups.metric={name} is no column of the batch; use reward, or one of "
            f"{', '.join(batch.meta_info.get('reward_extra_names', [])) or 'the reward extras'}"
        )
    return np.array(numbers_of(batch, name, config.reward_model.reward_kwargs.failure_score))
