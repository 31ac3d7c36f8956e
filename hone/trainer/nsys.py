"""Restarts the program under Nsight Systems for `global_profiler.tool=nsys`."""

from __future__ import annotations

import os
import shutil
import sys

from hone.config.trainer import GlobalProfilerConfig
from hone.tracking.console import screen
from hone.trainer.interrupt import runs_command_line_program

NSYS_SESSION_VARIABLE = "NSYS_PROFILING_SESSION_ID"
"""The environment variable that nsys sets for the programs it runs."""


def restart_under_nsys(config: GlobalProfilerConfig) -> None:
    """Restarts this process under nsys if it is configured and installed.

    Only a command-line program is restarted, never a Python program that calls `hone`.
    """
    if config.tool != "nsys" or not config.steps or NSYS_SESSION_VARIABLE in os.environ:
        return
    if shutil.which("nsys") is None or not runs_command_line_program():
        reason = (
            "start your Python program under nsys"
            if shutil.which("nsys")
            else "nsys is not on PATH"
        )
        screen().line(f"global_profiler.tool=nsys: {reason}; nothing is recorded")
        return
    os.makedirs(config.save_path, exist_ok=True)
    options = {"capture-range": "cudaProfilerApi", "capture-range-end": "repeat"}
    options |= {"output": f"{config.save_path}/%q{{HOSTNAME}}-%p"} | config.nsys_options
    arguments = [f"--{name}={value}" for name, value in options.items()]
    os.execvp("nsys", ["nsys", "profile", *arguments, sys.executable, *sys.orig_argv[1:]])
