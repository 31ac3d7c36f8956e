"""What the attention interface refuses rather than computing something else."""

from __future__ import annotations

import pytest
import torch

from hone.models.attention import layout_attention
from hone.models.tiny import tiny_lm


class Module(torch.nn.Module):
    layer_idx = 3


class Recording:
    def attend(self, q, k, v, **options):
        self.shapes, self.options = (q.shape, k.shape, v.shape), options
        return q


def call(**options):
    layout = Recording()
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    out, weights = layout_attention(Module(), q, k, k, None, layout=layout, **options)
    assert weights is None
    assert torch.equal(out, q.transpose(1, 2))
    return layout


def test_tokens_come_first_and_the_layer_is_named():
    layout = call(scaling=0.5, sliding_window=7, dropout=0.1)
    assert layout.shapes == ((5, 4, 8), (5, 2, 8), (5, 2, 8))
    assert layout.options == {"layer": 3, "scaling": 0.5, "window": 7}


def test_the_scale_defaults_to_one_over_root_of_the_head_width():
    assert call().options["scaling"] == 8**-0.5


def test_a_call_without_a_layout_says_how_to_call():
    lm = tiny_lm(20, hidden=32)
    with pytest.raises(RuntimeError, match="called without a layout"):
        lm(input_ids=torch.tensor([[1, 2, 3]]))


def test_score_capping_and_sinks_are_refused():
    with pytest.raises(NotImplementedError, match="softcap=30"):
        call(softcap=30.0)
    with pytest.raises(NotImplementedError, match="sinks"):
        call(s_aux=torch.zeros(4))
