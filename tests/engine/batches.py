"""Small padded batches with shared prompts, tool tokens and empty rows, which are hard to pack."""

from __future__ import annotations

import torch

from hone.ops.rows import PackedRows, pack_rows
from hone.protocol import DataProto

VOCABULARY = 40
WIDTH = 12
"""The maximum response length of the tests."""

ROWS = (  # prompt, response length, positions of tool tokens
    ((3, 4, 5), 4, ()),
    ((3, 4, 5), 1, ()),
    ((3, 4, 5), 6, (2, 3)),
    ((7, 8), 5, (1,)),
    ((7, 8), 3, (0, 1, 2)),
    ((9, 10, 11, 12, 13), 2, ()),
    ((9,), 6, (3,)),
)


def rows(count: int = len(ROWS), *, prompt_pad: int = 0, response_pad: int = 0) -> DataProto:
    """Returns the first rows; the padding does not change their content."""
    selected = ROWS[:count]
    width = max(len(p) for p, _, _ in selected) + prompt_pad
    length = max(n for _, n, _ in selected) + response_pad
    batch = {
        "prompts": torch.zeros(count, width, dtype=torch.int64),
        "responses": torch.zeros(count, length, dtype=torch.int64),
        "attention_mask": torch.zeros(count, width + length, dtype=torch.int64),
        "response_mask": torch.zeros(count, length, dtype=torch.int64),
    }
    for name in ("old_log_probs", "ref_log_prob", "advantages", "values", "returns"):
        batch[name] = torch.zeros(count, length)
    random = torch.Generator().manual_seed(5)
    for i, (prompt, n, tool_positions) in enumerate(selected):
        batch["prompts"][i, width - len(prompt) :] = torch.tensor(prompt)
        batch["responses"][i, :n] = torch.randint(3, VOCABULARY, (n,), generator=random)
        batch["attention_mask"][i, width - len(prompt) : width + n] = 1
        batch["response_mask"][i, :n] = 1
        batch["response_mask"][i, list(tool_positions)] = 0
        near_uniform = -torch.log(torch.tensor(float(VOCABULARY)))
        batch["old_log_probs"][i, :n] = near_uniform + 0.3 * torch.randn(n, generator=random)
        batch["ref_log_prob"][i, :n] = near_uniform + 0.3 * torch.randn(n, generator=random)
        for name in ("advantages", "values", "returns"):
            batch[name][i, :n] = torch.randn(n, generator=random)
    return DataProto.from_dict(batch)


def pack_batch(batch: DataProto, share: bool) -> PackedRows:
    columns = (batch.batch[n] for n in ("prompts", "responses", "attention_mask", "response_mask"))
    return pack_rows(*columns, share_prompts=share)
