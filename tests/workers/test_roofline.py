"""MFU and MBU against hand-computed numbers."""

from __future__ import annotations

import pytest
import torch

from hone.engine.contract import ModelFacts
from hone.workers.roofline import Roofline

FACTS = ModelFacts(
    vocabulary=10,
    max_position_embeddings=None,
    eos_ids=(),
    dtype=torch.float32,
    parameters=100,
    parameter_bytes=400,
    layers=2,
    attention_width=8,
    kv_bytes_per_token=16,
)
ROOFLINE = Roofline(flops_per_s=1000.0, bytes_per_s=50.0, facts=FACTS)


def test_an_update_counts_six_operations_per_parameter_and_token_and_attention_over_pairs():
    expected = (6 * 100 * 4 + 6 * 8 * 2 * 4 * 4) / 2.0 / 1000
    assert ROOFLINE.mfu([4], [0], seconds=2.0) == pytest.approx(expected)


def test_a_shared_prompt_is_counted_once():
    alone = ROOFLINE.mfu([4], [0], seconds=1.0)
    assert ROOFLINE.mfu([4, 4], [0, 4], seconds=1.0) == pytest.approx(alone)


def test_generation_reads_the_weights_once_per_decode_step_and_keys_once_per_token():
    read = 3 * 400 + 3 * (5 + 3 / 2) * 16
    share = ROOFLINE.mbu([5], [3], max_num_seqs=8, seconds=2.0)
    assert share == pytest.approx(read / 2.0 / 50)


def test_a_cpu_has_no_roofline():
    assert Roofline.for_device(FACTS, torch.device("cpu")) is None
