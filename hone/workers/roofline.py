"""The share of a GPU's attainable throughput that updates (MFU) and generation (MBU) reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hone.engine.contract import ModelFacts

_CEILINGS_BY_DEVICE = {
    "H200": (790e12, 4.25e12),
    "H100": (790e12, 3.0e12),
    "A100": (280e12, 1.7e12),
    "L40S": (300e12, 0.75e12),
    "4090": (150e12, 0.9e12),
}
"""Dense bf16 FLOP/s and bytes/s that large kernels reach in practice, by part of the device name."""


@dataclass(frozen=True)
class Roofline:
    """The GPU utilization of updates (MFU) and of generation (MBU): achieved over attainable throughput.

    MFU counts operations (6 × parameters × tokens, plus attention). MBU counts bytes that decoding reads: the
    weights once per decode step and, for each token, the keys and values of the tokens before it.
    """

    flops_per_s: float
    bytes_per_s: float
    facts: ModelFacts

    @staticmethod
    def for_device(facts: ModelFacts, device: torch.device) -> Roofline | None:
        """Returns the roofline of a model on a device, or None for an unknown device."""
        if device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(device)
        ceilings = next((v for part, v in _CEILINGS_BY_DEVICE.items() if part in name), None)
        return None if ceilings is None else Roofline(*ceilings, facts)

    def mfu(self, lengths: Sequence[int], shared_lengths: Sequence[int], seconds: float) -> float:
        """Returns the model FLOPs utilization of forward and backward over rows of these lengths.

        `shared_lengths` has the number of tokens that each row shares with the previous row; shared tokens
        are computed and counted once.
        """
        rows = list(zip(lengths, shared_lengths, strict=True))
        attention_pairs = sum(n * n - shared * shared for n, shared in rows)
        tokens = sum(n - shared for n, shared in rows)
        facts = self.facts
        operations = 6 * facts.parameters * tokens
        operations += 6 * facts.attention_width * facts.layers * attention_pairs
        return operations / seconds / self.flops_per_s

    def mbu(
        self,
        prompt_lengths: Sequence[int],
        response_lengths: Sequence[int],
        max_num_seqs: int,
        seconds: float,
    ) -> float:
        """Returns the memory bandwidth utilization of generating responses of these lengths."""
        decode_steps = max(max(response_lengths), sum(response_lengths) / max_num_seqs)
        rows = zip(prompt_lengths, response_lengths, strict=True)
        kv_bytes = sum(n * (p + n / 2) for p, n in rows) * self.facts.kv_bytes_per_token
        weight_bytes = decode_steps * self.facts.parameter_bytes
        return (weight_bytes + kv_bytes) / seconds / self.bytes_per_s
