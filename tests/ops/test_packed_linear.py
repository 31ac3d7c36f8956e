"""Packed layers equal plain ones, copy the weight, and round all rows alike."""

from __future__ import annotations

import pytest
import torch

from hone.ops import packed_linear
from hone.ops.packed_linear import PackedLinear, PlainLinear, can_pack, make_linear, row_multiple

needs_packing = pytest.mark.skipif(
    not can_pack(torch.empty(1, 1)), reason="this machine's matrix library has no packed layout"
)
KINDS = [pytest.param(PackedLinear, marks=needs_packing), PlainLinear]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 3, 5), (4, 64, 32), (70, 17, 128)])
@torch.inference_mode()
def test_a_packed_product_equals_the_float64_product(
    kind: type, biased: bool, rows: int, outputs: int, inputs: int
) -> None:
    weight, x, other = (
        torch.randn(outputs, inputs),
        torch.randn(rows, inputs),
        torch.randn(rows, outputs),
    )
    bias = torch.randn(outputs) if biased else None
    linear = kind(weight, bias)
    y = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for actual, expected in [
        (linear(x), y),
        (linear.forward_add(x, other), y + other),
    ]:
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@needs_packing
@torch.inference_mode()
def test_a_packed_linear_layer_copies_its_weight_and_a_plain_one_does_not() -> None:
    weight, x = torch.ones(4, 4), torch.ones(1, 4)
    packed, plain = PackedLinear(weight, None), PlainLinear(weight, None)
    weight.zero_()
    assert packed(x).tolist() == [[4.0] * 4]
    assert plain(x).tolist() == [[0.0] * 4]


def test_other_dtypes_are_not_packed() -> None:
    assert isinstance(make_linear(torch.zeros(2, 2, dtype=torch.bfloat16), None), PlainLinear)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (128, 256), (1024, 256), (17, 100)])
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_every_multiple_of_row_multiple(
    outputs: int, inputs: int, packed: bool
) -> None:
    weight, x = torch.randn(outputs, inputs), torch.randn(96, inputs)
    product = make_linear(weight, None) if packed else PlainLinear(weight, None)
    multiple = row_multiple([weight], prepacked=packed)
    alone = torch.cat([product(x[i : i + 1].repeat(multiple, 1))[:1] for i in range(96)])
    for rows in range(multiple, 97, multiple):
        assert torch.equal(product(x[:rows]), alone[:rows]), rows


def test_the_largest_row_multiple_of_all_weights_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        packed_linear, "_row_multiple", lambda o, i, threads, packed: {8: 4, 9: 16}[o]
    )
    weights = [torch.empty(8, 3), torch.empty(9, 3), torch.empty(5)]
    assert row_multiple(weights, prepacked=True) == 16


def test_a_machine_without_a_row_multiple_gets_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PlainLinear, "__call__", lambda self, x: torch.randn(len(x), 8))
    packed_linear._row_multiple.cache_clear()
    try:
        assert row_multiple([torch.empty(8, 3)], prepacked=False) == 16
    finally:
        packed_linear._row_multiple.cache_clear()
    assert "may get other tokens in another batch" in caplog.text
