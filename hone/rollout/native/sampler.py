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
from hone.protocol.rows import to_device
from hone.rollout.contract import Sampling

if TYPE_CHECKING:
    from hone.rollout.native.decode_step import BatchState

_NO_TOP_K = 1 << 40
"""The top-k of rows without top-k; it is larger than any vocabulary."""


@dataclass
class SamplingRows:
    """The sampling parameters of a batch of B rows, as tensors."""

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
    def of(samplings: list[Sampling], device: torch.device) -> SamplingRows:
        def to_tensor(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        greedy = [s.temperature == 0 for s in samplings]
        return SamplingRows(
            to_tensor([s.temperature or 1.0 for s in samplings], torch.float32),
            to_tensor(greedy, torch.bool),
            to_tensor([s.top_k if s.top_k > 0 else _NO_TOP_K for s in samplings], torch.int64),
            to_tensor([s.top_p for s in samplings], torch.float32),
            to_tensor([s.min_p for s in samplings], torch.float32),
            to_tensor([s.seed for s in samplings], torch.int64),
            any(greedy),
            all(greedy),
            any(s.truncates for s in samplings),
        )


def sample_tokens(
    logits: Tensor, position: Tensor, sampling: SamplingRows
) -> tuple[Tensor, Tensor]:
    """Returns tokens [B] for `position` [B], and their log-probs [B] before top-k, top-p and min-p."""
    if sampling.all_greedy:
        token = logits.argmax(-1)
        return token, torch.log_softmax(logits, -1).gather(-1, token[:, None]).squeeze(-1)
    log_p = torch.log_softmax(logits / sampling.temperature[:, None], -1)
    p = log_p.exp()
    cumulative = (_truncate(p, sampling) if sampling.any_truncation else p).cumsum(-1)
    # The threshold is scaled by the total, so that rounding selects neither a token of probability 0
    # nor an index past the vocabulary.
    threshold = uniform(sampling.seed, position).to(torch.float64) * cumulative[:, -1].double()
    token = torch.searchsorted(cumulative.double(), threshold[:, None], right=True).squeeze(-1)
    token = token.clamp(max=logits.shape[-1] - 1)
    if sampling.any_greedy:
        token = torch.where(sampling.greedy, logits.argmax(-1), token)
    return token, log_p.gather(-1, token[:, None]).squeeze(-1)


def _truncate(p: Tensor, sampling: SamplingRows) -> Tensor:
    """Returns p [B, V] with zeros for tokens that top-k, top-p or min-p exclude.

    The most likely token is never excluded. top-p applies to the distribution after top-k. Rows
    without truncation are returned unchanged.
    """
    sorted_p, order = p.sort(dim=-1, descending=True, stable=True)
    sorted_index = torch.arange(p.shape[-1], device=p.device)
    included = sorted_index < sampling.top_k[:, None]
    cumulative = (sorted_p * included).cumsum(-1)
    threshold = sampling.top_p[:, None] * cumulative[:, -1:]
    included &= (cumulative - sorted_p < threshold) | (sampling.top_p == 1)[:, None]
    included &= sorted_p >= sampling.min_p[:, None] * sorted_p[:, :1]
    included[:, 0] = True
    return torch.zeros_like(p).scatter(-1, order, sorted_p * included)


@dataclass(frozen=True)
class TruncatedSampling:
    """The rows of a batch that have top-k, top-p or min-p.

    Only these rows are sampled by `sample_tokens`; rows without truncation are always sampled by the kernels,
    so that their tokens do not depend on the other rows of the batch.
    """

    indices: Tensor  # [T] int64, indices of the T rows with truncation
    mask: Tensor  # [R] bool over all rows, True for rows with truncation
    sampling: SamplingRows  # parameters of the T rows
    exact: bool  # whether the kernels are those of exact mode

    @staticmethod
    def of(
        samplings: Sequence[Sampling], device: torch.device, *, exact: bool
    ) -> TruncatedSampling | None:
        """Returns None if no row has top-k, top-p or min-p."""
        truncates = [s.truncates for s in samplings]
        if not any(truncates):
            return None
        mask = torch.tensor(truncates)
        sampling = SamplingRows.of([s for s in samplings if s.truncates], device)
        indices = to_device(mask.nonzero().flatten(), device)
        return TruncatedSampling(indices, to_device(mask, device), sampling, exact)

    def sample(
        self, logits: Tensor, batch: BatchState, kernels: ModuleType, block_size: int
    ) -> None:
        """Samples one token per row from logits [R, V] and moves each row to its next position.

        Rows without truncation are sampled first, then rows with truncation. Finished rows are not
        sampled, so in each pass the rows of the other pass are marked as finished.
        """
        indices = self.indices
        finished_before = batch.finished.clone()
        batch.finished.masked_fill_(self.mask, 1)
        kernels.sample(logits, batch, block_size)
        finished_after_kernel = batch.finished.clone()
        truncated_logits = logits[indices]
        token, log_prob = sample_tokens(
            truncated_logits.float(), batch.position[indices] + 1, self.sampling
        )
        if self.exact:
            log_prob = kernels.token_log_probs(
                truncated_logits, token, batch.inverse_temperature[indices]
            )
        tokens = torch.zeros_like(batch.token).index_copy_(0, indices, token)
        log_probs = torch.zeros_like(batch.inverse_temperature).index_copy_(0, indices, log_prob)
        batch.finished.copy_(torch.where(self.mask, finished_before, 1))
        kernels.advance(tokens, log_probs, batch, block_size)
        batch.finished.copy_(torch.where(self.mask, batch.finished, finished_after_kernel))
