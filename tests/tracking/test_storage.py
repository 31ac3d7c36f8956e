"""The cause of a failed write is found even behind errors of libraries."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hone.tracking.atomic import storage_errno, storage_error_message
from hone.trainer.command_line import user_error_message


def error_of(action: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        action()
    return caught.value


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EIO, "input/output error"),
        (errno.EROFS, "read-only"),
        (errno.EFBIG, "larger than"),
    ],
)
def test_each_failure_has_a_message_with_file_and_remedy(number: int, cause: str) -> None:
    message = str(user_error_message(OSError(number, os.strerror(number), "/runs/a/metrics.jsonl")))
    assert cause in message
    assert "/runs/a/metrics.jsonl could not be written" in message
    assert "start the same command again" in message
    assert "\n" not in message


def test_the_cause_is_found_behind_other_errors() -> None:
    def wrapped() -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("the writer failed") from error

    assert storage_errno(error_of(wrapped)) == errno.ENOSPC
    assert storage_errno(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert storage_errno(RuntimeError("something else")) is None
    assert storage_error_message(ValueError("x")) is None


needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@needs_dev_full
@pytest.mark.parametrize("kind", ["parquet", "safetensors", "torch", "jsonl"])
def test_errors_of_libraries_on_a_full_disk_are_explained(kind: str) -> None:
    full = "/dev/full"

    def write() -> None:
        if kind == "parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            with pa.OSFile(full, "wb") as sink:
                pq.write_table(pa.table({"a": list(range(100_000))}), sink)
        elif kind == "torch":
            import torch

            with open(full, "wb") as file:
                torch.save(torch.zeros(100_000), file)
        elif kind == "safetensors":
            from safetensors.torch import save
            from torch import zeros

            Path(full).write_bytes(save({"a": zeros(100_000)}))
        else:
            with open(full, "ab", buffering=0) as file:
                file.write(b"x")

    assert "the disk is full" in str(user_error_message(error_of(write)))
