"""Starts, restarts and ends an SGLang server in a child process of a rollout worker.

A reaper process ends the server if the worker is killed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from hone.launch import reaper
from hone.launch.free_ports import free_ports
from hone.rollout.contract import RolloutError, RolloutSpec
from hone.rollout.sglang_server import SGLangServer
from hone.types import Settings

log = logging.getLogger(__name__)

_MAX_STARTS = 3
"""Maximum number of consecutive starts without a healthy server."""
_TERMINATE_TIMEOUT_S = 10.0
_LOG_TAIL_BYTES = 4096
_RESERVED_ARGUMENTS = ("host", "model_path", "port", "skip_tokenizer_init")
"""Server arguments that hone sets."""


@dataclass(eq=False)
class LaunchedSGLang(SGLangServer):
    """An SGLang server in a process group of its own; it listens on loopback only."""

    command: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    num_starts: int = 0
    """Number of starts since the server was last healthy."""
    _child: subprocess.Popen[bytes] | None = None
    _reaper: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = None
    """The log of the process, an unnamed temporary file."""

    started_by_hone = True

    def launch(self) -> None:
        """Starts the process on a free port."""
        self.terminate()
        self.released_tags = ()
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.num_starts += 1
        mark = f"sglang-{secrets.token_hex(8)}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._reaper = reaper.start_reaper(mark)
        try:
            self._child = subprocess.Popen(
                [*self.command, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=os.environ | self.environment | reaper.marked_environment(mark),
                start_new_session=True,
            )
        except OSError as error:
            self.terminate()
            raise RolloutError(
                f"rollout.sglang.python={self.command[0]} does not run ({error})"
            ) from error
        log.info("SGLang starts at %s (pid %d)", self.url, self._child.pid)

    @property
    def pid(self) -> int:
        assert self._child is not None, "call launch() first"
        return self._child.pid

    def restart_if_ended(self) -> None:
        """Restarts a process that has ended; raises after `_MAX_STARTS` consecutive starts."""
        if self._child is None or self._child.poll() is None:
            return
        if self.num_starts >= _MAX_STARTS:
            assert self._log is not None
            file = self._log.fileno()
            tail_start = max(0, os.fstat(file).st_size - _LOG_TAIL_BYTES)
            lines = (
                os.pread(file, _LOG_TAIL_BYTES, tail_start).decode(errors="replace").splitlines()
            )
            raise RolloutError(
                f"SGLang ended {self.num_starts} times in a row while it started (exit status "
                f"{self._child.returncode}); the end of its log: {' / '.join(map(str.strip, lines[-3:]))}"
            )
        log.warning("SGLang has ended (exit status %s) and is restarted", self._child.returncode)
        self.launch()

    async def is_healthy(self) -> bool:
        healthy = await super().is_healthy()
        if healthy:
            self.num_starts = 0
        return healthy

    async def close(self) -> None:
        self.adapter_name = None  # the adapter need not be unloaded, because the process ends
        await super().close()
        self.terminate()

    def terminate(self) -> None:
        """Ends the process group with SIGTERM; after the timeout, kills it with SIGKILL."""
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self._child.wait(_TERMINATE_TIMEOUT_S)
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
            self._child = None
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.wait()
            self._reaper = None
        if self._log is not None:
            self._log.close()
            self._log = None


def command_and_environment(
    spec: RolloutSpec, lora_arguments: Settings | None = None
) -> tuple[list[str], dict[str, str]]:
    """Returns the command of SGLang's server and additional environment variables for the process."""
    config = spec.config
    for name in _RESERVED_ARGUMENTS:
        if name in config.engine_kwargs.sglang:
            raise RolloutError(f"rollout.engine_kwargs.sglang.{name} is set by hone; leave it out")
    # SGLang refuses priorities with its other policies.
    policy_has_priorities = config.engine_kwargs.sglang.get("schedule_policy", "fcfs") in (
        "fcfs",
        "lof",
    )
    arguments: Settings = {
        "model_path": spec.model_path,
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "enable_memory_saver": spec.device.type == "cuda",
        "dtype": str(spec.dtype).removeprefix("torch."),
        "device": spec.device.type,
        "tp_size": config.tensor_model_parallel_size,
        "pp_size": config.pipeline_model_parallel_size,
        "dp_size": config.data_parallel_size,
        "mem_fraction_static": config.gpu_memory_utilization,
        "context_length": config.max_total_tokens,
        "max_running_requests": config.max_num_seqs,
        "disable_cuda_graph": config.enforce_eager,
        "disable_radix_cache": not config.enable_prefix_caching,
        "enable_priority_scheduling": policy_has_priorities,
        "schedule_low_priority_values_first": policy_has_priorities,
        **(lora_arguments or {}),
        **config.engine_kwargs.sglang,
    }
    command = [config.sglang.python or sys.executable, "-m", "sglang.launch_server"]
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            command.append(flag)
        elif value is not False and value is not None:
            values = value if isinstance(value, list | tuple) else [value]
            command += [
                flag,
                *(json.dumps(item) if isinstance(item, dict) else str(item) for item in values),
            ]
    environment = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
    sizes = (arguments[name] or 1 for name in ("tp_size", "pp_size", "dp_size"))
    if math.prod(sizes) > 1:
        command += ["--base-gpu-id", str(spec.device.index or 0)]
    elif spec.device.type == "cuda" and spec.device.index is not None:
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        index = spec.device.index
        environment["CUDA_VISIBLE_DEVICES"] = devices.split(",")[index] if devices else str(index)
    return command, environment
