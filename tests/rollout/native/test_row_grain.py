"""Rows that are a multiple of the grain round alike, whatever stands beside them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hone.rollout.native import row_grain as module
from hone.rollout.native.row_grain import row_grain


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (128, 256), (1024, 256), (17, 100)])
def test_a_row_has_the_same_bits_in_every_multiple_of_the_grain(outputs: int, inputs: int) -> None:
    weight, x = torch.randn(outputs, inputs), torch.randn(96, inputs)
    grain = row_grain([weight])
    alone = torch.cat([F.linear(x[i : i + 1].repeat(grain, 1), weight)[:1] for i in range(96)])
    for rows in range(grain, 97, grain):
        assert torch.equal(F.linear(x[:rows], weight), alone[:rows]), rows


def test_the_strictest_weight_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_grain", lambda o, i, threads: {8: 4, 9: 16}[o])
    assert row_grain([torch.empty(8, 3), torch.empty(9, 3), torch.empty(5)]) == 16


def test_a_machine_without_a_grain_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    noisy = lambda x, w: torch.randn(len(x), len(w))  # noqa: E731
    monkeypatch.setattr(module.F, "linear", noisy)
    module._grain.cache_clear()
    try:
        assert row_grain([torch.empty(8, 3)]) == 16
    finally:
        module._grain.cache_clear()
    assert "may get other tokens in another batch" in caplog.text
