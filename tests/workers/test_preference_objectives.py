"""The objectives of preferences: one loss per response, its gradient, and ranks without rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hone.algorithms.preference_losses import LossFunction
from hone.config.preference import PreferenceLossConfig
from hone.protocol import DataProto
from hone.workers.preference_objectives import PairedObjective

MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]])


def objective(name: str, **config: Any) -> PairedObjective:
    return PairedObjective(LossFunction(name), PreferenceLossConfig(**config))


def batch(mask: Tensor = MASK) -> DataProto:
    return DataProto.from_dict(
        {
            "response_mask": mask,
            "ref_response_log_prob": torch.tensor([-3.0, -1.0, -4.0, -2.0]),
            "margin": torch.zeros(4),
        }
    )


def test_a_response_is_counted_once_at_its_last_token() -> None:
    mask = objective("sigmoid").mask(batch())
    assert mask.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0]]


def test_the_loss_raises_the_chosen_tokens_and_lowers_the_rejected_ones() -> None:
    log_probs = (-torch.ones(4, 3)).requires_grad_()
    output = objective("sigmoid", beta=0.5)({"log_probs": log_probs}, batch())
    # log-ratios: −2 + 3 = 1 and −1 + 1 = 0; −3 + 4 = 1 and −2 + 2 = 0
    expected = torch.nn.functional.softplus(torch.tensor(-0.5))
    assert float(output.loss.detach()) == pytest.approx(float(expected))
    assert float(output.means["train/rewards/margins"]) == pytest.approx(0.5)
    assert float(output.means["train/logps/chosen"]) == pytest.approx(-2.5)
    output.loss.backward()
    assert log_probs.grad is not None
    slope = 0.5 * float(torch.sigmoid(torch.tensor(-0.5))) / 2
    signs = torch.tensor([[-1.0], [1.0], [-1.0], [1.0]])
    torch.testing.assert_close(log_probs.grad, signs * slope * MASK)


def test_a_rank_without_rows_adds_nothing() -> None:
    log_probs = torch.zeros(4, 3, requires_grad=True)
    output = objective("sigmoid")({"log_probs": log_probs}, batch(torch.zeros_like(MASK)))
    output.loss.backward()
    assert log_probs.grad is not None
    assert float(output.loss.detach()) == float(log_probs.grad.abs().sum()) == 0.0
