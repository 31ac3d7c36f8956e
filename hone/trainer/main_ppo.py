"""`python -m hone.trainer.main_ppo key=value …` runs RL training."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from hone.config import PPOTrainerConfig, replace
from hone.config.trainer import GlobalProfilerConfig
from hone.tracking.console import progress, screen
from hone.trainer.command_line import (
    DRY_RUN,
    check_plan,
    compose_arguments,
    lock_run_folder,
    require_keys,
    run_module,
)
from hone.trainer.config_notes import print_config_notes
from hone.trainer.interrupt import runs_command_line_program
from hone.types import Function

NSYS_SESSION_VARIABLE = "NSYS_PROFILING_SESSION_ID"
"""The environment variable that nsys sets for the programs it runs."""


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    composed = compose_arguments(
        [argument for argument in arguments if argument != DRY_RUN],
        schema="ppo_trainer",
        program="main_ppo",
        extra_checks=check_plan,
    )
    print_config_notes(composed)
    run(composed.config, composed.origins, dry_run=DRY_RUN in arguments)


def train(arguments: Sequence[str]) -> None:
    """Runs `hone train`: like `main`, but keys that are not set get starting values, which
    starting_values.py chooses for the model, the data and the device, instead of verl's defaults."""
    with progress("load libraries"):
        from hone.trainer.starting_values import REQUIRED_KEYS, starting_values

        composed = compose_arguments(
            [argument for argument in arguments if argument != DRY_RUN],
            schema="ppo_trainer",
            program="hone train",
            starting_values=starting_values,
            extra_checks=check_plan,
        )
    require_keys(composed, REQUIRED_KEYS)
    print_config_notes(composed)
    run(composed.config, composed.origins, dry_run=DRY_RUN in arguments)


def run(
    config: PPOTrainerConfig,
    origins: Mapping[str, str] | None = None,
    *,
    dry_run: bool = False,
    compute_score: Function | None = None,
) -> None:
    """Trains as configured, in this process or on Ray.

    `origins` maps each key to the file or argument that set it. `dry_run` prints a preview and stops before
    models load. `compute_score` replaces the configured score function.
    """
    restart_under_nsys(config.global_profiler)
    run_folder = config.trainer.default_local_dir
    if run_folder.startswith("~"):
        run_folder = os.path.expanduser(run_folder)
        config = replace(config, "trainer.default_local_dir", run_folder)
    # The folder is locked before imports and models, which take minutes. A dry run writes nothing.
    with nullcontext() if dry_run else lock_run_folder(run_folder):
        with progress("load libraries"):
            from hone.trainer.ppo.preflight import prepare
            from hone.trainer.ppo.restarts import attempts

        for attempt in attempts(config):
            with attempt as attempt_config:
                with progress("check data, model and plug-ins"):
                    trainer, preview = prepare(attempt_config, compute_score)
                try:
                    for line in (*preview.warnings, *(preview.lines if dry_run else ())):
                        screen().line(line)
                    if not dry_run:
                        trainer.init_workers()
                        trainer.fit(origins)
                finally:
                    trainer.shutdown()


def restart_under_nsys(config: GlobalProfilerConfig) -> None:
    """Replaces this process by the same program under nsys, if nsys is configured and installed.

    Only a command-line program is restarted, not a user's Python program that calls `hone`.
    """
    if config.tool != "nsys" or not config.steps or NSYS_SESSION_VARIABLE in os.environ:
        return
    problem = None
    if shutil.which("nsys") is None:
        problem = "nsys is not on PATH"
    elif not runs_command_line_program():
        problem = "start your Python program under nsys"
    if problem is not None:
        screen().line(f"global_profiler.tool=nsys: {problem}; nothing is recorded")
        return
    os.makedirs(config.save_path, exist_ok=True)
    options = {"capture-range": "cudaProfilerApi", "capture-range-end": "repeat"}
    options |= {"output": f"{config.save_path}/%q{{HOSTNAME}}-%p"} | config.nsys_options
    arguments = [f"--{name}={value}" for name, value in options.items()]
    os.execvp("nsys", ["nsys", "profile", *arguments, sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    sys.exit(run_module(main, "ppo_trainer", "hone.trainer.main_ppo"))
