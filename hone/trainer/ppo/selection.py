"""Chooses the trajectories of a step: dynamic sampling, group filters, greedy baselines and PF-PPO."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch

from hone.agents.collate import last_row_values, trajectory_indices, trajectory_totals
from hone.agents.joining import pad_and_concat
from hone.algorithms.row_selection import (
    interquartile,
    keep_informative,
    pf_ppo_rows,
    remove_extreme,
)
from hone.columns import require
from hone.config import PPOTrainerConfig
from hone.data.loader import PromptLoader
from hone.ops.counter_rng import fold_seed
from hone.ops.rows import Groups
from hone.protocol import DataProto
from hone.tracking.console import screen
from hone.trainer.ppo.credit import split_attention_mask
from hone.trainer.ppo.extras import extra_numbers, has_extra
from hone.trainer.ppo.response_metrics import filter_metrics, has_rule_score, verifiable_rewards
from hone.trainer.ppo.source import TrajectorySource
from hone.types import Fields

_CHUNKS_PER_ROUND = 4
"""Parts of a round; one chunk is scored while later chunks are still generated."""


class NotEnoughSignal(RuntimeError):
    """Raised when the filters leave too few groups for a batch."""


@dataclass
class _Round:
    """One batch of prompts: the numbers of its groups, and the loader's state after the batch."""

    group_numbers: range
    loader_state: Fields


@dataclass(frozen=True)
class _Group:
    """One scored group: its chunk, its rows in the chunk, and the metric value of each trajectory.

    A group is informative if it passes the filters, which compare the metric values.
    """

    chunk_index: int
    rows: torch.Tensor
    values: list[float]
    is_informative: bool


