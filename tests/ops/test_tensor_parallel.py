"""Log-probs of a vocabulary-sharded head against the whole head; the ranks are threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from hone.ops import logprobs
from hone.ops.logprobs import linear_log_probs, linear_sum_pi_squared
from hone.ops.tensor_parallel import (
    shard_start,
    vocab_parallel_log_probs,
    vocab_parallel_sum_pi_squared,
)

from .test_logprobs import OPTIONS, Case, naive


class Threads:
    """A process group whose ranks are threads of one test."""

    def __init__(self, rank, tensors, barrier):
        self._rank, self._tensors, self._barrier = rank, tensors, barrier

    def rank(self):
        return self._rank

    def size(self):
        return len(self._tensors)

    def all_reduce(self, tensor, op):
        self._tensors[self._rank] = tensor.clone()
        self._barrier.wait(30)
        stacked = torch.stack(self._tensors)
        tensor.copy_(stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0))
        self._barrier.wait(30)


def over_ranks(monkeypatch, ranks, run):
    """Returns the results of `run(group)` on every rank."""

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None):
        group.all_reduce(tensor, op)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    tensors, barrier = [None] * ranks, threading.Barrier(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, [Threads(r, tensors, barrier) for r in range(ranks)]))


def rule(options, bias):
    whole = {"temperature": 1.0, "softcap": None, "logit_scale": 1.0} | options
    return whole | {"bias": bias}


def sharded(case, options, group):
    """Returns one rank's results and gradients."""
    first = shard_start(len(case.weight), group)
    last = first + -(-len(case.weight) // group.size())
    leaves = [
        None if x is None else x.detach().clone().requires_grad_()
        for x in (
            case.hidden,
            case.weight[first:last],
            None if case.bias is None else case.bias[first:last],
        )
    ]
    hidden, weight, bias = leaves
    log_probs, entropy = vocab_parallel_log_probs(
        hidden,
        weight,
        case.target,
        start=first,
        group=group,
        with_entropy=True,
        **rule(options, bias),
    )
    (log_probs @ case.output_gradient[0] + entropy @ case.output_gradient[1]).backward()
    squares = vocab_parallel_sum_pi_squared(hidden, weight, group=group, **rule(options, bias))
    return [log_probs, entropy, squares, *(x.grad for x in leaves if x is not None)]


@pytest.mark.parametrize("chunk", [60, 2**24])
@pytest.mark.parametrize(("vocabulary", "ranks"), [(24, 2), (23, 2), (22, 4), (50, 3)])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_shards_of_the_vocabulary_equal_the_whole_head(monkeypatch, name, vocabulary, ranks, chunk):
    monkeypatch.setattr(
        logprobs, "_CHUNK_LOGITS", chunk
    )  # ranks with fewer rows take larger chunks
    options = dict(OPTIONS[name])
    case = Case(tokens=17, vocabulary=vocabulary, width=8, bias=options.pop("bias", False))
    results = over_ranks(monkeypatch, ranks, lambda group: sharded(case, options, group))
    exact = case.run(naive, torch.float64, **options)
    whole = case.run(
        lambda *a, **kw: linear_log_probs(*a, with_entropy=True, **kw), torch.float32, **options
    )
    squares = linear_sum_pi_squared(case.hidden, case.weight, **rule(options, case.bias))
    joined = [torch.cat(column) for column in list(zip(*results, strict=True))[4:]]
    for rank in results:
        torch.testing.assert_close(rank[2], squares, rtol=1e-5, atol=1e-6)
        ours = [rank[0], rank[1], rank[3], *joined]  # the hidden states' gradient is whole on each
        torch.testing.assert_close(ours[0].double(), exact[0], rtol=1e-6, atol=5e-6)
        for actual, plain, expected in zip(ours, whole, exact, strict=True):
            # The error is not larger than that of the whole head in float32.
            error = (actual - expected).abs().max()
            assert error < 5 * (plain - expected).abs().max() + 1e-6


def test_an_empty_batch_has_empty_results_and_zero_gradients(monkeypatch):
    case = Case(tokens=0, vocabulary=9, width=4)
    for rank in over_ranks(monkeypatch, 2, lambda group: sharded(case, {}, group)):
        assert rank[0].shape == rank[1].shape == rank[2].shape == (0,)
        assert not rank[4].any()


def test_the_shards_are_those_of_dtensor():
    for rows in range(1, 40):
        for size in (2, 3, 4):
            pieces = torch.arange(rows).chunk(size)
            for rank, piece in enumerate(pieces):
                group = Threads(rank, [None] * size, None)
                assert shard_start(rows, group) == piece[0]
