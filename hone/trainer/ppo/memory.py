"""Explains out-of-memory errors, and freezes garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hone.errors import UserError

_MAX_FROZEN_AT_START = 1000
"""Python 3.12 starts with some 400 frozen objects; a program that calls `gc.freeze` has many more."""


class OutOfMemory(UserError, RuntimeError):
    """Raised when a device or the machine has too little memory for a step."""


@contextmanager
def explain_out_of_memory(step: str) -> Iterator[None]:
    """Replaces an out-of-memory error with `OutOfMemory`, which names the settings that save memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        message = _out_of_memory_message(error)
        if message is None:
            raise
        raise OutOfMemory(
            f"out of memory in {step}: {message} Lower "
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu (or ppo_micro_batch_size_per_gpu) and "
            "the critic's, rollout.max_num_seqs, or data.max_response_length; or set "
            "actor_rollout_ref.model.enable_gradient_checkpointing=true, on a GPU also "
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true and "
            "actor_rollout_ref.ref.fsdp_config.param_offload=true. Of these only the response length "
            "changes the result; the same command resumes from the last checkpoint with "
            "trainer.resume_mode=auto (the default)"
        ) from error


@contextmanager
def freeze_garbage_collection() -> Iterator[Callable[[], None]]:
    """Excludes the objects of a run on a GPU from garbage collection (`gc.freeze`).

    Otherwise a full collection takes 0.2 s every few steps. Yields a function to call after each step; the
    first call also excludes the objects of the first step, in which compilers are imported.
    """
    has_caller_frozen = gc.get_freeze_count() > _MAX_FROZEN_AT_START
    is_enabled = torch.cuda.is_available() and not has_caller_frozen
    remaining_calls = 2 if is_enabled else 0

    def freeze() -> None:
        nonlocal remaining_calls
        if remaining_calls:
            remaining_calls -= 1
            gc.collect()  # frozen garbage would never free its device memory
            gc.freeze()

    freeze()
    try:
        yield freeze
    finally:
        if is_enabled:
            gc.unfreeze()


def _out_of_memory_message(error: BaseException | None) -> str | None:
    """Returns the first line of the out-of-memory error among `error` and its causes; None without one."""
    while error is not None:
        # torch's CPU allocator raises a plain RuntimeError.
        is_cpu_error = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
        if is_cpu_error or isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return str(error).partition("\n")[0] or type(error).__name__
        error = error.__cause__
    return None
