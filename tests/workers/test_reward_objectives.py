"""The losses of reward models against numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hone.algorithms.aggregation import BatchCounts, batch_counts
from hone.protocol import DataProto
from hone.workers.reward_objectives import PairObjective, StepObjective


def batch(mask: list[list[int]], **columns: list[list[float]] | list[float]) -> DataProto:
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    return DataProto.from_dict({"response_mask": torch.tensor(mask), **tensors})


def test_hard_and_soft_labels_give_the_cross_entropy_of_the_two_logits() -> None:
    scores = torch.tensor([[2.0, 9.0], [-1.0, 0.5]], dtype=torch.float64)
    data = batch([[1, 0], [1, 1]], labels=[[1.0, 0.0], [0.0, 0.3]])
    terms = StepObjective()({"scores": scores}, data)
    good = [1 / (1 + math.exp(-x)) for x in (2.0, -1.0, 0.5)]
    by_hand = [
        -math.log(good[0]),
        -math.log(1 - good[1]),
        -0.3 * math.log(good[2]) - 0.7 * math.log(1 - good[2]),
    ]
    assert float(terms.loss) == pytest.approx(sum(by_hand) / 3, rel=1e-12)
    assert by_hand == pytest.approx([0.126928011, 0.313261688, 0.824076984], rel=1e-8)
    assert float(terms.means["train/accuracy"]) == pytest.approx(2 / 3)


def test_the_pair_loss_depends_on_the_score_gap_minus_the_margin() -> None:
    scores = torch.tensor([[0.0, 1.5], [0.5, 7.0], [2.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    data = batch([[0, 1], [1, 0], [1, 0], [0, 1]], margin=[0.25, 0.25, 0.0, 0.0])
    terms = PairObjective()({"scores": scores}, data)
    by_hand = [math.log1p(math.exp(-(1.5 - 0.5 - 0.25))), math.log1p(math.exp(-(2.0 - 3.0)))]
    assert by_hand == pytest.approx([0.386871005, 1.313261688], rel=1e-8)
    assert float(terms.loss) == pytest.approx(sum(by_hand) / 2, rel=1e-12)
    assert float(terms.means["train/accuracy"]) == 0.5
    assert float(terms.means["train/score_gap"]) == 0.0


def test_the_shares_of_micro_batches_add_up_to_the_loss_of_the_mini_batch() -> None:
    scores = torch.tensor([[1.0], [0.0], [-1.0], [2.0]], dtype=torch.float64)
    data = batch([[1]] * 4, margin=[0.0] * 4)
    objective = PairObjective()
    whole = float(objective({"scores": scores}, data).loss)
    with batch_counts(BatchCounts(tokens=4.0, sequences=4.0, width=1.0)):
        parts = [
            float(objective({"scores": scores[rows]}, data.select_idxs(rows)).loss)
            for rows in ([0, 1], [2, 3])
        ]
    assert sum(parts) == pytest.approx(whole, rel=1e-12)


def test_a_dummy_row_has_a_loss_with_a_graph() -> None:
    scores = torch.zeros(1, 3, requires_grad=True)
    terms = PairObjective()({"scores": scores}, batch([[0, 0, 0]], margin=[0.0]))
    terms.loss.backward()
    assert float(terms.loss.detach()) == 0.0
    assert scores.grad is not None
