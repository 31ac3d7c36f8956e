"""Expert weights for vLLM, which loads experts by their names in a checkpoint.

The trainer has one tensor for all experts of a layer; a checkpoint has one tensor per expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

UPDATABLE_MODEL_TYPES = frozenset({"qwen3_moe"})
"""Model types with experts whose updates are tested against vLLM."""


def split_experts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields every expert as a view with its name in a checkpoint; yields other tensors unchanged."""
    for name, tensor in weights:
        layer, _, part = name.rpartition(".experts.")
        if layer and part == "gate_up_proj":  # [experts, 2 * intermediate, hidden]
            for i, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                yield f"{layer}.experts.{i}.gate_proj.weight", gate
                yield f"{layer}.experts.{i}.up_proj.weight", up
        elif layer and part == "down_proj":  # [experts, hidden, intermediate]
            for i, expert in enumerate(tensor):
                yield f"{layer}.experts.{i}.down_proj.weight", expert
        else:
            yield name, tensor
