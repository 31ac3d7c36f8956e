"""From logits to tokens: truncation, one draw a row, and the log-probability the trainer would give.

Drawing inverts the cumulative distribution at one uniform number addressed by (seed, position).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.ops.counter_rng import uniform
from hone.rollout.contract import Sampling


@dataclass
class SamplingRows:
    """Sampling parameters of the rows of one step, as tensors."""

    temperature: Tensor  # [B] float32; 1 where greedy
    greedy: Tensor  # [B] bool
    top_k: Tensor  # [B] int64; vocabulary size where off
    top_p: Tensor  # [B] float32
    min_p: Tensor  # [B] float32
    seed: Tensor  # [B] int64
    any_greedy: bool
    all_greedy: bool
    any_truncation: bool

    @staticmethod
    def of(rows: list[Sampling], device: torch.device) -> SamplingRows:
        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        greedy = [r.temperature == 0 for r in rows]
        huge = 1 << 40
        return SamplingRows(
            column([r.temperature or 1.0 for r in rows], torch.float32),
            column(greedy, torch.bool),
            column([r.top_k if r.top_k > 0 else huge for r in rows], torch.int64),
            column([r.top_p for r in rows], torch.float32),
            column([r.min_p for r in rows], torch.float32),
            column([r.seed for r in rows], torch.int64),
            any(greedy),
            all(greedy),
            any(r.cuts for r in rows),
        )


def draw(logits: Tensor, position: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Next token [B] and its log-probability [B] at the rows' temperatures."""
    if rows.all_greedy:
        token = logits.argmax(-1)
        return token, torch.log_softmax(logits, -1).gather(-1, token[:, None]).squeeze(-1)
    log_p = torch.log_softmax(logits / rows.temperature[:, None], -1)
    p = log_p.exp()
    kept = _truncate(p, rows) if rows.any_truncation else p
    cumulative = kept.cumsum(-1)
    # Scaled by the true total, a draw can never fall beyond the last token or on an impossible one.
    threshold = uniform(rows.seed, position).to(torch.float64) * cumulative[:, -1].double()
    token = torch.searchsorted(cumulative.double(), threshold[:, None], right=True).squeeze(-1)
    token = token.clamp(max=logits.shape[-1] - 1)
    if rows.any_greedy:
        token = torch.where(rows.greedy, logits.argmax(-1), token)
    return token, log_p.gather(-1, token[:, None]).squeeze(-1)


def _truncate(p: Tensor, rows: SamplingRows) -> Tensor:
    """Zero what top-k, top-p and min-p cut off; at least the most likely token stays.

    top-p is a share of what top-k left. A row that cuts nothing off comes back as it is.
    """
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(p.shape[-1], device=p.device)
    keep = rank < rows.top_k[:, None]
    left = (ordered * keep).cumsum(-1)
    share = rows.top_p[:, None] * left[:, -1:]
    keep &= (left - ordered < share) | (rows.top_p == 1)[:, None]
    keep &= ordered >= rows.min_p[:, None] * ordered[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(p).scatter(-1, order, ordered * keep)
