"""Requests with and without truncation in one batch are sampled as they are alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hone.rollout.contract import Sampling
from hone.rollout.native import exact_reference, kernels_reference
from hone.rollout.native.decode_step import BatchState
from hone.rollout.native.sampler import SamplingRows, TruncatedSampling, sample_tokens


def row_state(rows: list[Sampling]) -> BatchState:
    state = BatchState.empty(len(rows), 20, 5, torch.device("cpu"))
    state.seed.copy_(torch.tensor([r.seed for r in rows]))
    state.position.fill_(10)
    state.max_length.fill_(100)
    state.finished.zero_()
    heat = torch.tensor([r.temperature for r in rows])
    state.inverse_temperature.copy_(1.0 / torch.where(heat == 0, 1.0, heat))
    state.greedy.copy_(heat == 0)
    return state


@pytest.mark.parametrize("kernels", [kernels_reference, exact_reference])
def test_each_row_is_drawn_as_the_rows_of_its_kind_are(kernels: Any) -> None:
    rows = [
        Sampling(5, 0.0 if i % 5 == 0 else 0.7, i, **({"top_k": 5} if i % 3 == 0 else {}))
        for i in range(30)
    ]
    logits = 2 * torch.randn(30, 20_000, generator=torch.Generator().manual_seed(0))
    state, alone = row_state(rows), row_state(rows)
    state.finished[[1, 3]] = 1  # one finished row with truncation, one without
    exact = kernels is exact_reference
    truncated = TruncatedSampling.of(rows, torch.device("cpu"), exact=exact)
    assert truncated is not None
    truncated.sample(logits, state, kernels, 16)
    kernels.sample(logits, alone, 16)
    truncating = [i for i, row in enumerate(rows) if row.truncates]
    assert truncating == [i for i in range(0, 30, 3) if i % 5]  # greedy rows need no truncation
    of = SamplingRows.of([rows[i] for i in truncating], torch.device("cpu"))
    tokens, log_probs = sample_tokens(logits[truncating], torch.full((len(truncating),), 11), of)
    if exact:
        log_probs = kernels.token_log_probs(
            logits[truncating], tokens, state.inverse_temperature[truncating]
        )
    alone.tokens_out[truncating, 0] = tokens.int()
    alone.log_probs_out[truncating, 0] = log_probs
    running = [i for i in range(30) if i not in (1, 3)]
    assert torch.equal(state.tokens_out[running, 0], alone.tokens_out[running, 0])
    assert torch.equal(state.log_probs_out[running, 0], alone.log_probs_out[running, 0])
    assert state.num_sampled.tolist() == [int(i in running) for i in range(30)]
    assert state.finished.tolist() == [int(i not in running) for i in range(30)]
    assert state.position.tolist() == [11 if i in running else 10 for i in range(30)]


def test_without_truncation_the_kernels_draw_every_row() -> None:
    rows = [Sampling(5, 0.0, 1, top_k=3), Sampling(5, 1.0, 2)]
    assert TruncatedSampling.of(rows, torch.device("cpu"), exact=False) is None
