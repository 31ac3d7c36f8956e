"""torch.compile for each decoder layer: one compilation serves all, because they are alike.

Attention is left out of the compiled graphs: it asks a layout, whose shape differs from batch to batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hone.ops.segments import SegmentLayout


def compile_layers(model: nn.Module) -> int:
    """Compile every decoder layer in place; returns how many there are."""
    attend: Any = SegmentLayout.attend
    if not hasattr(attend, "_torchdynamo_disable"):
        SegmentLayout.attend = torch.compiler.disable(attend)  # type: ignore[method-assign]
    from transformers.modeling_layers import GradientCheckpointingLayer

    decoder: Any = model.decoder
    layers = [m for m in decoder.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers:
        layer.compile(dynamic=True)
    return len(layers)
