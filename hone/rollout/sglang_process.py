"""An SGLang server that a rollout worker starts, watches, restarts and ends."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hone.rollout.contract import RolloutError, RolloutSpec
from hone.rollout.sglang_server import SGLangServer
from hone.types import Settings

log = logging.getLogger(__name__)

_STARTS = 3
"""Starts in a row of a process that does not become healthy."""
_END_S = 10.0
_OWN = ("model_path", "host", "port", "skip_tokenizer_init")
"""Server arguments that hone sets."""


@dataclass(eq=False)
class LaunchedSGLang(SGLangServer):
    """A server in a child process with a process group of its own; it listens on this machine only."""

    command: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    starts: int = 0
    """Starts since it was last healthy."""
    _child: subprocess.Popen[bytes] | None = None
    _folder: Path | None = None

    def launch(self) -> None:
        """Starts the process on a free port."""
        self.end()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._folder = Path(tempfile.mkdtemp(prefix="hone-sglang-"))
        self.starts += 1
        with (self._folder / "log").open("wb") as file:
            self._child = subprocess.Popen(
                [*self.command, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=os.environ | self.environment,
                start_new_session=True,
            )
        log.info("SGLang starts at %s (pid %d)", self.url, self._child.pid)

    @property
    def pid(self) -> int:
        assert self._child is not None, "launch() comes first"
        return self._child.pid

    def raise_if_ended(self) -> None:
        """Starts a process that has ended again; raises after several starts in a row."""
        if self._child is None or self._child.poll() is None:
            return
        last = self._last_lines()
        if self.starts >= _STARTS:
            raise RolloutError(
                f"SGLang ended {self.starts} times in a row while it started (exit status "
                f"{self._child.returncode}); the end of its log: {last}"
            )
        log.warning(
            "SGLang has ended (exit status %s) and is started again", self._child.returncode
        )
        self.launch()

    async def healthy_now(self) -> bool:
        healthy = await super().healthy_now()
        if healthy:
            self.starts = 0
        return healthy

    async def close(self) -> None:
        await super().close()
        self.end()

    def end(self) -> None:
        """Ends the process group: asks it, and kills what is left at the deadline."""
        if self._child is not None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(self._child.pid, number)
                except ProcessLookupError:
                    break
                deadline = time.monotonic() + _END_S
                while number == signal.SIGTERM and time.monotonic() < deadline:
                    if self._child.poll() is not None:
                        break
                    time.sleep(0.05)
            self._child.wait()
            self._child = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _last_lines(self) -> str:
        assert self._folder is not None
        lines = (self._folder / "log").read_text(errors="replace").splitlines()
        return " / ".join(line.strip() for line in lines[-3:])


def launch_arguments(spec: RolloutSpec) -> tuple[list[str], dict[str, str]]:
    """Returns the command of SGLang's server and its environment."""
    config = spec.config
    own = {name for name in _OWN if name in config.engine_kwargs.sglang}
    if own:
        raise RolloutError(f"rollout.engine_kwargs.sglang.{min(own)} is set by hone; leave it out")
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
        **config.engine_kwargs.sglang,
    }
    command = [config.sglang.python or sys.executable, "-m", "sglang.launch_server"]
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            command.append(flag)
        elif value is not False and value is not None:
            values = value if isinstance(value, list | tuple) else [value]
            command += [flag, *map(str, values)]
    environment = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
    devices = config.tensor_model_parallel_size * config.pipeline_model_parallel_size
    if devices * config.data_parallel_size > 1:
        command += ["--base-gpu-id", str(spec.device.index or 0)]
    elif spec.device.type == "cuda" and spec.device.index is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        index = spec.device.index
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
    return command, environment