class DynamicSampling:
    """Generates overlapping rounds of prompts until enough groups are informative.

    The batch is the first informative groups in submission order; with `filter_groups.order=finish`, it is
    the first informative groups to finish. Rounds that are not needed are aborted; in submission order, the
    loader returns to the state after the last round that is needed.
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
        self._metric_name = self._filters.metric or "reward"
        self._groups_needed = config.data.train_batch_size
        curriculum = config.curriculum_learning
        compares_groups = curriculum.enable and curriculum.fn_name == "interquartile"
        # Percentiles need a whole round, or else the result would depend on the finishing order.
        self._scores_chunks = source.generates_concurrently and not compares_groups

    def collect(self) -> DataProto:
        """Returns the scored groups of one step."""
        self._rounds: list[_Round] = []
        self._chunks: list[DataProto] = []
        self._groups: dict[int, _Group] = {}  # by number, in scoring order
        num_reported = 0
        while (accepted_numbers := self._accepted_numbers()) is None:
            while self._needs_round():
                group_numbers = self._submit(self._loader.next_batch())
                self._rounds.append(_Round(group_numbers, self._loader.state_dict()))
            chunk_size = None  # waits for all groups
            if self._scores_chunks:  # the next round can start before the current one ends
                chunk_size = max(1, len(self._rounds[0].group_numbers) // _CHUNKS_PER_ROUND)
            self._record_chunk(self._score(self._take(chunk_size)))
            while num_reported < len(self._rounds) and self._is_scored(self._rounds[num_reported]):
                num_reported += 1
                self._report_round(num_reported)
        self._source.abort()
        last_number = max(accepted_numbers)
        rounds_needed = 1
        while last_number not in self._rounds[rounds_needed - 1].group_numbers:
            rounds_needed += 1
        if self._filters.order == "submission":
            self._loader.load_state_dict(self._rounds[rounds_needed - 1].loader_state)
        batch = self._select_groups(accepted_numbers)
        metrics = batch.meta_info.setdefault("metrics", {})
        metrics["training/num_gen_batches"] = float(rounds_needed)
        if self._config.logs_response_metrics:
            numbers = [number for number in sorted(self._groups) if number <= last_number]
            metrics |= filter_metrics(self._select_groups(numbers), batch, self._config)
        return batch

    def _needs_round(self) -> bool:
        """Returns whether to start a round: if none runs, or if another is probably needed and is allowed."""
        running_rounds = [
            prompt_round for prompt_round in self._rounds if not self._is_scored(prompt_round)
        ]
        if not running_rounds:
            return True
        max_concurrent_rounds = self._filters.max_inflight_gen_batches if self._scores_chunks else 1
        max_rounds = self._filters.max_num_gen_batches
        if len(running_rounds) >= max_concurrent_rounds or 0 < max_rounds <= len(self._rounds):
            return False
        num_informative = sum(group.is_informative for group in self._groups.values())
        num_submitted = sum(len(prompt_round.group_numbers) for prompt_round in self._rounds)
        num_unscored = num_submitted - len(self._groups)
        informative_rate = (num_informative + 1) / (len(self._groups) + 1)
        return num_informative + informative_rate * num_unscored < self._groups_needed

    def _record_chunk(self, batch: DataProto) -> None:
        """Records a scored chunk and its groups."""
        keep = keep_mask(batch, self._config)
        assert keep is not None
        uids = batch.non_tensor_batch["uid"]
        row_groups = Groups.of(uids).ids  # in order of appearance, like the group numbers
        value_groups = Groups.of(last_row_values(batch, uids)).ids
        values = _metric_values(batch, self._metric_name, self._config)
        for index, number in enumerate(batch.meta_info["group_numbers"]):
            rows = (row_groups == index).nonzero().squeeze(1)
            group_values = values[value_groups == index].tolist()
            is_informative = bool(keep[rows[0]])
            self._groups[number] = _Group(len(self._chunks), rows, group_values, is_informative)
        self._chunks.append(batch)

    def _accepted_numbers(self) -> list[int] | None:
        """Returns the numbers of the step's groups, or None while there are too few."""
        scored_numbers = iter(self._groups)
        if self._filters.order != "finish":
            order = (
                number for prompt_round in self._rounds for number in prompt_round.group_numbers
            )
            scored_numbers = takewhile(self._groups.__contains__, order)
        informative_numbers = [
            number for number in scored_numbers if self._groups[number].is_informative
        ]
        has_enough = len(informative_numbers) >= self._groups_needed
        return sorted(informative_numbers[: self._groups_needed]) if has_enough else None

    def _is_scored(self, prompt_round: _Round) -> bool:
        return all(number in self._groups for number in prompt_round.group_numbers)

    def _select_groups(self, numbers: Sequence[int]) -> DataProto:
        """Returns the rows of these groups, in this order."""
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

    def _report_round(self, round_number: int) -> None:
        """Prints the result of a round; raises an error if groups are missing and no round is left."""
        group_numbers = [prompt_round.group_numbers for prompt_round in self._rounds[:round_number]]
        rounds = [[self._groups[number] for number in numbers] for numbers in group_numbers]
        informative_counts = [sum(group.is_informative for group in groups) for groups in rounds]
        total = sum(informative_counts)
        screen().line(
            f"filter_groups, round {round_number}: kept {informative_counts[-1]} of {len(rounds[-1])} "
            f"groups; {min(total, self._groups_needed)} of the {self._groups_needed} needed"
        )
        empty_rounds = len(list(takewhile(operator.not_, reversed(informative_counts))))
        max_rounds = self._filters.max_num_gen_batches
        max_empty_rounds = self._filters.max_empty_gen_batches
        is_last_round = 0 < max_rounds <= round_number
        if total >= self._groups_needed or not (is_last_round or empty_rounds >= max_empty_rounds):
            return
        limit = f"max_empty_gen_batches={max_empty_rounds}"
        if is_last_round:
            limit = f"max_num_gen_batches={max_rounds} (0 is no limit)"
        groups = [group for groups in rounds for group in groups]
        values = Counter(value for group in groups for value in group.values)
        most_common_values = [
            f"{value:g} in {100 * n / values.total():.0f} % of the responses"
            for value, n in values.most_common(3)
        ]
        num_equal_groups = sum(len(set(group.values)) == 1 < len(group.values) for group in groups)
        raise NotEnoughSignal(
            f"{round_number} generation rounds gave {total} groups with signal, {self._groups_needed} are "
            f"needed. In {num_equal_groups} of {len(groups)} groups all responses have the same "
            f"{self._metric_name}: {', '.join(most_common_values)}. Check the reward, use prompts that are "
            "neither too easy nor too hard, a larger actor_rollout_ref.rollout.n or a smaller "
            f"data.train_batch_size; or raise algorithm.filter_groups.{limit}"
        )


def keep_mask(batch: DataProto, config: PPOTrainerConfig) -> torch.Tensor | None:
    """Returns a [B] bool mask of rows whose groups pass the filters; None without a configured filter."""
    uids = last_row_values(batch, batch.non_tensor_batch["uid"])
    keep: torch.Tensor | None = None
    filters, curriculum = config.algorithm.filter_groups, config.curriculum_learning
    if filters.enable:
        keep = keep_informative(_metric_values(batch, filters.metric or "reward", config), uids)
    if curriculum.enable:
        rewards = verifiable_rewards(batch, config)
        if rewards is not None:
            passes_curriculum = torch.ones(len(uids), dtype=torch.bool)
            # Trajectories that no rule scores pass: the reward model's score is still a signal.
            is_scored = has_rule_score(batch)
            scored_rewards = trajectory_totals(batch, rewards)[is_scored]
            scored_uids = uids[is_scored.numpy()]
            if curriculum.fn_name == "interquartile":
                passes_curriculum[is_scored] = interquartile(
                    scored_rewards, scored_uids, **curriculum.fn_params
                )
            else:
                passes_curriculum[is_scored] = remove_extreme(scored_rewards, scored_uids)
            keep = passes_curriculum if keep is None else keep & passes_curriculum
    row_trajectories = trajectory_indices(batch)
    return keep if keep is None or row_trajectories is None else keep[row_trajectories]


