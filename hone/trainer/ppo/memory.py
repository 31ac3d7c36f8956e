"""Explains out-of-memory errors, and freezes garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class OutOfMemory(RuntimeError):
    """Raised when a device or the machine has too little memory for a step."""


@contextmanager
def memory_explained(step: str) -> Iterator[None]:
    """Turn a failed allocation into an explanation, with the original error as its cause."""
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
def garbage_frozen() -> Iterator[Callable[[], None]]:
    """On a GPU, exclude the run's objects from garbage collection (`gc.freeze`).

    Yields a function to call after each step. Its first call also excludes what the first step has made: it
    imports compilers. A full collection of library and model objects takes 0.2 s, every few steps.
    """
    import torch

    freezes = torch.cuda.is_available() and not gc.get_freeze_count()
    remaining = 2 if freezes else 0

    def freeze() -> None:
        nonlocal remaining
        if remaining:
            remaining -= 1
            gc.collect()  # frozen garbage would never free its device memory
            gc.freeze()

    freeze()
    try:
        yield freeze
    finally:
        if freezes:
            gc.unfreeze()


def _failed_allocation(error: BaseException | None) -> str | None:
    """Return the first line of a failed allocation, from the error or one of its causes."""
    import torch

    while error is not None:
        lines = str(error).splitlines() or [type(error).__name__]
        # torch's CPU allocator raises a plain RuntimeError.
        on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
        if on_cpu or isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return lines[0]
        error = error.__cause__
    return None
