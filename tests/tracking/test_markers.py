"""verl's timers and markers: the timers measure, the markers change nothing."""

from __future__ import annotations

import pytest

from hone.ops import device
from hone.tracking import markers


def test_timers_add_up_also_through_an_exception() -> None:
    timing: dict[str, float] = {}
    with markers.simple_timer("gen", timing):
        pass
    first = timing["gen"]
    with pytest.raises(ValueError, match="x"), markers.marked_timer("gen", timing, color="red"):
        raise ValueError("x")
    assert timing["gen"] > first > 0


def test_decorators_leave_the_function_as_it_is() -> None:
    def one() -> int:
        return 1

    assert markers.rollout_trace_op(one) is one
    assert markers.mark_annotate(message="m", color="red")(one) is one
    assert markers.GPUMemoryLogger(role="actor")(one)() == 1
    with markers.rollout_trace_attr(sample_index=1, step=2, rollout_n=0):
        markers.mark_end_range(markers.mark_start_range(message="m"))


def test_the_device_has_verls_names() -> None:
    assert device.get_device_name() in ("cpu", "cuda")
    assert device.get_nccl_backend() in ("gloo", "nccl")
    assert device.get_device_id() == 0
    assert device.get_torch_device().__name__ == f"torch.{device.get_device_name()}"
