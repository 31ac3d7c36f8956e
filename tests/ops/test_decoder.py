"""The fused parts of a decoder layer have the values and gradients of torch operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hone.ops.decoder import Linear, Norm, add_gated_mlp, plain_rms_norm, plain_rotate, rotated_qkv

ROWS, WIDTH, HEADS, KV_HEADS, D, INNER = 7, 24, 4, 2, 6, 40


def random_leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).mul_(0.5).requires_grad_() for shape in shapes]


def compare(ours: Any, plain: Any, inputs: list[torch.Tensor], *rest: Any) -> None:
    """Compares values and gradients of two functions."""
    results = []
    for function in (ours, plain):
        mine = [x.detach().clone().requires_grad_() for x in inputs]
        out = function(*mine, *rest)
        outs = out if isinstance(out, tuple) else (out,)
        torch.manual_seed(1)
        sum((x * torch.randn(x.shape)).sum() for x in outs).backward()
        results.append([*outs, *(x.grad for x in mine)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_gated_mlp_equals_torch_operations() -> None:
    def ours(x, norm, gate, up, down):  # type: ignore[no-untyped-def]
        return add_gated_mlp(x, Norm(norm, 1e-5), gate, up, down)

    def plain(x, norm, gate, up, down):  # type: ignore[no-untyped-def]
        h = plain_rms_norm(x, norm, 1e-5)
        return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)

    compare(
        ours,
        plain,
        random_leaves((ROWS, WIDTH), (WIDTH,), (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)),
    )


@pytest.mark.parametrize("biased", [True, False])
def test_rotated_heads_equal_torch_operations(biased: bool) -> None:
    cos, sin = torch.randn(2, ROWS, D)

    def ours(x, norm, q, k, v, *biases):  # type: ignore[no-untyped-def]
        biases = biases or (None, None, None)
        linears = [Linear(w, b) for w, b in zip((q, k, v), biases, strict=True)]
        return rotated_qkv(x, Norm(norm, 1e-5), linears, (cos, sin))

    def plain(x, norm, q, k, v, *biases):  # type: ignore[no-untyped-def]
        biases = biases or (None, None, None)
        h = plain_rms_norm(x, norm, 1e-5)
        heads = [
            F.linear(h, w, b).view(ROWS, -1, D) for w, b in zip((q, k, v), biases, strict=True)
        ]
        return plain_rotate(heads[0], cos, sin), plain_rotate(heads[1], cos, sin), heads[2], x

    heads, kv = HEADS * D, KV_HEADS * D
    shapes = [(ROWS, WIDTH), (WIDTH,), (heads, WIDTH), (kv, WIDTH), (kv, WIDTH)]
    compare(ours, plain, random_leaves(*shapes, *([(heads,), (kv,), (kv,)] if biased else [])))


def test_frozen_weights_get_no_gradient() -> None:
    x, norm, gate, up, down = random_leaves(
        (ROWS, WIDTH), (WIDTH,), (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)
    )
    gate.requires_grad_(False)
    add_gated_mlp(x, Norm(norm, 1e-5), gate, up, down).sum().backward()
    assert gate.grad is None
    assert up.grad is not None
    assert x.grad is not None


@pytest.mark.parametrize("frozen", [["q", "k", "v"], ["k"], ["q_bias"], ["x", "norm", "v_bias"]])
def test_frozen_projections_of_heads_get_no_gradient_and_the_others_do(frozen: list[str]) -> None:
    heads, kv = HEADS * D, KV_HEADS * D
    shapes = [(ROWS, WIDTH), (WIDTH,), (heads, WIDTH), (kv, WIDTH), (kv, WIDTH)]
    names = ["x", "norm", "q", "k", "v", "q_bias", "k_bias", "v_bias"]
    cos, sin = torch.randn(2, ROWS, D)
    results = []
    for frozen_inputs in ([], frozen):
        inputs = dict(zip(names, random_leaves(*shapes, (heads,), (kv,), (kv,)), strict=True))
        for name in frozen_inputs:
            inputs[name].requires_grad_(False)
        linears = [Linear(inputs[part], inputs[f"{part}_bias"]) for part in "qkv"]
        outs = rotated_qkv(inputs["x"], Norm(inputs["norm"], 1e-5), linears, (cos, sin))
        sum(out.square().sum() for out in outs).backward()
        results.append({name: x.grad for name, x in inputs.items()})
    for name in names:
        if name in frozen:
            assert results[1][name] is None
        else:
            torch.testing.assert_close(results[1][name], results[0][name])
