"""Which policies the fused decoder may arrange in memory."""

from __future__ import annotations

from hone.rollout.native.fused_decoder import can_join
from tests.engine.engines import policy


def test_parameters_that_fsdp_gathered_are_not_moved():
    """Moved, they would keep the weights of the first gathering."""
    model = policy()
    assert can_join(model)
    model.decoder.unshard = lambda: None  # what fully_shard adds to a module's class
    assert not can_join(model)
