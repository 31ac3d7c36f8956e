"""Rows that are a multiple of the grain round alike, whatever stands beside them."""

from __future__ import annotations

import pytest
import torch

from hone.ops.packed_linear import PlainLinear, linear_map
from hone.rollout.native import row_grain as module
from hone.rollout.native.row_grain import row_grain


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (128, 256), (1024, 256), (17, 100)])
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_every_multiple_of_the_grain(
    outputs: int, inputs: int, packed: bool
) -> None:
    weight, x = torch.randn(outputs, inputs), torch.randn(96, inputs)
    product = linear_map(weight, None) if packed else PlainLinear(weight, None)
    grain = row_grain([weight], packed=packed)
    alone = torch.cat([product(x[i : i + 1].repeat(grain, 1))[:1] for i in range(96)])
    for rows in range(grain, 97, grain):
        assert torch.equal(product(x[:rows]), alone[:rows]), rows


def test_the_strictest_weight_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_grain", lambda o, i, threads, packed: {8: 4, 9: 16}[o])
    weights = [torch.empty(8, 3), torch.empty(9, 3), torch.empty(5)]
    assert row_grain(weights, packed=True) == 16


def test_a_machine_without_a_grain_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PlainLinear, "__call__", lambda self, x: torch.randn(len(x), 8))
    module._grain.cache_clear()
    try:
        assert row_grain([torch.empty(8, 3)], packed=False) == 16
    finally:
        module._grain.cache_clear()
    assert "may get other tokens in another batch" in caplog.text
