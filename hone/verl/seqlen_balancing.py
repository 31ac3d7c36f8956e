"""The functions of `verl.utils.seqlen_balancing` that split sequences into micro-batches.

All public functions but `micro_batches_by_tokens` have verl's names and arguments. The training engine splits
with rows.py instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from hone.ops.balancing import Partition
from hone.ops.balancing import calculate_workload as calculate_workload
from hone.ops.balancing import get_seqlen_balanced_partitions as get_seqlen_balanced_partitions
from hone.protocol import DataProto
from hone.verl.tensordict_utils import index_select_tensor_dict


def micro_batches_by_tokens(
    lengths: Sequence[int] | np.ndarray,
    max_token_len: int,
    *,
    min_micro_batches: int = 1,
    multiple_of: int = 1,
) -> list[Partition]:
    """Returns the row numbers of micro-batches of at most `max_token_len` tokens each.

    Token counts are balanced. The cheapest micro-batches come first and last, where a pipeline fills and
    drains. The number of micro-batches is at least `min_micro_batches` and a multiple of `multiple_of`.
    """
    token_counts = [int(length) for length in lengths]
    if token_counts and max(token_counts) > max_token_len:
        raise ValueError(
            f"a sequence of {max(token_counts)} tokens does not fit max_token_len={max_token_len}; "
            "raise the token budget (…_max_token_len_per_gpu) or shorten prompts and responses"
        )
    if not token_counts:
        return []
    count = max(min_micro_batches, ceildiv(sum(token_counts), max_token_len), 1)
    count = roundup_divisible(count, multiple_of)
    parts = _fit_budget(token_counts, max_token_len, count, multiple_of)
    costs = calculate_workload(token_counts)
    parts = sorted(sorted(part) for part in parts)
    parts.sort(key=lambda part: sum(costs[row] for row in part))
    return parts[0::2] + parts[1::2][::-1]


def _fit_budget(
    token_counts: list[int], budget: int, count: int, multiple_of: int
) -> list[Partition]:
    """Returns at least `count` partitions of at most `budget` tokens, balanced if possible."""

    def num_tokens(part: Partition) -> int:
        return sum(token_counts[row] for row in part)

    def balance(num_parts: int) -> list[Partition] | None:
        if num_parts > len(token_counts):
            raise ValueError(
                f"{len(token_counts)} sequences cannot form {num_parts} micro-batches; lower "
                "min_micro_batches or multiple_of"
            )
        partitions = get_seqlen_balanced_partitions(token_counts, num_parts, equal_size=False)
        return partitions if max(map(num_tokens, partitions)) <= budget else None

    if (parts := balance(count)) is not None:
        return parts
    bins = _first_fit(token_counts, budget)
    count = roundup_divisible(max(count, len(bins)), multiple_of)
    if (parts := balance(count)) is not None:
        return parts
    while len(bins) < count:  # bins of `_first_fit`, and so their halves, fit into the budget
        fullest = max((part for part in bins if len(part) > 1), key=num_tokens)
        bins.remove(fullest)
        bins += [fullest[::2], fullest[1::2]]
    return bins


def _first_fit(token_counts: list[int], budget: int) -> list[Partition]:
    """Packs rows into bins of at most `budget` tokens by first-fit decreasing."""
    bins: list[Partition] = []
    free_tokens: list[int] = []
    for row in sorted(range(len(token_counts)), key=lambda row: -token_counts[row]):
        for index, tokens_left in enumerate(free_tokens):
            if tokens_left >= token_counts[row]:
                bins[index].append(row)
                free_tokens[index] -= token_counts[row]
                break
        else:
            bins.append([row])
            free_tokens.append(budget - token_counts[row])
    return bins


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Returns the inverse permutation of `idx_map`."""
    reverse = [0] * len(idx_map)
    for index, row in enumerate(idx_map):
        reverse[row] = index
    return reverse


def log_seqlen_unbalance(
    seqlen_list: Sequence[int] | np.ndarray, partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Returns metrics of the number of tokens per rank, before and after balancing."""
    lengths = np.asarray(seqlen_list, dtype=np.int64)
    before = [int(part.sum()) for part in np.array_split(lengths, len(partitions))]
    after = [int(lengths[list(part)].sum()) for part in partitions]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(after) / len(after),
    }


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
    group_indices = micro_batches_by_tokens(
        group_lengths, max_token_len, min_micro_batches=min_micro_batches, multiple_of=multiple
    )
    if dist.is_initialized() and same_micro_num_in_dp and dp_group is not None:
        count = torch.tensor([len(group_indices)], device=batch.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=dp_group)
        group_indices = micro_batches_by_tokens(
            group_lengths, max_token_len, min_micro_batches=int(count), multiple_of=multiple
        )
    size = force_group_size
    row_indices = [
        [group * size + i for group in groups for i in range(size)] for groups in group_indices
    ]
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
    order = list(itertools.chain.from_iterable(batch_idx_list))
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
