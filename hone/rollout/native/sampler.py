"""Sampling with temperature, top-k, top-p and min-p.

Tokens are sampled by inverse CDF from one uniform number, which depends only on (seed, position).
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
    """Sampling parameters per row of a batch, as tensors."""

    temperature: Tensor  # [B] float32; 1 where greedy
    greedy: Tensor  # [B] bool
    top_k: Tensor  # [B] int64; very large if disabled
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
            any(r.truncates for r in rows),
        )


def sample_tokens(logits: Tensor, position: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Returns the next tokens [B] and their log-probs [B], before top-k, top-p and min-p."""
    if rows.all_greedy:
        token = logits.argmax(-1)
        return token, torch.log_softmax(logits, -1).gather(-1, token[:, None]).squeeze(-1)
    log_p = torch.log_softmax(logits / rows.temperature[:, None], -1)
    p = log_p.exp()
    cumulative = (_truncate(p, rows) if rows.any_truncation else p).cumsum(-1)
    # Scaling by the actual total excludes tokens of probability 0 and indices past the vocabulary.
    threshold = uniform(rows.seed, position).to(torch.float64) * cumulative[:, -1].double()
    token = torch.searchsorted(cumulative.double(), threshold[:, None], right=True).squeeze(-1)
    token = token.clamp(max=logits.shape[-1] - 1)
    if rows.any_greedy:
        token = torch.where(rows.greedy, logits.argmax(-1), token)
    return token, log_p.gather(-1, token[:, None]).squeeze(-1)


def _truncate(p: Tensor, rows: SamplingRows) -> Tensor:
    """Zeroes tokens that top-k, top-p or min-p exclude, but never the most likely token.

    top-p applies to the distribution after top-k. Rows without truncation are returned unchanged.
    """
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(p.shape[-1], device=p.device)
    keep = rank < rows.top_k[:, None]
    cumulative = (ordered * keep).cumsum(-1)
    threshold = rows.top_p[:, None] * cumulative[:, -1:]
    keep &= (cumulative - ordered < threshold) | (rows.top_p == 1)[:, None]
    keep &= ordered >= rows.min_p[:, None] * ordered[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(p).scatter(-1, order, ordered * keep)


@dataclass(frozen=True)
class TruncatedSampling:
    """The rows of a batch that have top-k, top-p or min-p.

    The kernels sample all other rows, as in a batch without truncation: a sampled token must not depend
    on the batch.
    """

    indices: Tensor  # [C] int64, of the rows
    mask: Tensor  # [R] bool
    sampling: SamplingRows  # parameters of the rows
    exact: bool

    @staticmethod
    def of(
        rows: Sequence[Sampling], device: torch.device, *, exact: bool
    ) -> TruncatedSampling | None:
        """Returns None if no row truncates."""
        truncates = [row.truncates for row in rows]
        if not any(truncates):
            return None
        mask = torch.tensor(truncates)
        sampling = SamplingRows.of([row for row in rows if row.truncates], device)
        indices = send(mask.nonzero().flatten(), device)
        return TruncatedSampling(indices, send(mask, device), sampling, exact)

    def sample(
        self, logits: Tensor, rows: BatchState, kernels: ModuleType, block_size: int
    ) -> None:
        """Samples one token per row from logits [R, V] and advances the rows.

        Rows without truncation are sampled first, then rows with it. Finished rows are not sampled, so the
        other rows are marked as finished meanwhile.
        """
        indices = self.indices
        finished_before = rows.finished.clone()
        rows.finished.masked_fill_(self.mask, 1)
        kernels.sample(logits, rows, block_size)
        finished_plain = rows.finished.clone()
        truncated = logits[indices]
        token, log_prob = sample_tokens(
            truncated.float(), rows.position[indices] + 1, self.sampling
        )
        if self.exact:
            log_prob = kernels.log_probs_of(truncated, token, rows.inverse_temperature[indices])
        tokens = torch.zeros_like(rows.token).index_copy_(0, indices, token)
        log_probs = torch.zeros_like(rows.inverse_temperature).index_copy_(0, indices, log_prob)
        rows.finished.copy_(torch.where(self.mask, finished_before, 1))
        kernels.advance(tokens, log_probs, rows, block_size)
        rows.finished.copy_(torch.where(self.mask, rows.finished, finished_plain))
