"""From the config to vLLM: its arguments, what is refused, and whole runs that train through it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.rollout.contract import RolloutError, RolloutSpec
from hone.rollout.vllm import VLLMRollout
from hone.rollout.vllm_build import build_vllm, make_environment, make_launch_arguments
from hone.rollout.vllm_process import EngineProcess
from hone.trainer.ppo.publish_probe import PublishProbeError
from hone.verl.dialect import load_config

from .models import EOS, TOKENIZER, policy
from .vllm_factory import SHAPE, vllm, vllm_python

ROLLOUT = "actor_rollout_ref.rollout"


def spec_of(*overrides: str, device: str = "cpu") -> RolloutSpec:
    keys = ["name=vllm", f"vllm.python={sys.executable}", *overrides]
    config = load_config([f"{'+' if '+' in k else ''}{ROLLOUT}.{k.lstrip('+')}" for k in keys])
    return RolloutSpec(
        config.actor_rollout_ref.rollout,
        model_path="/a/model",
        load_policy=policy,
        dtype=torch.bfloat16,
        device=torch.device(device),
        tokenizer=TOKENIZER,
        eos_ids=(EOS,),
    )


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("hone.rollout.vllm_build.resolve_model_path", lambda path: path)
    return lambda *overrides, **options: (
        make_launch_arguments(spec_of(*overrides, **options), 4096, 0).llm_arguments
    )


def test_settings_of_the_rollout_reach_vllm(arguments: Any) -> None:
    engine = arguments("max_num_seqs=7", "prompt_length=100", "response_length=20")
    assert (engine["model"], engine["dtype"]) == ("/a/model", "bfloat16")
    assert (engine["max_num_seqs"], engine["max_model_len"]) == (7, 120)
    assert (engine["tensor_parallel_size"], engine["pipeline_parallel_size"]) == (1, 1)
    assert arguments("max_model_len=9999")["max_model_len"] == 4096  # the limit of the model


def test_engine_kwargs_are_passed_on(arguments: Any) -> None:
    engine = arguments("+engine_kwargs.vllm.quantization=fp8", "+engine_kwargs.vllm.max_num_seqs=3")
    assert (engine["quantization"], engine["max_num_seqs"]) == ("fp8", 3)
    for name in (
        "logprobs_mode=processed_logprobs",
        "async_scheduling=true",
        "model=x",
        "tensor_parallel_size=2",  # only the key of `rollout` sets the number of GPUs
        "pipeline_parallel_size=2",
    ):
        with pytest.raises(RolloutError, match=f"engine_kwargs.vllm.{name.split('=')[0]} cannot"):
            arguments(f"+engine_kwargs.vllm.{name}")


def test_an_engine_gets_its_own_gpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr("hone.rollout.vllm_build.resolve_model_path", lambda path: path)
    two = ("tensor_model_parallel_size=2",)
    for number, devices in ((0, "4,5"), (1, "6,7")):
        started = make_launch_arguments(spec_of(*two, device="cuda:0"), None, number)
        assert started.environment["CUDA_VISIBLE_DEVICES"] == devices
        assert started.llm_arguments["tensor_parallel_size"] == 2
    four, first = ("tensor_model_parallel_size=4",), {3: "7", 2: "6", 1: "5"}
    for device, gpu in first.items():  # one, two or three GPUs are left for four
        alone = make_launch_arguments(spec_of(*four, device=f"cuda:{device}"), None, 0)
        assert alone.environment["CUDA_VISIBLE_DEVICES"] == gpu
        assert alone.llm_arguments["tensor_parallel_size"] == 1
    assert caplog.text.count("vLLM runs on one device") == 3


def test_the_users_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "9")
    assert "VLLM_CPU_KVCACHE_SPACE" not in make_environment(False, None)


def test_an_interpreter_without_vllm_is_refused_with_the_way_out() -> None:
    with pytest.raises(RolloutError, match=r"has no vLLM; install it with.*make setup-vllm"):
        build_vllm(spec_of())
    with pytest.raises(RolloutError, match=r"does not run.*make setup-vllm"):
        build_vllm(spec_of("vllm.python=/no/such/python"))


def overrides(folder: Path, steps: int) -> list[str]:
    rows = [
        {"data_source": "any", "prompt": f"{i}+1=", "reward_model": {"ground_truth": i + 1}}
        for i in range(4)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return len(set(solution_str))\n"
    )
    return [
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.vllm.python={vllm_python()}",
        f"{ROLLOUT}.temperature=2.0",
        f"{ROLLOUT}.top_k=12",
        f"custom_reward_function.path={folder / 'score.py'}",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder / 'rows.jsonl'}",
        "data.val_files=[]",
        "data.prompt_format=raw",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=100",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={folder / 'run'}",
    ]


def trained(folder: Path, *settings: str) -> list[dict[str, Any]]:
    from hone.trainer.main_ppo import run
    from tests.workers.tasks import config_of, write_model

    run(config_of(write_model(folder / "model", **SHAPE), *settings))
    return [json.loads(x) for x in (folder / "run/metrics.jsonl").read_text().splitlines()]


def agrees(lines: list[dict[str, Any]], steps: int) -> None:
    """Checks that each step trained, and that its tokens come from the weights of the previous step."""
    assert [line["training/global_step"] for line in lines] == list(range(1, steps + 1))
    assert all(line["perf/weight_bytes"] > 0 for line in lines)
    assert max(line["actor/grad_norm"] for line in lines) > 0
    assert max(line["rollout_corr/log_prob_abs_diff_max"] for line in lines) < 1e-4
    assert all(line["training/off_policy/trajectory_staleness/max"] == 0 for line in lines)


@vllm
def test_five_grpo_steps_with_adapters_on_two_devices_agree_with_the_trainer(
    tmp_path: Path,
) -> None:
    """Without the new weights of each step, the log-probs would differ by one update."""
    keys = ("actor_rollout_ref.model.lora_rank=4", f"{ROLLOUT}.tensor_model_parallel_size=2")
    lines = trained(
        tmp_path, *overrides(tmp_path, 5), *keys, "actor_rollout_ref.actor.optim.lr=0.05"
    )
    agrees(lines, 5)
    model_bytes = (tmp_path / "model/model.safetensors").stat().st_size
    assert max(line["perf/weight_bytes"] for line in lines) < model_bytes / 2


@vllm
def test_grpo_steps_with_weights_that_are_broadcast_agree_with_the_trainer(tmp_path: Path) -> None:
    """Workers on other machines get merged weights, because the adapter's files are on one machine."""
    keys = ("vllm.weights=distributed", "tensor_model_parallel_size=2")
    settings = [*overrides(tmp_path, 2), *(f"{ROLLOUT}.{key}" for key in keys)]
    lines = trained(tmp_path, *settings, "actor_rollout_ref.model.lora_rank=4")
    agrees(lines, 2)
    model_bytes = (tmp_path / "model/model.safetensors").stat().st_size
    assert max(line["perf/weight_bytes"] for line in lines) > model_bytes / 2


