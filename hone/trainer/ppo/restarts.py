"""Restarts a run that lost a worker, a node or Ray, on the remaining nodes from the last checkpoint.

Only the number of nodes changes, so each step has the same rows and, up to rounding, the same metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from functools import partial
from pathlib import Path

from hone.config import ConfigError, PPOTrainerConfig, replace
from hone.config.checks import find_problems
from hone.controller import ResourcePool
from hone.controller.failures import ProcessFailure, join_words
from hone.controller.resource_pool import FreeResources, place
from hone.tracking import RunFolder
from hone.tracking.console import screen
from hone.trainer.command_line import write_traceback
from hone.trainer.interrupt import GracefulStop
from hone.trainer.threads import uses_gpu

SCHEMA = "ppo_trainer"
RELEASE_DEADLINE_S = 30.0
"""The longest wait in seconds until the resources of the lost attempt, or of another run, are free."""


def attempts(config: PPOTrainerConfig) -> Iterator[AbstractContextManager[PPOTrainerConfig]]:
    """Yields a context per attempt: the first, and another after each lost process (`trainer.max_restarts`).

    A context yields the config to train with, and suppresses the error of a lost process.
    """
    old_checkpoints = _checkpoint_times(config.trainer.default_local_dir)
    failures: list[ProcessFailure] = []
    for number in range(config.trainer.max_restarts + 1):
        yield _attempt(config, number, old_checkpoints, failures)
        if len(failures) <= number:
            return


@contextmanager
def _attempt(
    config: PPOTrainerConfig,
    number: int,
    old_checkpoints: set[tuple[int, int]],
    failures: list[ProcessFailure],
) -> Iterator[PPOTrainerConfig]:
    """Yields the config of an attempt; adds the error of a lost process to `failures` before a restart."""
    attempt_config, folder = config, config.trainer.default_local_dir
    with ExitStack() as ray_stack:
        if failures:
            attempt_config = _config_for_remaining_nodes(config, ray_stack, failures[-1])
            if _checkpoint_times(folder) - old_checkpoints:  # this run has written a checkpoint
                attempt_config = replace(attempt_config, "trainer.resume_mode", "auto")
            nodes, all_nodes = attempt_config.trainer.nnodes, config.trainer.nnodes
            ranks = attempt_config.world_size
            screen().line(
                f"restart {number} of {config.trainer.max_restarts}: {nodes} of {all_nodes} "
                f"node{'s' * (all_nodes > 1)}, {ranks} rank{'s' * (ranks > 1)}"
            )
        try:
            yield attempt_config
        except ProcessFailure as error:
            if number == config.trainer.max_restarts or not error.may_restart:
                raise
            log_file = write_traceback(error, Path(folder).expanduser())
            log_note = f" (its log lines: {log_file})" if log_file is not None else ""
            screen().line(str(error).partition("\n")[0] + log_note)
            failures.append(copy(error))  # a traceback would keep the trainer in memory


@contextmanager
def graceful_stop() -> Iterator[GracefulStop]:
    """Handles signals as `GracefulStop` does; a process lost after a signal causes no restart."""
    with GracefulStop() as stop:
        try:
            yield stop
        except ProcessFailure as error:
            error.may_restart = not stop.is_requested
            raise


def _checkpoint_times(folder: str) -> set[tuple[int, int]]:
    """Returns the step and the modification time of each checkpoint."""
    checkpoints = RunFolder(folder).checkpoints()
    return {(step, path.stat().st_mtime_ns) for step, path in checkpoints}


def _config_for_remaining_nodes(
    config: PPOTrainerConfig, ray_stack: ExitStack, failure: ProcessFailure
) -> PPOTrainerConfig:
    """Connects to Ray or starts it, and returns the config for the nodes that still respond.

    Waits up to `RELEASE_DEADLINE_S` for nodes whose resources are not free. Closing `ray_stack` stops Ray.
    """
    from hone.controller.ray_placement import reachable_nodes, resources_by_node
    from hone.controller.ray_start import start_ray, stop_ray

    try:
        started_ray = start_ray(vars(config.ray_kwargs.ray_init), report=screen().line)
    except Exception as error:
        raise failure from error  # the original failure explains more than the error of Ray
    if started_ray:
        ray_stack.callback(stop_ray, config.ray_kwargs.timeline_json_file)
    deadline = time.monotonic() + RELEASE_DEADLINE_S
    candidates = list(_smaller_configs(config))
    while True:
        nodes = reachable_nodes()
        # The largest config that fits into all resources, and the largest that fits into the free ones.
        largest_config, largest_free_config = (
            _largest_fitting(candidates, partial(resources_by_node, nodes, total=total))
            for total in (True, False)
        )
        is_late = time.monotonic() > deadline
        if largest_config is not None and (largest_free_config == largest_config or is_late):
            return largest_free_config or largest_config
        if is_late:
            problems = find_problems(SCHEMA, replace(config, "trainer.nnodes", 1))
            raise ConfigError(
                f"the run cannot restart on the remaining nodes ({join_words(list(map(str, nodes)))}): "
                f"{next(iter(problems), 'its pools need more')}"
            )
        time.sleep(1.0)


def _smaller_configs(config: PPOTrainerConfig) -> Iterator[PPOTrainerConfig]:
    """Yields valid configs with the same or fewer nodes, the largest first.

    Every config uses Ray, also with one rank, where `trainer.controller=auto` would not.
    """
    config = replace(config, "trainer.controller", config.resolved_controller)
    for nodes in range(config.trainer.nnodes, 0, -1):
        candidate = replace(config, "trainer.nnodes", nodes)
        if list(find_problems(SCHEMA, candidate)):
            continue
        yield candidate
        for rollout_nodes in range(len(config.rollout_pool) - 1, 0, -1):
            smaller = replace(candidate, "actor_rollout_ref.rollout.nnodes", rollout_nodes)
            if not list(find_problems(SCHEMA, smaller)):
                yield smaller


def _largest_fitting(
    configs: Iterable[PPOTrainerConfig], get_resources: Callable[[], FreeResources]
) -> PPOTrainerConfig | None:
    """Returns the first config that fits into the resources, or None; `configs` has the largest first."""
    return next((config for config in configs if _fits(config, get_resources())), None)


def _fits(config: PPOTrainerConfig, resources: FreeResources) -> bool:
    """Returns whether all pools of the config fit; `place` subtracts each pool from `resources`."""
    trainer = config.trainer
    counts = [[trainer.n_gpus_per_node] * trainer.nnodes, config.rollout_pool, config.reward_pool]
    pools = [ResourcePool(count, use_gpu=uses_gpu(trainer.device)) for count in counts if count]
    return all(place(pool, resources) is not None for pool in pools)
