"""The arguments that the attention interface passes to a layout."""

from __future__ import annotations

import pytest
import torch

from hone.models.attention import layout_attention
from hone.models.tiny import tiny_lm
from hone.ops.attention import AttentionOptions


class Module(torch.nn.Module):
    layer_idx = 3


class RecordingLayout:
    def attend(self, q, k, v, options):
        self.shapes, self.options = (q.shape, k.shape, v.shape), options
        return q


def call(**options):
    layout = RecordingLayout()
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    out, weights = layout_attention(Module(), q, k, k, None, layout=layout, **options)
    assert weights is None
    assert torch.equal(out, q.transpose(1, 2))
    return layout


def test_tokens_are_the_first_dimension_and_options_name_the_layer():
    layout = call(scaling=0.5, sliding_window=7, dropout=0.1)
    assert layout.shapes == ((5, 4, 8), (5, 2, 8), (5, 2, 8))
    assert layout.options == AttentionOptions(3, 0.5, 7)


def test_a_window_that_the_module_does_not_pass_is_applied():
    class Windowed(Module):
        sliding_window = 4

    layout, q = RecordingLayout(), torch.randn(1, 4, 5, 8)
    layout_attention(Windowed(), q, q, q, None, layout=layout)
    assert layout.options.window == 4
    layout_attention(Windowed(), q, q, q, None, layout=layout, sliding_window=None)
    assert layout.options.window is None


def test_the_scale_defaults_to_one_over_root_of_the_head_width():
    assert call().options.scaling == 8**-0.5


def test_a_call_without_a_layout_is_refused():
    lm = tiny_lm(20, hidden=32)
    with pytest.raises(RuntimeError, match="called without a layout"):
        lm(input_ids=torch.tensor([[1, 2, 3]]))


def test_score_capping_and_sinks_reach_the_layout():
    sinks = torch.zeros(4)
    options = call(softcap=30.0, s_aux=sinks).options
    assert options.softcap == 30.0
    assert options.sinks is sinks


def test_values_narrower_than_keys_are_padded_for_the_cache_and_truncated_after():
    layout = RecordingLayout()
    q, v = torch.randn(1, 4, 5, 8), torch.randn(1, 4, 5, 6)
    out, _ = layout_attention(Module(), q, q, v, None, layout=layout)
    assert layout.shapes == ((5, 4, 8),) * 3
    assert out.shape == (1, 5, 4, 6)