def filter_batch(batch: DataProto, config: PPOTrainerConfig) -> DataProto:
    """Returns the groups of one round that pass the filters, at most `data.train_batch_size`."""
    data = config.data
    keep = keep_mask(batch, config)
    if data.filter_accuracy or data.filter_truncate or data.oversample_factor > 1:
        is_preferred = _passes_prime_filters(batch, config)  # groups that pass come first
        order = (~is_preferred[Groups.of(batch.non_tensor_batch["uid"]).ids]).int()
        order = order.argsort(stable=True)
        keep = torch.ones(len(batch), dtype=torch.bool) if keep is None else keep[order]
        batch = batch.select_idxs(order)
        preferred_share = float(is_preferred.double().mean())
        batch.meta_info.setdefault("metrics", {})["training/preferred_groups"] = preferred_share
    if keep is None:
        return batch
    filtered_batch = batch.select_idxs(keep)
    if len(filtered_batch) == 0:
        raise NotEnoughSignal(
            "the curriculum filter removed all groups; widen its bounds or disable it"
        )
    group_ids = Groups.of(filtered_batch.non_tensor_batch["uid"]).ids  # in order of appearance
    filtered_batch = filtered_batch.select_idxs(group_ids < data.train_batch_size)
    metrics = filtered_batch.meta_info.setdefault("metrics", {})
    metrics["training/num_gen_batches"] = 1.0
    if config.logs_response_metrics:
        metrics |= filter_metrics(batch, filtered_batch, config)
    return filtered_batch


def _passes_prime_filters(batch: DataProto, config: PPOTrainerConfig) -> torch.Tensor:
    """Returns a bool per group: whether the group passes PRIME's two filters."""
    data, uids = config.data, batch.non_tensor_batch["uid"]
    groups = Groups.of(uids)
    is_preferred = torch.ones(groups.count, dtype=torch.bool)
    if data.filter_accuracy:
        scores = _metric_values(batch, "score", config)
        means = Groups.of(last_row_values(batch, uids)).mean(scores)
        is_preferred &= (means >= data.accuracy_lower_bound) & (means <= data.accuracy_upper_bound)
    if data.filter_truncate:
        lengths = split_attention_mask(batch)[1].sum(-1)
        is_preferred &= groups.max(lengths) < data.max_response_length
    return is_preferred


def _metric_values(batch: DataProto, name: str, config: PPOTrainerConfig) -> torch.Tensor:
    """Returns the metric `name` of each trajectory: its score, or an extra of the scorer."""
    if name in ("reward", "score", "seq_reward", "seq_final_reward"):
        scores: torch.Tensor = require(batch, "token_level_scores")
        return trajectory_totals(batch, scores.sum(-1))
    if name not in batch.non_tensor_batch and not has_extra(batch, name):
        raise KeyError(
            f"algorithm.filter_groups.metric={name} is not a column of the batch; use reward, or one of "
            f"{', '.join(batch.meta_info.get('reward_extra_names', [])) or 'the reward extras'}"
        )
    numbers = extra_numbers(batch, name, config.reward_model.reward_kwargs.failure_score)
    return trajectory_totals(batch, torch.tensor(numbers, dtype=torch.float64))


def unique_prompts(batch: DataProto, loader: PromptLoader) -> dict[str, np.ndarray]:
    """Returns one prompt row for each uid of the batch, as the loader made it."""
    arrays = batch.non_tensor_batch
    index_of_uid = dict(zip(arrays["uid"], arrays["dataset_index"], strict=True))
    return loader.load_batch([(int(index), uid) for uid, index in index_of_uid.items()])


def greedy_baselines(batch: DataProto, greedy_batch: DataProto) -> torch.Tensor:
    """Returns ReMax's baseline [B], the score of the greedy response to each row's prompt."""
    scores = trajectory_totals(greedy_batch, require(greedy_batch, "token_level_scores").sum(-1))
    uids = last_row_values(greedy_batch, greedy_batch.non_tensor_batch["uid"])
    score_of_uid = dict(zip(uids, scores.tolist(), strict=True))
    return torch.tensor([score_of_uid[uid] for uid in batch.non_tensor_batch["uid"]])


def resample(batch: DataProto, config: PPOTrainerConfig, *, step: int) -> DataProto:
    """Resamples the trajectories by score (PF-PPO); the result depends on `trainer.seed` and the step."""
    pf_ppo, seed = config.algorithm.pf_ppo, fold_seed(config.trainer.seed, "pf_ppo", step)
    generator = torch.Generator().manual_seed(seed)
    scores = trajectory_totals(batch, require(batch, "token_level_scores").sum(-1))
    indices = pf_ppo_rows(scores, pf_ppo.reweight_method, pf_ppo.weight_pow, generator)
    if (row_trajectories := trajectory_indices(batch)) is not None:
        indices = torch.cat(
            [(row_trajectories == trajectory).nonzero().squeeze(1) for trajectory in indices]
        )
    return batch.select_idxs(indices)
