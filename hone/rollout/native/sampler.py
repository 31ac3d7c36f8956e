"""From logits to tokens: truncation, one draw per row, and the log-probability the trainer computes.

A draw inverts the cumulative distribution at one uniform number addressed by (seed, position).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hone.ops.counter_rng import uniform
from hone.ops.transfer import send
from hone.rollout.contract import Sampling

if TYPE_CHECKING:
    from hone.rollout.native.batch_state import BatchState

_NO_TOP_K = 1 << 40


@dataclass
class SamplingRows:
    """Sampling parameters of the rows of one step, as tensors."""

    temperature: Tensor  # [B] float32; 1 where greedy
    greedy: Tensor  # [B] bool
    top_k: Tensor  # [B] int64; huge where off
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
        return SamplingRows(
            column([r.temperature or 1.0 for r in rows], torch.float32),
            column(greedy, torch.bool),
            column([r.top_k if r.top_k > 0 else _NO_TOP_K for r in rows], torch.int64),
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
    cumulative = (_truncate(p, rows) if rows.any_truncation else p).cumsum(-1)
    # Scaled by the true total, a draw can never fall beyond the last token or on an impossible one.
    threshold = uniform(rows.seed, position).to(torch.float64) * cumulative[:, -1].double()
    token = torch.searchsorted(cumulative.double(), threshold[:, None], right=True).squeeze(-1)
    token = token.clamp(max=logits.shape[-1] - 1)
    if rows.any_greedy:
        token = torch.where(rows.greedy, logits.argmax(-1), token)
    return token, log_p.gather(-1, token[:, None]).squeeze(-1)


def _truncate(p: Tensor, rows: SamplingRows) -> Tensor:
    """Zero what top-k, top-p and min-p exclude; at least the most likely token stays.

    top-p is a share of what top-k left. A row without truncation is returned unchanged.
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


@dataclass(frozen=True)
class TruncatedSampling:
    """The rows of a device batch that have top-k, top-p or min-p; the kernels draw the other rows.

    A draw may not depend on the batch: rows without truncation are drawn by the kernel that draws them
    when no other row truncates.
    """

    at: Tensor  # [C] int64: which rows
    mask: Tensor  # [R] bool
    sampling: SamplingRows  # of those rows
    exact: bool

    @staticmethod
    def of(
        rows: Sequence[Sampling], device: torch.device, *, exact: bool
    ) -> TruncatedSampling | None:
        """None where no row truncates."""
        truncates = [row.cuts for row in rows]
        if not any(truncates):
            return None
        mask = torch.tensor(truncates)
        sampling = SamplingRows.of([row for row in rows if row.cuts], device)
        at = send(mask.nonzero().flatten(), device)
        return TruncatedSampling(at, send(mask, device), sampling, exact)

    def draw(self, logits: Tensor, rows: BatchState, kernels: ModuleType, block_size: int) -> None:
        """Draw a token for every row from its logits [R, V], and advance the rows.

        Each kind of row is marked as finished, so it stays unchanged, while the other kind is drawn.
        """
        before = rows.finished.clone()
        rows.finished.masked_fill_(self.mask, 1)
        kernels.sample(logits, rows, block_size)
        others = rows.finished.clone()
        truncated = logits[self.at]
        drawn, log_prob = draw(truncated.float(), rows.position[self.at] + 1, self.sampling)
        if self.exact:
            log_prob = kernels.log_probs_of(truncated, drawn, rows.inverse_temperature[self.at])
        tokens = torch.zeros_like(rows.token).index_copy_(0, self.at, drawn)
        log_probs = torch.zeros_like(rows.inverse_temperature).index_copy_(0, self.at, log_prob)
        rows.finished.copy_(torch.where(self.mask, before, 1))
        kernels.advance(tokens, log_probs, rows, block_size)
        rows.finished.copy_(torch.where(self.mask, rows.finished, others))
