"""A real vLLM OpenAI server for the contract tests; all tests share one server, because its start is slow."""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import signal
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hone.event_loop import run_coroutine
from hone.launch.free_ports import free_ports
from hone.models.policy import PolicyModel
from hone.models.tiny import save_pretrained
from hone.rollout.contract import RolloutEngine, Traits
from hone.rollout.requests import Request, RequestRules
from hone.rollout.server import ServerRollout
from hone.rollout.server_weights import WeightFolder
from hone.rollout.vllm_openai import VLLMServer

from .engine_contract import Factory, Place
from .models import EOS, POSITIONS, TOKENIZER, policy
from .vllm_factory import MAX_NUM_SEQS, SHAPE, SLOW_MOTION, slow_motion, slow_motion_python

UNTIED = {**SHAPE, "tie_embeddings": False}
"""A running vLLM server on a CPU cannot update tied embeddings."""


@cache
def server_url() -> str:
    """Starts the server with weights that no test uses, and waits until the server is healthy."""
    folder = Path(tempfile.mkdtemp(prefix="hone-test-vllm-openai-"))
    save_pretrained(policy(seed=9).lm, TOKENIZER, folder / "model")
    (port,) = free_ports(1)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    command = [
        slow_motion_python(),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--host",
        "127.0.0.1",
    ]
    command += ["--port", str(port), "--model", str(folder / "model"), "--dtype", "float32"]
    command += ["--max-model-len", str(POSITIONS), "--logprobs-mode", "processed_logprobs"]
    command += [
        "--enforce-eager",
        "--max-num-seqs",
        str(MAX_NUM_SEQS),
        "--generation-config",
        "vllm",
    ]
    command += ["--logits-processors", SLOW_MOTION, "--scheduling-policy", "priority"]
    with (folder / "log").open("wb") as file:
        child = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True
        )

    def end() -> None:
        os.killpg(child.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    url = f"http://127.0.0.1:{port}"

    async def healthy() -> None:
        server = VLLMServer(url, start_timeout_s=600.0, call_timeout_s=60.0)
        await server.wait_until_healthy()
        await server.close()

    asyncio.run(healthy())
    return url


class VLLMServerFactory(Factory):
    """An engine of its own over the server of all tests, with the policy's weights."""

    name = "vllm-server"
    engine_traits = Traits(
        uses_policy_module=False,
        samples_by_position=False,
        batch_invariant=False,
        untruncated_log_probs=False,
    )
    probes = frozenset({"model", "queue"})
    smallest_queue = MAX_NUM_SEQS
    draws = 300
    long_tokens = 600
    slow_motion = staticmethod(slow_motion)

    def build(self, policy: PolicyModel, *, max_num_seqs: int = 64) -> RolloutEngine:
        lm: Any = policy.lm
        engine = ServerRollout(
            [
                VLLMServer(
                    server_url(),
                    start_timeout_s=60.0,
                    call_timeout_s=60.0,
                    eos_ids=(EOS,),
                )
            ],
            RequestRules.of(lm.config, (EOS,), TOKENIZER),
            dict(lm.named_parameters(remove_duplicate=False)),
            WeightFolder(None, "no-model"),
        )

        async def prepare() -> None:
            await engine.start()
            await engine.pause()
            await engine.begin_update()
            await engine.load(lm.named_parameters())
            await engine.commit(0)
            await engine.resume()

        run_coroutine(prepare())
        return engine

    def phases(self, engine: Any) -> dict[str, Place]:
        return {
            "route": (engine, "_route"),
            "forward": (engine._servers[0], "stream"),
            "append": (engine, "_append"),
            "stop": (RequestRules, "stop_reason"),
            "answer": (Request, "output"),
        }
