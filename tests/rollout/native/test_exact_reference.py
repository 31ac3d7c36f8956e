"""Exact kernels on a CPU: the result of a row or a query has the same bits in any batch."""

from __future__ import annotations

import pytest
import torch

from hone.rollout.native import exact_reference
from hone.rollout.native.paged_cache import PagedCache
from hone.rollout.native.paged_layouts import Queries

ROWWISE = {
    "product": lambda x: exact_reference.linear(x, _weight(77, 96), torch.ones(77)),
    "norm": lambda x: exact_reference.add_rms_norm(x, None, _weight(1, 96)[0], 1e-6)[0],
    "gate": exact_reference.silu_mul,
    "log-softmax": lambda x: exact_reference.log_softmax(x, x[:, 0].abs() + 0.1),
}


def _weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("name", ROWWISE)
def test_a_row_has_the_same_bits_wherever_it_stands(name: str) -> None:
    x = torch.randn(150, 96)
    expected = ROWWISE[name](x)
    for begin, end in ((0, 1), (5, 6), (3, 40), (33, 65), (1, 150)):
        assert torch.equal(ROWWISE[name](x[begin:end]), expected[begin:end])


@pytest.mark.parametrize("group", [1, 3, 7])
def test_a_query_has_the_same_bits_in_any_company(group: int) -> None:
    cache = PagedCache(
        num_layers=1, kv_heads=2, head_dim=16, num_blocks=40, block_size=16, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    cache.reserve()
    assert cache._memory is not None
    cache._memory.normal_()
    table = torch.randint(1, 40, (5, 20)).int()
    q, position = torch.randn(120, 2 * group, 16), torch.randint(0, 250, (120,))
    row = torch.randint(0, 5, (120,))

    def attend(at: slice) -> torch.Tensor:
        queries = Queries(position[at], row[at], table, None)
        return exact_reference.query_attention(q[at], cache, 0, queries, scaling=0.25)

    expected = attend(slice(0, 120))
    for begin, end in ((0, 1), (5, 6), (3, 40), (1, 120)):
        assert torch.equal(attend(slice(begin, end)), expected[begin:end])
