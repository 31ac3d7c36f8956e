"""Rows that cut the tail of their distribution off (top-k, top-p, min-p), among rows that do not.

A row's draw may not depend on its neighbours: those that cut nothing are drawn by the kernel that would
draw them alone, the others by sampler.py. Which are which is sent to the device once a chunk of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from hone.ops.transfer import send
from hone.rollout.contract import Sampling
from hone.rollout.native.paged_rows import RowState
from hone.rollout.native.sampler import SamplingRows, draw


@dataclass(frozen=True)
class CutRows:
    """The rows of a batch that cut something off."""

    at: Tensor  # [C] int64: which rows
    mask: Tensor  # [R] bool
    sampling: SamplingRows  # of those rows
    exact: bool

    @staticmethod
    def of(rows: Sequence[Sampling], device: torch.device, *, exact: bool) -> CutRows | None:
        """None where no row cuts anything off."""
        cuts = [row.cuts for row in rows]
        if not any(cuts):
            return None
        mask = torch.tensor(cuts)
        sampling = SamplingRows.of([row for row in rows if row.cuts], device)
        return CutRows(send(mask.nonzero().flatten(), device), send(mask, device), sampling, exact)

    def draw(self, logits: Tensor, rows: RowState, kernels: ModuleType, page_size: int) -> None:
        """A token for every row from its logits [R, V], and move the rows on.

        Each kind of row counts as finished, so stays as it is, while the other is drawn.
        """
        before = rows.finished.clone()
        rows.finished.masked_fill_(self.mask, 1)
        kernels.sample(logits, rows, page_size)
        others = rows.finished.clone()
        tokens, log_probs = self._draw_cut(logits[self.at], rows, kernels)
        rows.finished.copy_(torch.where(self.mask, before, 1))
        kernels.advance(tokens, log_probs, rows, page_size)
        rows.finished.copy_(torch.where(self.mask, rows.finished, others))

    def _draw_cut(
        self, logits: Tensor, rows: RowState, kernels: ModuleType
    ) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities [R], set where the mask is."""
        drawn, log_prob = draw(logits.float(), rows.position[self.at] + 1, self.sampling)
        if self.exact:
            log_prob = kernels.log_probs_of(logits, drawn, rows.inverse_temperature[self.at])
        tokens = torch.zeros_like(rows.token).index_copy_(0, self.at, drawn)
        whole = torch.zeros_like(rows.inverse_temperature).index_copy_(0, self.at, log_prob)
        return tokens, whole
