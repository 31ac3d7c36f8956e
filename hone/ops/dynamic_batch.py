"""Micro-batches by token count, with verl's names and arguments (`verl.utils.seqlen_balancing`).

The training engine does not use them; it splits mini-batches with `hone.ops.packing`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from hone.ops.balancing import (
    Partition,
    calculate_workload,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    micro_batches_by_tokens,
)
from hone.ops.balancing import log_seqlen_unbalance as log_seqlen_unbalance
from hone.protocol import DataProto
from hone.protocol.tensordicts import index_select_tensor_dict

karmarkar_karp = get_seqlen_balanced_partitions


def ceildiv(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(a // -b)


def roundup_divisible(a: int, b: int) -> int:
    """Returns the smallest multiple of b that is at least a."""
    return ceildiv(a, b) * b


def rearrange_micro_batches(
    batch: TensorDict,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[TensorDict], list[Partition]]:
    """Returns micro-batches of at most `max_token_len` tokens, and the row numbers of each.

    Token counts are always balanced; groups of `force_group_size` consecutive rows stay together.
    """
    ids = batch["input_ids"]
    counts = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(1)
    lengths = np.asarray(counts.cpu().numpy(), dtype=np.int64)
    if len(lengths) % force_group_size:
        raise AssertionError(
            f"{len(lengths)} rows are not a multiple of force_group_size={force_group_size}"
        )
    group_lengths = lengths.reshape(-1, force_group_size).sum(1)
    min_micro_batches, multiple = min_num_micro_batch or 1, num_batches_divided_by or 1
    parts = micro_batches_by_tokens(
        group_lengths, max_token_len, min_micro_batches=min_micro_batches, multiple_of=multiple
    )
    if dist.is_initialized() and same_micro_num_in_dp and dp_group is not None:
        count = torch.tensor([len(parts)], device=batch.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=dp_group)
        parts = micro_batches_by_tokens(
            group_lengths, max_token_len, min_micro_batches=int(count), multiple_of=multiple
        )
    size = force_group_size
    row_indices = [[g * size + i for g in part for i in range(size)] for part in parts]
    micro_batches = [index_select_tensor_dict(batch, indices) for indices in row_indices]
    return [micro_batch for micro_batch in micro_batches if micro_batch is not None], row_indices


def prepare_dynamic_batch(
    data: DataProto,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[DataProto], list[Partition]]:
    """Applies `rearrange_micro_batches` to a DataProto."""
    _, row_indices = rearrange_micro_batches(
        data.batch,
        max_token_len,
        dp_group,
        num_batches_divided_by,
        same_micro_num_in_dp,
        min_num_micro_batch,
    )
    return [data.select_idxs(indices) for indices in row_indices], row_indices


def restore_dynamic_batch(data: Tensor, batch_idx_list: Sequence[Partition]) -> Tensor:
    """Restores the original order of concatenated micro-batch rows."""
    order = list(chain.from_iterable(batch_idx_list))
    if len(order) != len(data):
        raise AssertionError(f"{len(order)} row numbers for {len(data)} rows")
    reverse_order = get_reverse_idx(order)
    if data.is_nested:
        parts = data.unbind()
        return torch.nested.as_nested_tensor([parts[i] for i in reverse_order], layout=torch.jagged)
    return data[torch.tensor(reverse_order, device=data.device)]


def get_group_balanced_partitions(
    seqlen_list: Sequence[int], uid_list: Sequence[Hashable], k_partitions: int
) -> list[Partition]:
    """Returns partitions of similar cost with equally many groups (rows of one uid)."""
    groups: dict[Hashable, Partition] = {}
    for row, uid in enumerate(uid_list):
        groups.setdefault(uid, []).append(row)
    if len(seqlen_list) != len(uid_list) or len(groups) < k_partitions:
        raise AssertionError(
            f"{len(seqlen_list)} lengths with {len(uid_list)} uids in {len(groups)} groups cannot "
            f"form {k_partitions} partitions"
        )
    costs, group_rows = calculate_workload(seqlen_list), list(groups.values())
    parts = get_seqlen_balanced_partitions(
        [sum(costs[row] for row in rows) for rows in group_rows], k_partitions, equal_size=True
    )
    return [sorted(row for group in part for row in group_rows[group]) for part in parts]
