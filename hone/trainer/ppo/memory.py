"""The memory of a run: an error that says what needs less of it, and garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class OutOfMemory(RuntimeError):
    """A device or the machine had no memory left for a step."""


@contextmanager
def memory_explained(step: str) -> Iterator[None]:
    """An allocation that failed inside becomes a sentence; the error itself is its cause."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        cause = _failed_allocation(error)
        if cause is None:
            raise
        raise OutOfMemory(
            f"out of memory in {step}: {cause} Lower "
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu (or ppo_micro_batch_size_per_gpu) and "
            "the critic's, rollout.max_num_seqs, or data.max_response_length; or set "
            "actor_rollout_ref.model.enable_gradient_checkpointing=true, on a GPU also "
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true and "
            "actor_rollout_ref.ref.fsdp_config.param_offload=true. Of these only the response length "
            "changes what is learnt; the same command resumes from the last checkpoint"
        ) from error


@contextmanager
def garbage_frozen() -> Iterator[None]:
    """On a GPU, freeze the objects of the run, so that garbage collection skips them (`gc.freeze`).

    A full collection of the libraries' and the models' objects takes 0.2 s, every few steps.
    """
    import torch

    freezes = torch.cuda.is_available() and not gc.get_freeze_count()
    if freezes:
        gc.collect()  # garbage would stay, and its memory on the device with it
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()


def _failed_allocation(error: BaseException | None) -> str | None:
    """The first line of an allocation that failed: of the error, or of a cause of it."""
    import torch

    while error is not None:
        lines = str(error).splitlines() or [type(error).__name__]
        # torch's CPU allocator has no error class of its own.
        on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
        if on_cpu or isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return lines[0]
        error = error.__cause__
    return None
