"""torch.compile for each decoder layer: one compilation serves all, because they are alike.

Attention is left out of the compiled graphs: it asks a layout, whose shape differs from batch to batch.
"""

from __future__ import annotations

import torch

from hone.models.policy import Model
from hone.ops.segments import SegmentLayout


def compile_layers(model: Model) -> int:
    """Compile every decoder layer in place; returns how many there are."""
    if not hasattr(SegmentLayout.attend, "_torchdynamo_disable"):
        SegmentLayout.attend = torch.compiler.disable(SegmentLayout.attend)  # type: ignore[method-assign]
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.decoder.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers:
        layer.compile(dynamic=True)
    return len(layers)