@vllm
def test_a_run_whose_vllm_decodes_with_an_old_adapter_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, folders = EngineProcess.call, []

    async def call_with_first_adapter(self: EngineProcess, verb: str, **arguments: Any) -> Any:
        if verb == "adapter":
            folders.append(arguments["folder"])
            if len(folders) > 1:
                return None
        return await call(self, verb, **arguments)

    monkeypatch.setattr(EngineProcess, "call", call_with_first_adapter)
    keys = (f"{ROLLOUT}.checkpoint_engine.probe_every=1", "actor_rollout_ref.model.lora_rank=4")
    with pytest.raises(PublishProbeError, match="the weights or LoRA adapters of version 1"):
        trained(tmp_path, *overrides(tmp_path, 2), *keys, "actor_rollout_ref.actor.optim.lr=0.05")
    assert len(folders) == 2


KILLS = int(os.environ.get("HONE_VLLM_KILLS", "1"))


@vllm
@pytest.mark.timeout(1500 + 120 * KILLS)
def test_a_run_over_two_engines_that_are_killed_reaches_its_end_and_agrees_with_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of a response, once per step (HONE_VLLM_KILLS=10: ten times), and once between
    the two commits of an update: the first engine has the new weights then, the second does not."""
    kills: list[int] = []
    commits: list[EngineProcess] = []
    engines: dict[str, set[int]] = {}
    steps = max(5, KILLS + 1)
    append, call = VLLMRollout._append, EngineProcess.call

    def killing(self: VLLMRollout, request: Any, chunk: Any) -> None:
        append(self, request, chunk)
        process = self._router.target_by_key[request.request_id]
        engines.setdefault(request.request_id, set()).add(self._processes.index(process))
        if self.version == len(kills) + 1 <= KILLS and request.stop_reason is None:
            kills.append(process.pid)
            process.kill()

    async def killed_after_its_commit(self: EngineProcess, verb: str, **arguments: object) -> Any:
        result = await call(self, verb, **arguments)
        if verb == "finish":
            commits.append(self)
            if len(commits) == 3:  # the first two commits are those of the start
                self.kill()
        return result

    monkeypatch.setattr(VLLMRollout, "_append", killing)
    monkeypatch.setattr(EngineProcess, "call", killed_after_its_commit)
    lines = trained(tmp_path, *overrides(tmp_path, steps), f"{ROLLOUT}.data_parallel_size=2")
    agrees(lines, steps)
    assert len(set(kills)) == KILLS
    assert all(line["response_length/mean"] > 0 for line in lines)
    first, second, killed, *later = commits
    assert (first is not second, killed in (first, second)) == (True, True)
    assert set(later[:2]) == {first, second}, "the killed engine has not got the update"
    assert {len(indices) for indices in engines.values()} == {1}, "a trajectory has moved"
    assert set().union(*engines.values()) == {0, 1}, "an engine had no request"
