"""Computes the utilization of the GPU in each phase: achieved over attainable throughput.

Updates are measured in operations (6 × parameters × tokens, plus attention), generation in bytes (weights
once per decode step, every key and value once per token). Unknown devices have no roofline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hone.engine.contract import ModelFacts

_CEILINGS = {
    "H200": (790e12, 4.25e12),
    "H100": (790e12, 3.0e12),
    "A100": (280e12, 1.7e12),
    "L40S": (300e12, 0.75e12),
    "4090": (150e12, 0.9e12),
}
"""Dense bf16 FLOP/s and bytes/s that large kernels reach in practice."""


@dataclass(frozen=True)
class Roofline:
    """The ceilings of one device and the sizes of one model."""

    flops: float
    bytes_per_s: float
    facts: ModelFacts

    @staticmethod
    def of(facts: ModelFacts, device: torch.device) -> Roofline | None:
        if device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(device)
        ceiling = next((v for k, v in _CEILINGS.items() if k in name), None)
        if ceiling is None:
            return None
        return Roofline(*ceiling, facts)

    def update_share(self, lengths: Sequence[int], shared: Sequence[int], seconds: float) -> float:
        """Returns the MFU of forward and backward over rows of these lengths.

        Tokens that a row shares with the previous row are computed and counted once.
        """
        rows = list(zip(lengths, shared, strict=True))
        pairs = sum(n * n - prefix * prefix for n, prefix in rows)
        tokens = sum(n - prefix for n, prefix in rows)
        facts = self.facts
        operations = 6 * facts.parameters * tokens
        operations += 6 * facts.attention_width * facts.layers * pairs
        return operations / seconds / self.flops

    def generation_share(
        self, prompts: Sequence[int], responses: Sequence[int], slots: int, seconds: float
    ) -> float:
        """Returns the share of the memory bandwidth that generation must use."""
        steps = max(max(responses), sum(responses) / slots)
        pairs = zip(prompts, responses, strict=True)
        keys = sum(n * (p + n / 2) for p, n in pairs) * self.facts.kv_bytes_per_token
        return (steps * self.facts.parameter_bytes + keys) / seconds / self.bytes_per_s
