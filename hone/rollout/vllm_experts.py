"""Expert weights for vLLM, which loads experts by their names in a checkpoint.

The trainer has the experts of a layer in one tensor; a checkpoint of these families has one per expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

FAMILIES = frozenset({"qwen3_moe"})
"""Families whose updates are tested against vLLM."""


def by_expert(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields a view of every expert by its name in a checkpoint, and other tensors unchanged."""
    for name, tensor in weights:
        block, _, part = name.rpartition(".experts.")
        if block and part == "gate_up_proj":  # [experts, 2 * width, hidden]
            for i, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                yield f"{block}.experts.{i}.gate_proj.weight", gate
                yield f"{block}.experts.{i}.up_proj.weight", up
        elif block and part == "down_proj":  # [experts, hidden, width]
            for i, expert in enumerate(tensor):
                yield f"{block}.experts.{i}.down_proj.weight", expert
        else:
            yield name, tensor
