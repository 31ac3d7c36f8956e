"""Restarts a run that lost a worker, a node or Ray: on what is left, from the last checkpoint.

Only the number of nodes changes, so each step has the rows and, up to rounding, the numbers that it would
have had.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from pathlib import Path

from hone.config import ConfigError, PPOTrainerConfig, replace
from hone.config.checks import find_problems
from hone.controller import ResourcePool
from hone.controller.failures import ProcessFailure, joined
from hone.tracking import RunFolder
from hone.tracking.console import screen
from hone.trainer.command_line import write_traceback
from hone.trainer.interrupt import GracefulStop
from hone.trainer.threads import uses_gpu

TREE = "ppo_trainer"
RELEASE_DEADLINE_S = 30.0
"""How long the resources of the lost attempt, or of another run, may take to become free."""


def attempts(config: PPOTrainerConfig) -> Iterator[AbstractContextManager[PPOTrainerConfig]]:
    """Yield an attempt at the run, and another after a lost process, at most `trainer.max_restarts` more.

    Each is a context with the config to train with; it ends a lost process without an error.
    """
    limit, before = config.trainer.max_restarts, _saved(config.trainer.default_local_dir)
    failures: list[ProcessFailure] = []
    for number in range(limit + 1):
        yield _attempt(config, number, before, failures)
        if len(failures) <= number:
            return


@contextmanager
def _attempt(
    config: PPOTrainerConfig,
    number: int,
    before: set[tuple[int, int]],
    failures: list[ProcessFailure],
) -> Iterator[PPOTrainerConfig]:
    attempt, folder = config, config.trainer.default_local_dir
    with ExitStack() as running:
        if failures:
            attempt = _on_what_is_left(config, running, failures[-1])
            if _saved(folder) - before:  # written by this run, whatever it started from
                attempt = replace(attempt, "trainer.resume_mode", "auto")
            _tell(attempt, number, config)
        try:
            yield attempt
        except ProcessFailure as error:
            if number == config.trainer.max_restarts or not error.may_restart:
                raise
            log = write_traceback(error, Path(folder).expanduser())
            rest = f" (its log lines: {log})" if log is not None else ""
            screen().line(str(error).partition("\n")[0] + rest)
            failures.append(copy(error))  # without the frames, which hold the lost trainer


@contextmanager
def graceful_stop() -> Iterator[GracefulStop]:
    """Handle signals as `GracefulStop` does; a process lost after a signal ends the run for good."""
    with GracefulStop() as stop:
        try:
            yield stop
        except ProcessFailure as error:
            error.may_restart = not stop.requested
            raise


def _saved(folder: str) -> set[tuple[int, int]]:
    """Return step and time of each checkpoint."""
    checkpoints = RunFolder(Path(folder).expanduser()).checkpoints()
    return {(step, path.stat().st_mtime_ns) for step, path in checkpoints}


def _tell(attempt: PPOTrainerConfig, number: int, config: PPOTrainerConfig) -> None:
    nodes, all_nodes = attempt.trainer.nnodes, config.trainer.nnodes
    screen().line(
        f"restart {number} of {config.trainer.max_restarts}: {nodes} of {all_nodes} "
        f"node{'s' * (all_nodes > 1)}, {attempt.world_size} rank{'s' * (attempt.world_size > 1)}"
    )


def _on_what_is_left(
    config: PPOTrainerConfig, running: ExitStack, failure: ProcessFailure
) -> PPOTrainerConfig:
    """Join or start Ray, and return the config for the nodes that answer; closing `running` leaves Ray.

    Nodes that are not free yet are waited for; another run may hold them for long.
    """
    from hone.controller.ray_placement import answering_nodes, free_of
    from hone.controller.ray_start import start_ray, stop_ray
    from hone.controller.resource_pool import place

    try:
        has_started = start_ray(vars(config.ray_kwargs.ray_init), tell=screen().line)
    except Exception as error:
        raise failure from error  # Ray is gone here: why it is, says more than that it is
    if has_started:
        running.callback(stop_ray, config.ray_kwargs.timeline_json_file)
    end_time = time.monotonic() + RELEASE_DEADLINE_S
    smaller = list(_smaller(config))
    while True:
        nodes = answering_nodes()
        fits: dict[bool, PPOTrainerConfig] = {}
        for total in (True, False):
            for candidate in smaller:
                free = free_of(nodes, total=total)
                if all(place(pool, free) is not None for pool in _pools(candidate)):
                    fits[total] = candidate
                    break
        late = time.monotonic() > end_time
        if True in fits and (fits.get(False) == fits[True] or late):
            return fits.get(False, fits[True])
        if late:
            raise ConfigError(_refusal(config, joined([str(node) for node in nodes])))
        time.sleep(1.0)


def _smaller(config: PPOTrainerConfig) -> Iterator[PPOTrainerConfig]:
    """Yield the config with each number of nodes that it can run on, the largest first.

    All run on Ray, as the run did: one rank would otherwise leave it.
    """
    config = replace(config, "trainer.controller", config.uses_controller)
    for nodes in range(config.trainer.nnodes, 0, -1):
        smaller = replace(config, "trainer.nnodes", nodes)
        if not list(find_problems(TREE, smaller)):
            yield smaller
            for others in range(len(config.rollout_pool) - 1, 0, -1):
                fewer = replace(smaller, "actor_rollout_ref.rollout.nnodes", others)
                if not list(find_problems(TREE, fewer)):
                    yield fewer


def _refusal(config: PPOTrainerConfig, free: str) -> str:
    one = replace(config, "trainer.nnodes", 1)
    reason = next(iter(find_problems(TREE, one)), "its pools need more")
    return f"the run cannot restart on what is left ({free}): {reason}"


def _pools(config: PPOTrainerConfig) -> list[ResourcePool]:
    trainer = config.trainer
    counts = [[trainer.n_gpus_per_node] * trainer.nnodes, config.rollout_pool, config.reward_pool]
    return [ResourcePool(count, use_gpu=uses_gpu(trainer.device)) for count in counts if count]
