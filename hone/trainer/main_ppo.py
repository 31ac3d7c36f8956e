"""`python -m hone.trainer.main_ppo key=value …`: RL training from the command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from hone.config import PPOTrainerConfig
from hone.tracking.console import progress, screen
from hone.trainer.command_line import (
    announce,
    composed_of,
    lock_run,
    plan_checks,
    require_given,
    run_module,
)
from hone.trainer.nsys import start_again_under_nsys
from hone.types import Function

DRY_RUN = "--dry-run"


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    composed = composed_of(
        [word for word in words if word != DRY_RUN],
        tree="ppo_trainer",
        program="main_ppo",
        further=plan_checks,
    )
    announce(composed)
    run(composed.config, composed.origins, dry_run=DRY_RUN in words)


def train(arguments: Sequence[str]) -> None:
    """`hone train`: the same program, with starting values for what the command line leaves out."""
    with progress("load libraries"):
        from hone.trainer.starting_values import MUST_BE_GIVEN, starting_values

        composed = composed_of(
            [word for word in arguments if word != DRY_RUN],
            tree="ppo_trainer",
            program="hone train",
            starting=starting_values,
            further=plan_checks,
        )
    require_given(composed, MUST_BE_GIVEN)
    announce(composed)
    run(composed.config, composed.origins, dry_run=DRY_RUN in arguments)


def run(
    config: PPOTrainerConfig,
    origins: Mapping[str, str] | None = None,
    *,
    dry_run: bool = False,
    compute_score: Function | None = None,
) -> None:
    """Train as configured, in this process or on Ray; `origins` say where values came from.

    `dry_run` stops before models load and prints what would run. `compute_score` scores in place of
    the function that the configuration names.
    """
    start_again_under_nsys(config.global_profiler)
    # The lock comes before imports and models, which take minutes; a dry run writes no folder.
    with nullcontext() if dry_run else lock_run(config.trainer.default_local_dir):
        with progress("load libraries"):
            from hone.trainer.ppo.preflight import prepare
        with progress("check data, model and plug-ins"):
            trainer, preview = prepare(config, compute_score)
        try:
            for line in (*preview.warnings, *(preview.lines if dry_run else ())):
                screen().line(line)
            if not dry_run:
                trainer.init_workers()
                trainer.fit(origins)
        finally:
            trainer.shutdown()


def __getattr__(name: str) -> Function:
    """verl's names for a custom program; they load what this command does not need at once."""
    if name not in ("TaskRunner", "create_rl_dataset", "create_rl_sampler", "run_ppo"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hone.trainer.ppo import verl_steps

    return getattr(verl_steps, name)


if __name__ == "__main__":
    sys.exit(run_module(main, "ppo_trainer", "hone.trainer.main_ppo"))
