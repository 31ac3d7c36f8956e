"""Ulysses sequence parallelism: the ranks of a sequence group hold consecutive parts of the packed rows.

Everything but attention is computed on a rank's own tokens. Around attention, one exchange gives each rank
all tokens for its share of the heads, and another one returns its own tokens with all heads. Attention
therefore sees the whole pack, with shared prompts and masks unchanged.
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
        # A key head that several ranks need is repeated; it then has fewer query heads.
        copies = size // math.gcd(k.shape[1], size)
        if copies > 1:
            k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
        widths = [x.shape[1] // size for x in (q, k, v)]
        parts = [x.unflatten(1, (size, -1)) for x in (q, k, v)]
        heads = torch.cat(parts, 2).transpose(0, 1)  # [size, n, H/size + 2 KV/size, D]
        # One exchange for all three: the ranks must exchange in the same order in the backward pass too.
        q, k, v = _Exchange.apply(heads, self.group).flatten(0, 1)[: self.tokens].split(widths, 1)
        if options.sinks is not None:
            options = options._replace(sinks=options.sinks.chunk(size)[rank])
        out = self.whole.attend(q, k, v, options)
        padding = out.new_zeros(len(heads) * heads.shape[1] - self.tokens, *out.shape[1:])
        by_rank = torch.cat([out, padding]).unflatten(0, (size, -1))
        return _Exchange.apply(by_rank, self.group).transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class SplitRows(PackedRows):
    """This rank's part of packed rows: its tokens, and the targets that they predict.

    `row` and `column` are those of all ranks' targets, rank by rank; `unpack` gathers their values.
    """

    counts: tuple[int, ...]
    """Targets per rank."""
    group: dist.ProcessGroup

    def unpack(self, values: Tensor) -> Tensor:
        """Converts this rank's values to [B, T] on every rank; each rank's gradient is that of its own."""
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
    owner = packed.source // width
    order = owner.argsort(stable=True)
    counts = owner.bincount(minlength=size).tolist()
    first = sum(counts[:rank])
    own = order[first : first + counts[rank]]
    return SplitRows(
        ids,
        positions,
        SplitLayout(packed.layout, tokens, group),  # type: ignore[arg-type]
        packed.source[own] - start,
        packed.target[own],
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

    Every rank computes the same loss from them, so that each takes only the gradient of its own values.
    """

    @staticmethod
    def forward(
        ctx: Context, values: Tensor, counts: tuple[int, ...], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.start = sum(counts[: group.rank()])
        ctx.stop = ctx.start + len(values)
        widest = max(counts)
        padded = values.new_zeros(widest)
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.start : ctx.stop], None, None
