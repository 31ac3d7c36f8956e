"""Ulysses sequence parallelism: each rank of a sequence group holds a part of the packed tokens.

Before attention, an all-to-all gives each rank all tokens for its share of the heads. After
attention, another all-to-all gives each rank its own tokens with all heads. Layouts and masks are
those of all packed tokens. In shapes, n is the number of tokens of a rank; attention.py defines the other
letters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hone.ops.attention import AttentionOptions, SegmentLayout
from hone.ops.autograd import Context
from hone.ops.rows import PackedRows


@dataclass
class SplitLayout:
    """The attention layout of packed rows whose tokens are split over a group."""

    packed_layout: SegmentLayout
    num_tokens: int
    """Number of packed tokens on all ranks, without the padding of the last rank."""
    group: dist.ProcessGroup

    def to(self, device: torch.device) -> SplitLayout:
        return SplitLayout(self.packed_layout.to(device), self.num_tokens, self.group)

    @torch.compiler.disable
    def attend(
        self,
        q: Tensor,  # [n, H, D], the tokens of this rank
        k: Tensor,  # [n, KV, D]
        v: Tensor,  # [n, KV, D]
        options: AttentionOptions,
    ) -> Tensor:  # [n, H, D]
        size, rank = self.group.size(), self.group.rank()
        # Key heads are repeated if there are too few for all ranks.
        kv_repeats = size // math.gcd(k.shape[1], size)
        if kv_repeats > 1:
            k, v = (x.repeat_interleave(kv_repeats, 1) for x in (k, v))
        heads_per_rank = [x.shape[1] // size for x in (q, k, v)]
        parts = [x.unflatten(1, (size, -1)) for x in (q, k, v)]
        heads = torch.cat(parts, 2).transpose(0, 1)  # [size, n, H/size + 2 KV/size, D]
        # One all-to-all for q, k and v: the order of three could differ between ranks in the backward pass.
        q, k, v = (
            _AllToAll.apply(heads, self.group)
            .flatten(0, 1)[: self.num_tokens]
            .split(heads_per_rank, 1)
        )
        if options.sinks is not None:
            options = options._replace(sinks=options.sinks.chunk(size)[rank])
        out = self.packed_layout.attend(q, k, v, options)
        padding = out.new_zeros(len(heads) * heads.shape[1] - self.num_tokens, *out.shape[1:])
        out_by_rank = torch.cat([out, padding]).unflatten(0, (size, -1))
        return _AllToAll.apply(out_by_rank, self.group).transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class SplitRows(PackedRows):
    """This rank's part of packed rows: its tokens and their targets.

    `row` and `response_position` have the targets of all ranks, rank by rank; `unpack` gathers their values.
    """

    targets_per_rank: tuple[int, ...]
    """The number of targets of each rank."""
    group: dist.ProcessGroup

    def unpack(self, values: Tensor) -> Tensor:
        """Gathers the values of all ranks to [B, T]; a rank gets the gradient of its own values only."""
        return super().unpack(_Gather.apply(values, self.targets_per_rank, self.group))


def split_rows(packed: PackedRows, group: dist.ProcessGroup) -> SplitRows:
    """Returns this rank's part of packed rows; the part of the last rank is padded."""
    size, rank = group.size(), group.rank()
    num_tokens = len(packed.input_ids)
    tokens_per_rank = -(-num_tokens // size)
    start = rank * tokens_per_rank
    ids, positions = (
        torch.nn.functional.pad(x, (0, size * tokens_per_rank - num_tokens))[
            start : start + tokens_per_rank
        ]
        for x in (packed.input_ids, packed.position_ids)
    )
    target_rank = packed.predicting_position // tokens_per_rank
    order = target_rank.argsort(stable=True)
    targets_per_rank = target_rank.bincount(minlength=size).tolist()
    first_target = sum(targets_per_rank[:rank])
    own_targets = order[first_target : first_target + targets_per_rank[rank]]
    return SplitRows(
        ids,
        positions,
        SplitLayout(packed.layout, num_tokens, group),  # type: ignore[arg-type]
        packed.predicting_position[own_targets] - start,
        packed.target[own_targets],
        packed.row[order],
        packed.response_position[order],
        packed.shape,
        tuple(targets_per_rank),
        group,
    )


class _AllToAll(torch.autograd.Function):
    """Sends parts[i] to rank i; the backward pass is the same all-to-all."""

    @staticmethod
    def forward(ctx: Context, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts, group=group)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    """Concatenates the values of all ranks.

    Every rank computes the same loss from all values, so the gradient of a rank's own values is complete
    without a sum over ranks.
    """

    @staticmethod
    def forward(
        ctx: Context, values: Tensor, targets_per_rank: tuple[int, ...], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.start = sum(targets_per_rank[: group.rank()])
        ctx.stop = ctx.start + len(values)
        max_count = max(targets_per_rank)
        padded = values.new_zeros(max_count)
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in targets_per_rank]
        dist.all_gather(parts, padded, group=group)
        return torch.cat(
            [part[:count] for part, count in zip(parts, targets_per_rank, strict=True)]
        )

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.start : ctx.stop], None, None
