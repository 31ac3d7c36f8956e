"""Ulysses sequence parallelism: each rank of a sequence group holds a part of the packed tokens.

Before attention, an all-to-all gives each rank all tokens for its share of the heads; after it,
another one returns its own tokens with all heads. Layouts and masks are those of the whole pack.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hone.ops.attention import AttentionOptions
from hone.ops.autograd import Context
from hone.ops.packing import PackedRows
from hone.ops.segments import SegmentLayout


@dataclass
class SplitLayout:
    """The attention layout of packed rows whose tokens are split over a group."""

    whole: SegmentLayout
    tokens: int
    """Packed tokens on all ranks, without the padding of the last part."""
    group: dist.ProcessGroup

    def to(self, device: torch.device) -> SplitLayout:
        return SplitLayout(self.whole.to(device), self.tokens, self.group)

    @torch.compiler.disable
    def attend(
        self,
        q: Tensor,  # [n, H, D], the tokens of this rank
        k: Tensor,  # [n, KV, D]
        v: Tensor,  # [n, KV, D]
        options: AttentionOptions,
    ) -> Tensor:  # [n, H, D]
        size, rank = self.group.size(), self.group.rank()
        # A key head that several ranks need is repeated.
        copies = size // math.gcd(k.shape[1], size)
        if copies > 1:
            k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
        n_heads = [x.shape[1] // size for x in (q, k, v)]
        parts = [x.unflatten(1, (size, -1)) for x in (q, k, v)]
        heads = torch.cat(parts, 2).transpose(0, 1)  # [size, n, H/size + 2 KV/size, D]
        # One all-to-all for all three, because all ranks must use the same order in backward too.
        q, k, v = _Exchange.apply(heads, self.group).flatten(0, 1)[: self.tokens].split(n_heads, 1)
        if options.sinks is not None:
            options = options._replace(sinks=options.sinks.chunk(size)[rank])
        out = self.whole.attend(q, k, v, options)
        padding = out.new_zeros(len(heads) * heads.shape[1] - self.tokens, *out.shape[1:])
        by_rank = torch.cat([out, padding]).unflatten(0, (size, -1))
        return _Exchange.apply(by_rank, self.group).transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class SplitRows(PackedRows):
    """This rank's part of packed rows: its tokens, and their targets.

    `row` and `column` are those of all ranks' targets, rank by rank; `unpack` gathers their values.
    """

    counts: tuple[int, ...]
    """Targets per rank."""
    group: dist.ProcessGroup

    def unpack(self, values: Tensor) -> Tensor:
        """Converts all ranks' values to [B, T]; a rank gets the gradient of its own values."""
        return super().unpack(_Gather.apply(values, self.counts, self.group))


def split_rows(packed: PackedRows, group: dist.ProcessGroup) -> SplitRows:
    """Returns this rank's part of packed rows; the last part is padded."""
    size, rank = group.size(), group.rank()
    tokens = len(packed.input_ids)
    width = -(-tokens // size)
    start = rank * width
    ids, positions = (
        torch.nn.functional.pad(x, (0, size * width - tokens))[start : start + width]
        for x in (packed.input_ids, packed.position_ids)
    )
    target_rank = packed.source // width
    order = target_rank.argsort(stable=True)
    counts = target_rank.bincount(minlength=size).tolist()
    first_target = sum(counts[:rank])
    own_targets = order[first_target : first_target + counts[rank]]
    return SplitRows(
        ids,
        positions,
        SplitLayout(packed.layout, tokens, group),  # type: ignore[arg-type]
        packed.source[own_targets] - start,
        packed.target[own_targets],
        packed.row[order],
        packed.column[order],
        packed.shape,
        tuple(counts),
        group,
    )


class _Exchange(torch.autograd.Function):
    """Sends part i of [size, …] to rank i; the backward pass is the same exchange."""

    @staticmethod
    def forward(ctx: Context, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts, group=group)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    """Concatenates the values of all ranks.

    Every rank computes the same loss from them, so each takes only the gradient of its own values.
    """

    @staticmethod
    def forward(
        ctx: Context, values: Tensor, counts: tuple[int, ...], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.start = sum(counts[: group.rank()])
        ctx.stop = ctx.start + len(values)
        max_count = max(counts)
        padded = values.new_zeros(max_count)
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.start : ctx.stop], None, None
