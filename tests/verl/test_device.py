"""verl's functions about the device of this process."""

from __future__ import annotations

from hone.verl import device


def test_the_device_has_verls_names() -> None:
    assert device.get_device_name() in ("cpu", "cuda")
    assert device.get_nccl_backend() in ("gloo", "nccl")
    assert device.get_device_id() == 0
    assert device.get_torch_device().__name__ == f"torch.{device.get_device_name()}"
