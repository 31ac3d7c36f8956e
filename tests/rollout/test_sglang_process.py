"""An SGLang process: its command, its death and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.models.tiny import save_pretrained
from hone.rollout.build import build_rollout
from hone.rollout.contract import RolloutError, RolloutSpec, Sampling
from hone.rollout.server import ServerRollout
from hone.rollout.sglang_process import LaunchedSGLang, command_and_environment
from hone.verl.dialect import load_config

from .models import TOKENIZER, policy, trainer_log_probs
from .opened_servers import PROMPT, updated
from .test_build import spec_of
from .test_vllm_process import group_members

FAKE = Path(__file__).parent / "fake_sglang"
WORKER = """
import asyncio, sys
from hone.rollout.sglang_process import LaunchedSGLang
server = LaunchedSGLang("", 300.0, 30.0, command=sys.argv[1:])
server.launch()
asyncio.run(server.wait_until_healthy())
print(server.pid, flush=True)
sys.stdin.read()
"""


def spec(model: Path | str, *overrides: str) -> RolloutSpec:
    prefix = "actor_rollout_ref.rollout."
    config = load_config(
        [f"{prefix}name=sglang", f"{prefix}sglang.python={sys.executable}"]
        + [prefix + word for word in overrides]
    )
    return spec_of("hf", config=config.actor_rollout_ref.rollout, model_path=str(model))


def test_the_command_listens_nowhere_else_and_passes_arguments_on() -> None:
    command, environment = command_and_environment(
        spec(
            "some/model",
            "max_num_seqs=7",
            "engine_kwargs.sglang.attention_backend=triton",
            "engine_kwargs.sglang.enable_memory_saver=true",
            "engine_kwargs.sglang.incremental_streaming_output=false",
            "engine_kwargs.sglang.cuda_graph_bs=[1,2]",
            "engine_kwargs.sglang.json_model_override_args={rope_theta: 5}",
            "engine_kwargs.sglang.chat_template=null",
        )
    )
    assert command[:3] == [sys.executable, "-m", "sglang.launch_server"]
    flags = " ".join(command)
    assert "--model-path some/model --skip-tokenizer-init" in flags
    assert "--max-running-requests 7" in flags
    assert "--attention-backend triton" in flags
    assert "--cuda-graph-bs 1 2" in flags
    assert '{"rope_theta": 5}' in command
    assert "--chat-template" not in command
    assert "--enable-memory-saver" in command
    assert "--incremental-streaming-output" not in command
    assert environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
    with pytest.raises(RolloutError, match=r"engine_kwargs.sglang.host is set by hone"):
        command_and_environment(spec("some/model", "engine_kwargs.sglang.host=0.0.0.0"))


@pytest.mark.parametrize(
    ("setting", "sees_one"),
    [
        ("max_num_seqs=7", True),
        ("tensor_model_parallel_size=2", False),
        ("engine_kwargs.sglang.tp_size=2", False),
    ],
)
def test_a_server_sees_one_gpu_only_if_it_needs_one(setting: str, sees_one: bool) -> None:
    on_gpu = replace(spec("some/model", setting), device=torch.device("cuda", 1))
    _, environment = command_and_environment(on_gpu)
    assert ("CUDA_VISIBLE_DEVICES" in environment) == sees_one


def test_an_interpreter_that_does_not_run_is_named(tmp_path: Path) -> None:
    policy().lm.config.save_pretrained(tmp_path)
    with pytest.raises(RolloutError, match=r"rollout.sglang.python=/no/python does not run"):
        build_rollout(spec(tmp_path, "sglang.python=/no/python"))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, and a fake of SGLang on PYTHONPATH."""
    paths = [str(FAKE), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return save_pretrained(policy().lm, TOKENIZER, tmp_path / "model")


def _until_ended(leader: int) -> bool:
    ends = time.monotonic() + 60
    while (living := group_members(leader)) and time.monotonic() < ends:
        time.sleep(0.05)
    return not living


@pytest.mark.slow
def test_a_server_that_is_killed_is_restarted_with_the_current_weights(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halt = tmp_path / "halt"
    halt.touch()
    monkeypatch.setenv("FAKE_SGLANG_HALT", str(halt))
    engine: Any = build_rollout(spec(fake))
    assert isinstance(engine, ServerRollout)
    (server,) = engine._servers
    assert isinstance(server, LaunchedSGLang)

    async def scenario() -> None:
        await updated(engine, 1)
        long = Sampling(max_tokens=300, temperature=1.0, seed=1, ignore_eos=True)
        some, first = asyncio.Event(), server.pid
        job = asyncio.create_task(
            engine.generate(PROMPT, long, "job", on_tokens=lambda delta: some.set())
        )
        await some.wait()
        os.killpg(server.pid, signal.SIGKILL)
        halt.unlink()
        out = await job
        assert server.pid != first
        assert out.versions == [1] * 300
        expected = trainer_log_probs(policy(seed=1), PROMPT, out.token_ids, 1.0)
        assert out.log_probs == pytest.approx(expected, abs=1e-3)
        last = server.pid
        await engine.close()
        assert _until_ended(last)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_killed_worker_leaves_no_server(fake: Path) -> None:
    """Neither the server nor the processes that it started outlive a SIGKILL of the worker."""
    command, _ = command_and_environment(spec(fake))
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with worker:
        assert worker.stdout is not None
        server = int(worker.stdout.readline())
        try:
            assert len(group_members(server)) == 2
            worker.kill()
            assert _until_ended(server)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server, signal.SIGKILL)


@pytest.mark.slow
def test_a_server_that_never_starts_is_reported_with_its_log(fake: Path) -> None:
    with pytest.raises(RolloutError, match=r"ended 3 times in a row.*no kernel image"):
        build_rollout(spec(fake, "engine_kwargs.sglang.fails=true"))
