"""Packs rows for the training engine, and maps its results back to the padded batch.

Packed rows are concatenated without padding. A prompt that several rows share is packed once, and
their responses are its children. Only tokens that predict a response token have a target.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.ops.groups import first_equal
from hone.ops.masked import split_at_response
from hone.ops.segments import SegmentLayout
from hone.ops.transfer import send


@dataclass(frozen=True)
class PackedRows:
    """Concatenated token rows, and the position of each target in the padded batch."""

    input_ids: Tensor  # [N] int64
    position_ids: Tensor  # [N] int64
    layout: SegmentLayout
    source: Tensor  # [M] packed position whose hidden state predicts the target
    target: Tensor  # [M] response token ids
    row: Tensor  # [M] batch row of each target
    column: Tensor  # [M] response column of each target
    shape: tuple[int, int]  # (B, T) of the padded responses
    places: Tensor | None = field(default=None, kw_only=True)
    """The packed position [B, P + T] of each token of the padded batch, -1 for none."""
    experts: Tensor | None = field(default=None, kw_only=True)
    """The experts [N, layers, k] to replay, -1 for none."""

    def with_experts(self, experts: Tensor) -> PackedRows:
        """Adds the experts [B, P + T, layers, k] of the padded batch."""
        assert self.places is not None
        is_packed = self.places >= 0
        packed = experts.new_full((len(self.input_ids), *experts.shape[2:]), -1)
        packed[self.places[is_packed]] = experts[is_packed]
        return replace(self, experts=packed)

    def padded(self, values: Tensor, padding: float) -> Tensor:
        """Converts values [N, …] of packed tokens to [B, P + T, …]."""
        assert self.places is not None
        out = values[self.places.clamp(min=0)]
        out[self.places < 0] = padding
        return out

    def unpack(self, values: Tensor) -> Tensor:
        """Converts values [M] to [B, T], with zeros outside the response mask."""
        out = values.new_zeros(self.shape)
        return out.index_put((self.row, self.column), values)

    def to(self, device: torch.device) -> PackedRows:
        tensors: dict[str, Any] = {
            name: send(value, device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, layout=self.layout.to(device), **tensors)


def pack_rows(
    prompts: Tensor,  # [B, P] left-padded
    responses: Tensor,  # [B, T] right-padded
    attention_mask: Tensor,  # [B, P + T]
    response_mask: Tensor,  # [B, T]
    *,
    share_prompts: bool,
    with_places: bool = False,
) -> PackedRows:
    """Packs the rows of a padded batch; with `share_prompts`, equal prompts are packed once."""
    batch, prompt_width = prompts.shape
    parts = split_at_response(attention_mask, responses)
    prompt_lengths, response_lengths = (part.sum(1).tolist() for part in parts)
    if any(length == 0 for length in prompt_lengths):
        raise ValueError("a row has an empty prompt, so no token predicts its response")
    prompts_np, responses_np = prompts.cpu().numpy(), responses.cpu().numpy()
    rows = [
        (
            prompts_np[i, prompt_width - prompt_lengths[i] :],
            # The last token predicts no target, so it is not packed.
            responses_np[i, : max(response_lengths[i] - 1, 0)],
        )
        for i in range(batch)
    ]
    first = first_equal([prompt.tobytes() for prompt, _ in rows])
    # A prompt of only one row is no separate segment: one causal segment is cheaper than two.
    is_shared = share_prompts and len(set(first)) < batch
    ids, positions, layout, prompt_end, response_start = (
        _pack_shared(rows, first) if is_shared else _pack_whole(rows)
    )
    row, column = (index.cpu() for index in response_mask.nonzero(as_tuple=True))
    row_np, column_np = row.numpy(), column.numpy()
    source = np.where(column_np == 0, prompt_end[row_np], response_start[row_np] + column_np - 1)
    return PackedRows(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        layout,
        torch.from_numpy(source),
        torch.from_numpy(responses_np[row_np, column_np]),
        row,
        column,
        (batch, responses.shape[1]),
        places=_packed_positions(parts, prompt_end, response_start) if with_places else None,
    )


def _packed_positions(
    parts: tuple[Tensor, Tensor], prompt_end: np.ndarray, response_start: np.ndarray
) -> Tensor:  # [B, P + T]
    """Returns the packed position of each token of the padded batch; the last token has none."""
    in_prompt, in_response = (part.cpu().bool().numpy() for part in parts)
    width, length = in_prompt.shape[1], in_response.shape[1]
    prompt = prompt_end[:, None] - np.arange(width)[::-1]
    response = response_start[:, None] + np.arange(length)
    is_packed = np.arange(length) < in_response.sum(1, keepdims=True) - 1
    places = [np.where(in_prompt, prompt, -1), np.where(is_packed, response, -1)]
    return torch.from_numpy(np.concatenate(places, 1))


def shared_with_the_row_before(prompts: Tensor, attention_mask: Tensor) -> list[int]:
    """Returns, per row, the prompt length if the previous row has the same prompt, else 0."""
    width = prompts.shape[1]
    mask = attention_mask[:, :width]
    is_same = (prompts[1:] == prompts[:-1]).all(1) & (mask[1:] == mask[:-1]).all(1)
    return [0, *(mask[1:].sum(1) * is_same).tolist()][: len(prompts)]


_Packed = tuple[np.ndarray, np.ndarray, SegmentLayout, np.ndarray, np.ndarray]
"""Ids, positions, layout, and per row the end of its prompt and the start of its response."""
_Rows = list[tuple[np.ndarray, np.ndarray]]


def _pack_whole(rows: _Rows) -> _Packed:
    """Packs each row as one segment of prompt and response."""
    lengths = np.array([len(p) + len(r) for p, r in rows])
    response = np.cumsum(lengths) - lengths + np.array([len(p) for p, _ in rows])
    ids = np.concatenate([part for row in rows for part in row])
    positions = np.concatenate([np.arange(n) for n in lengths])
    return ids, positions, SegmentLayout(lengths.tolist(), []), response - 1, response


def _pack_shared(rows: _Rows, first: list[int]) -> _Packed:
    """Packs each distinct prompt as a root segment and each response as a child of its prompt."""
    root_rows = sorted(set(first))
    root_index = {row: i for i, row in enumerate(root_rows)}
    parents = np.array([root_index[row] for row in first])
    roots = [rows[row][0] for row in root_rows]
    root_lengths = np.array([len(p) for p in roots])
    root_end = np.cumsum(root_lengths)
    child_lengths = np.array([len(r) for _, r in rows])
    ids = np.concatenate([*roots, *(r for _, r in rows)])
    positions = np.concatenate(
        [
            *(np.arange(n) for n in root_lengths),
            *(np.arange(n) + root_lengths[p] for n, p in zip(child_lengths, parents, strict=True)),
        ]
    )
    children = list(zip(parents.tolist(), child_lengths.tolist(), strict=True))
    layout = SegmentLayout(root_lengths.tolist(), children)
    child_start = root_end[-1] + np.cumsum(child_lengths) - child_lengths
    return ids, positions, layout, (root_end - 1)[parents], child_start
