"""All ranks' rows on every rank, over a torch process group.

Ranks may hold different numbers of rows. Leaves out ray: groups of the controller collect instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hone.protocol.errors import ProtocolError

if TYPE_CHECKING:
    from hone.protocol.data_proto import DataProto


def all_gather_data_proto(data: DataProto, process_group: dist.ProcessGroup | None = None) -> None:
    """Replace the batch, in place, by the rows of all ranks in rank order."""
    world = dist.get_world_size(process_group)
    if world == 1:
        return
    kind = type(data)
    light = kind(None, data.non_tensor_batch, data.meta_info)
    widths = {} if data.batch is None else {k: tuple(v.shape[1:]) for k, v in data.batch.items()}
    told = [(light, len(data), widths)] * world
    dist.all_gather_object(told, told[0], group=process_group)
    if any(seen[2] != widths for seen in told):
        raise ProtocolError(f"ranks hold different tensor columns: {[seen[2] for seen in told]}")
    rows = [seen[1] for seen in told]
    joined = kind.concat([seen[0] for seen in told])
    tensors = {}
    if data.batch is not None:
        for name in sorted(widths):
            pieces = _gather_rows(data.batch[name], rows, process_group)
            tensors[name] = torch.cat(pieces)
        joined = kind.from_dict(tensors, joined.non_tensor_batch, joined.meta_info)
    data.batch, data.non_tensor_batch = joined.batch, joined.non_tensor_batch
    data.meta_info = joined.meta_info


def _gather_rows(
    tensor: torch.Tensor, rows: list[int], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    # Collectives want equal shapes: send as many rows as the longest rank has, keep the real ones.
    sent = tensor.new_zeros((max(rows), *tensor.shape[1:]))
    sent[: len(tensor)] = tensor
    received = [torch.empty_like(sent) for _ in rows]
    dist.all_gather(received, sent, group=group)
    return [piece[:count] for piece, count in zip(received, rows, strict=True)]
