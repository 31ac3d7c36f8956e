"""Collects the batch of a step: starts groups as the ledger admits, scores them as they come, filters them.

DAPO's dynamic sampling, the curriculum and PRIME's filters are predicates over one path. Dynamic sampling
replaces rejected groups until the batch is full; without it, a step generates one generation batch.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import takewhile

import torch

from hone.agents.collate import last_row_values
from hone.agents.contract import default_sampling
from hone.agents.joining import pad_and_concat
from hone.columns import write
from hone.config import PPOTrainerConfig
from hone.data.loader import PromptLoader
from hone.errors import UserError
from hone.ops.rows import Groups
from hone.protocol import DataProto
from hone.protocol.rows import row_dicts
from hone.tracking.console import screen
from hone.trainer.ppo.ledger import Ledger, PromptRef
from hone.trainer.ppo.response_metrics import filter_metrics
from hone.trainer.ppo.selection import (
    greedy_baselines,
    keep_mask,
    metric_values,
    passes_prime_filters,
)
from hone.trainer.ppo.source import (
    GroupMetrics,
    TrajectorySource,
    generation_metrics,
    mean_max_min,
)
from hone.types import Row

_PARTS = 4
"""Dynamic sampling scores a part of the running groups at a time, while the others are generated."""


class NotEnoughSignal(UserError, RuntimeError):
    """Raised when the filters leave too few groups for a batch."""


@dataclass(frozen=True)
class _Group:
    """A scored group: the chunk that was scored with it, and its rows in the chunk."""

    chunk_index: int
    rows: torch.Tensor
    metrics: GroupMetrics
    values: Sequence[float]
    """The metric of dynamic sampling, for each trajectory."""
    is_preferred: bool


def create_ledger(config: PPOTrainerConfig) -> Ledger:
    """Returns the ledger of a synchronous run."""
    filters, data = config.algorithm.filter_groups, config.data
    num_places = data.prompts_per_generation
    if filters.enable:
        num_places *= filters.max_inflight_gen_batches
    spare = max(0, num_places - data.train_batch_size)
    order = filters.order if filters.enable else "submission"
    return Ledger(data.train_batch_size, spare=spare, order=order, refills=filters.enable)


class Collector:
    """Fills the batch of each step with scored groups."""

    def __init__(
        self,
        config: PPOTrainerConfig,
        loader: PromptLoader,
        ledger: Ledger,
        source: TrajectorySource,
        *,
        score: Callable[[DataProto], DataProto],
        phase: Callable[[str], AbstractContextManager[None]],
        needs_greedy_baselines: bool,
    ) -> None:
        """`phase` times a phase of the step."""
        self._config, self._loader, self._ledger, self._source = config, loader, ledger, source
        self._score, self._phase = score, phase
        rollout = config.actor_rollout_ref.rollout
        self._num_samples, self._needs_baselines = rollout.n, needs_greedy_baselines
        self._samplings = [default_sampling(rollout)] * rollout.n
        if needs_greedy_baselines:  # ReMax: one more sample of each group
            self._samplings.append(self._samplings[0] | {"temperature": 0.0})
        self._filters, data = config.algorithm.filter_groups, config.data
        self._batch_size = data.train_batch_size  # in groups
        self._window_size = data.prompts_per_generation
        curriculum = config.curriculum_learning
        self._uses_prime = (
            data.filter_accuracy or data.filter_truncate or data.oversample_factor > 1
        )
        self._is_filtered = self._filters.enable or curriculum.enable or self._uses_prime
        # Percentiles are those of all groups of the step that were started, or they would depend on timing.
        self._compares_groups = curriculum.enable and curriculum.fn_name == "interquartile"
        self._prompts: dict[PromptRef, Row] = {}  # of pending and running groups

    def collect(self) -> DataProto:
        """Returns the scored groups of one step."""
        self._chunks: list[DataProto] = []
        self._groups: dict[int, _Group] = {}  # by number, in scoring order
        self._accepted: set[int] = set()
        self._started: list[int] = []
        self._num_reported = 0
        while (numbers := self._ledger.next_batch()) is None:
            prompts = self._admit()
            with self._phase("gen"):
                if prompts:
                    self._source.start(prompts, self._samplings)
                finished = sorted(self._source.finish(self._num_to_score()))
                batch = self._source.rows(finished, range(self._num_samples))
            self._judge(finished, batch)
            if self._filters.enable:
                self._report_windows(self._started)
        numbers = self._preference_order(numbers)
        batch = self._select(numbers)
        metrics = batch.meta_info.setdefault("metrics", {})
        metrics |= generation_metrics([self._groups[number].metrics for number in numbers])
        ages = torch.tensor(self._ledger.ages(numbers))
        metrics |= mean_max_min("training/off_policy/group_staleness_steps", ages)
        if self._is_filtered:
            metrics |= self._filter_metrics(batch, numbers)
        self._source.abort(self._ledger.consume(numbers))
        pending = {*self._ledger.pending}
        self._prompts = {ref: row for ref, row in self._prompts.items() if ref in pending}
        return batch

    def _admit(self) -> dict[int, Row]:
        """Returns the prompts of the groups to start, by number: those that the ledger admits."""
        num_groups = self._num_to_start()
        while len(self._ledger.pending) < num_groups:
            for row in row_dicts(self._loader.next_batch()):
                ref = PromptRef(int(row["dataset_index"]), str(row["uid"]))
                self._ledger.draw([ref])
                self._prompts[ref] = row
        refs = self._ledger.start(num_groups)
        self._started += refs
        return {number: self._prompt(ref) for number, ref in refs.items()}

    def _prompt(self, ref: PromptRef) -> Row:
        if ref not in self._prompts:  # it was pending when the run was resumed
            (self._prompts[ref],) = row_dicts(self._loader.load_batch([ref]))
        return self._prompts[ref]

    def _num_to_start(self) -> int:
        """Returns how many groups to start: those that probably fill the batch, as far as it is allowed."""
        size, num_started = self._window_size, len(self._started)
        if not self._filters.enable:
            return size - num_started
        num_missing = self._batch_size - len(self._accepted)
        accepted_share = (len(self._accepted) + 1) / (len(self._groups) + 1)
        num_running = max(math.ceil(num_missing / accepted_share), size - num_started)
        max_started = size * self._filters.max_num_gen_batches or math.inf
        allowed = min(self._ledger.admissible(), max_started - num_started)
        return max(0, min(int(allowed), num_running - len(self._ledger.running)))

    def _num_to_score(self) -> int | None:
        """Returns for how many groups to wait; None waits for all that run."""
        if not self._filters.enable or self._compares_groups:
            return None
        return max(1, len(self._ledger.running) // _PARTS)

    def _judge(self, numbers: Sequence[int], batch: DataProto) -> None:
        """Scores the trajectories of these groups, and accepts or rejects the groups."""
        metrics = self._source.metrics(numbers, range(self._num_samples))
        batch = self._score(batch)
        if self._needs_baselines:
            greedy_batch = self._score(self._source.rows(numbers, (self._num_samples,)))
            write(batch, "reward_baselines", greedy_baselines(batch, greedy_batch))
        self._source.release(numbers)
        self._record(numbers, metrics, batch)
        compared = self._select(sorted(self._groups)) if self._compares_groups else batch
        keep = keep_mask(compared, self._config) if self._is_filtered else None
        if keep is not None:
            uids = compared.non_tensor_batch["uid"]
            accepted_uids = {
                uid for uid, is_kept in zip(uids, keep.tolist(), strict=True) if is_kept
            }
        for number in numbers:
            uid = batch.non_tensor_batch["uid"][int(self._groups[number].rows[0])]
            if keep is None or uid in accepted_uids:
                self._accepted.add(number)
                self._ledger.accept(number)
            else:
                self._ledger.reject(number)
        if self._filters.enable:
            return
        if not self._accepted:
            raise NotEnoughSignal(
                "the curriculum filter removed all groups; widen its bounds or disable it"
            )
        for number in self._preference_order(sorted(self._accepted))[self._batch_size :]:
            self._accepted.remove(number)
            self._ledger.reject(number)

    def _record(
        self, numbers: Sequence[int], metrics: Sequence[GroupMetrics], batch: DataProto
    ) -> None:
        """Records a scored chunk and its groups."""
        uids = batch.non_tensor_batch["uid"]
        row_groups = Groups.of(uids).ids  # in order of appearance, like `numbers`
        is_preferred = [True] * len(numbers)
        if self._uses_prime:
            is_preferred = passes_prime_filters(batch, self._config).tolist()
        group_values: list[list[float]] = [[] for _ in numbers]
        if self._filters.enable:
            values = metric_values(batch, self._filters.metric or "reward", self._config)
            value_groups = Groups.of(last_row_values(batch, uids)).ids
            for index, value in zip(value_groups.tolist(), values.tolist(), strict=True):
                group_values[index].append(value)
        for index, number in enumerate(numbers):
            rows = (row_groups == index).nonzero().squeeze(1)
            self._groups[number] = _Group(
                len(self._chunks), rows, metrics[index], group_values[index], is_preferred[index]
            )
        self._chunks.append(batch)

    def _preference_order(self, numbers: Sequence[int]) -> list[int]:
        """Returns the numbers, those of preferred groups first."""
        return sorted(numbers, key=lambda number: not self._groups[number].is_preferred)

    def _select(self, numbers: Sequence[int]) -> DataProto:
        """Returns the rows of these groups, in this order."""
        if len(self._chunks) == 1 and list(numbers) == list(self._groups):
            return self._chunks[0]
        groups = [self._groups[number] for number in numbers]
        chunk_offsets: dict[int, int] = {}  # the first row of each chunk after concatenation
        total = 0
        for chunk_index in sorted({group.chunk_index for group in groups}):
            chunk_offsets[chunk_index] = total
            total += len(self._chunks[chunk_index])
        chunks = [self._chunks[chunk_index] for chunk_index in chunk_offsets]
        batch = chunks[0] if len(chunks) == 1 else pad_and_concat(chunks)
        group_rows = [group.rows + chunk_offsets[group.chunk_index] for group in groups]
        return batch.select_idxs(torch.cat(group_rows))

    def _filter_metrics(self, batch: DataProto, numbers: Sequence[int]) -> dict[str, float]:
        """Returns the metrics of the filters, over all groups that the batch needed."""
        metrics: dict[str, float] = {}
        last_index = len(self._started) - 1
        if self._filters.enable:
            last_index = self._started.index(max(numbers))
            self._report_windows(self._started[: last_index + 1], is_complete=True)
        elif self._uses_prime:
            groups = self._groups.values()
            num_preferred = sum(group.is_preferred for group in groups)
            metrics["training/preferred_groups"] = num_preferred / len(groups)
        window = last_index // self._window_size
        metrics["training/num_gen_batches"] = float(window + 1)
        if self._config.logs_response_metrics:
            scored = [
                number for number in self._started[: last_index + 1] if number in self._groups
            ]
            generated_batch = self._select(self._preference_order(scored))
            metrics |= filter_metrics(generated_batch, batch, self._config)
        return metrics

    # -- the report of dynamic sampling, by generation batch ----------------------------------------

    def _report_windows(self, started: Sequence[int], is_complete: bool = False) -> None:
        """Reports each scored generation batch of the groups that were started, the last one if complete."""
        size = self._window_size
        windows = [started[first : first + size] for first in range(0, len(started), size)]
        for window_number in range(self._num_reported + 1, len(windows) + 1):
            window = windows[window_number - 1]
            is_scored = all(number in self._groups for number in window)
            if not (is_scored and (is_complete or len(window) == size)):
                break
            self._num_reported = window_number
            self._report_window(windows[:window_number])

    def _report_window(self, windows: Sequence[Sequence[int]]) -> None:
        """Prints the result of the last window; raises an error if groups are missing and it was the last."""
        window_number = len(windows)
        informative_counts = [sum(number in self._accepted for number in w) for w in windows]
        total, needed = sum(informative_counts), self._batch_size
        screen().line(
            f"filter_groups, round {window_number}: kept {informative_counts[-1]} of {len(windows[-1])} "
            f"groups; {min(total, needed)} of the {needed} needed"
        )
        empty_windows = len(list(takewhile(operator.not_, reversed(informative_counts))))
        max_windows = self._filters.max_num_gen_batches
        max_empty_windows = self._filters.max_empty_gen_batches
        is_last_window = 0 < max_windows <= window_number
        if total >= needed or not (is_last_window or empty_windows >= max_empty_windows):
            return
        limit = f"max_empty_gen_batches={max_empty_windows}"
        if is_last_window:
            limit = f"max_num_gen_batches={max_windows} (0 is no limit)"
        groups = [self._groups[number] for window in windows for number in window]
        values = Counter(value for group in groups for value in group.values)
        most_common_values = [
            f"{value:g} in {100 * n / values.total():.0f} % of the responses"
            for value, n in values.most_common(3)
        ]
        num_equal_groups = sum(len(set(group.values)) == 1 < len(group.values) for group in groups)
        raise NotEnoughSignal(
            f"{window_number} generation rounds gave {total} groups with signal, {needed} are "
            f"needed. In {num_equal_groups} of {len(groups)} groups all responses have the same "
            f"{self._filters.metric or 'reward'}: {', '.join(most_common_values)}. Check the reward, use "
            "prompts that are neither too easy nor too hard, a larger actor_rollout_ref.rollout.n or a "
            f"smaller data.train_batch_size; or raise algorithm.filter_groups.{limit}"
        )
