"""Keys of shared prompts are repeated before each response; their gradients are summed."""

from __future__ import annotations

import torch

from hone.ops.shared_keys import SharedKeys

CPU = torch.device("cpu")


def test_each_response_sees_its_prompt_and_itself() -> None:
    keys = SharedKeys.build([2, 3], [(1, 2), (0, 1), (1, 0)], CPU)
    assert keys.cu_queries.tolist() == [0, 2, 5, 7, 8]
    assert keys.cu_keys.tolist() == [0, 2, 5, 10, 13]
    assert (keys.max_queries, keys.max_keys) == (3, 5)
    k = torch.arange(8.0).view(8, 1, 1)
    repeated, _ = keys.repeat(k, k)
    assert repeated.flatten().tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 0, 1, 7]


def test_without_children_keys_stay_where_they_lie() -> None:
    keys = SharedKeys.build([2, 3], [(0, 0)], CPU)
    k = torch.randn(5, 2, 4)
    repeated = keys.repeat(k, k)
    assert repeated[0] is k
    assert repeated[1] is k


def test_a_gradient_is_the_sum_over_all_copies() -> None:
    keys = SharedKeys.build([2, 3], [(1, 2), (0, 1), (1, 4)], CPU)
    k, v = torch.randn(2, 12, 2, 4, dtype=torch.float64)
    mine = [x.clone().requires_grad_() for x in (k, v)]
    plain = [x.clone().requires_grad_() for x in (k, v)]
    repeated = keys.repeat(*mine)
    pull = torch.randn(2, *repeated[0].shape, dtype=torch.float64)
    assert keys.source is not None
    for ours, theirs, g in zip(repeated, plain, pull, strict=True):
        ours.backward(g, retain_graph=True)
        theirs[keys.source.long()].backward(g)
    for ours, theirs in zip(mine, plain, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_uses_are_listed_token_by_token() -> None:
    keys = SharedKeys.build([2], [(0, 1), (0, 2)], CPU)
    assert keys.source is not None
    assert keys.copy_indices is not None
    assert keys.first_copy is not None
    for token in range(5):
        copy_indices = keys.copy_indices[keys.first_copy[token] : keys.first_copy[token + 1]]
        assert copy_indices.tolist() == (keys.source == token).nonzero().flatten().tolist()
