"""The important decoder families on a GPU in bfloat16, against plain transformers there."""

from __future__ import annotations

import pytest
import torch

from benchmarks.families.__main__ import GOOD
from benchmarks.families.measure import examine

from .device import needs_gpu

pytestmark = needs_gpu
IMPORTANT = (
    "deepseek_v3",
    "falcon",
    "gemma2",
    "gpt_neox",
    "gpt_oss",
    "qwen2",
    "qwen3_moe",
    "stablelm",
)


@pytest.mark.parametrize("family", IMPORTANT)
def test_rollout_and_trainer_equal_plain_transformers(family: str) -> None:
    assert examine(family, torch.device("cuda"))["outcome"] in GOOD
