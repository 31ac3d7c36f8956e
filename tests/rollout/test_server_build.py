"""From `rollout.server.urls` to an engine, and a run that trains through it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from hone.config import compose, load_config
from hone.models.load import load_causal_lm
from hone.models.policy import PolicyModel
from hone.rollout.build import build_rollout
from hone.rollout.contract import RolloutError
from hone.rollout.server_build import urls_of

from .contract_server import ContractServer
from .test_build import spec_of

URLS = "actor_rollout_ref.rollout.server.urls"


def test_each_rollout_worker_has_servers_of_its_own() -> None:
    config = load_config([f"{URLS}=[http://a:1/,http://b:2/v1,http://c:3]"])
    spec = replace(spec_of("hf"), config=config.actor_rollout_ref.rollout)
    assert urls_of(spec) == ["http://a:1", "http://b:2", "http://c:3"]
    assert urls_of(replace(spec, rank=1, world_size=2)) == ["http://b:2"]
    with pytest.raises(RolloutError, match="3 servers for 4 rollout workers"):
        urls_of(replace(spec, world_size=4))
    wrong = load_config([f"{URLS}=[localhost:30000]"]).actor_rollout_ref.rollout
    with pytest.raises(RolloutError, match="'localhost:30000' does not begin with http"):
        urls_of(replace(spec, config=wrong))


@pytest.mark.parametrize(
    "settings",
    [
        ["name=sglang"],
        ["name=sglang", "server.urls=[http://a:1]"],
        ["name=vllm", "server.urls=[http://a:1]"],
        ["name=vllm"],
    ],
    ids=" ".join,
)
def test_mixtures_of_experts_are_refused_before_anything_starts(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their fused tensors are no names of a checkpoint, and a server would keep its first experts."""
    from benchmarks.families.tiny import tiny_config

    tiny_config("qwen3_moe").save_pretrained(tmp_path)
    rollout = load_config([f"actor_rollout_ref.rollout.{s}" for s in settings[1:]])
    name = settings[0].removeprefix("name=")
    config = replace(rollout.actor_rollout_ref.rollout, name=name)
    monkeypatch.setattr("hone.rollout.vllm_build.has_vllm", lambda python: True)
    spec = replace(spec_of("hf"), config=config, model_path=str(tmp_path))
    with pytest.raises(
        RolloutError, match=f"rollout.name={name} takes no new weights of mixtures of experts"
    ):
        build_rollout(spec)


def test_sglang_stays_where_servers_run_and_is_native_where_nothing_does() -> None:
    name = "actor_rollout_ref.rollout.name=sglang"
    there = compose([name, f"{URLS}=[http://a:1]"])
    assert there.config.actor_rollout_ref.rollout.name == "sglang"
    assert not there.notes
    absent = compose([name])
    assert absent.config.actor_rollout_ref.rollout.name == "native"
    (note,) = absent.notes
    assert "SGLang is not installed" in note
    idle = compose([f"{URLS}=[http://a:1]"])
    assert "no effect while" in " ".join(idle.notes)


def test_a_run_trains_through_a_running_server(
    tmp_path: Path, servers: list[ContractServer]
) -> None:
    """The server ends with the weights of the last step, and its log-probs are the trainer's."""
    from hone.trainer.main_ppo import run
    from tests.workers.tasks import config_of, write_model

    model = write_model(tmp_path / "model")
    lm = load_causal_lm(str(model), dtype=torch.float32).eval()
    servers.append(ContractServer(PolicyModel(lm), eos=lm.config.eos_token_id))
    row = {"data_source": "arithmetic", "prompt": "1+1=", "reward_model": {"ground_truth": 2}}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    run(
        config_of(
            model,
            "actor_rollout_ref.rollout.name=sglang",
            f"{URLS}=[{servers[0].url}]",
            "algorithm.adv_estimator=grpo",
            f"data.train_files={tmp_path / 'rows.jsonl'}",
            "data.val_files=[]",
            "data.prompt_format=raw",
            "trainer.total_training_steps=2",
            "trainer.logger=[jsonl]",
            f"trainer.default_local_dir={tmp_path / 'run'}",
        )
    )
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["perf/weight_bytes"] > 0
    assert max(abs(line["rollout_corr/kl"]) for line in lines) < 1e-5
    trained = load_causal_lm(
        str(tmp_path / "run/global_step_2/actor/huggingface"), dtype=torch.float32
    )
    for name, own in trained.named_parameters():
        assert torch.equal(own, lm.get_parameter(name)), name


def test_generation_and_its_log_probs_come_from_a_running_server(
    tmp_path: Path, servers: list[ContractServer]
) -> None:
    from hone.trainer.main_generation import main
    from tests.workers.tasks import write_model

    model = write_model(tmp_path / "model")
    lm = load_causal_lm(str(model), dtype=torch.float32).eval()
    servers.append(ContractServer(PolicyModel(lm), eos=lm.config.eos_token_id))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')
    output = tmp_path / "out.parquet"
    main(
        [
            f"model.path={model}",
            f"data.path={tmp_path / 'rows.jsonl'}",
            f"data.output_path={output}",
            "data.prompt_format=raw",
            "data.n_samples=2",
            "rollout.name=sglang",
            f"rollout.server.urls=[{servers[0].url}]",
            "rollout.response_length=8",
            "rollout.calculate_log_probs=true",
        ]
    )
    responses = pq.read_table(output).to_pylist()
    assert [len(row["responses"]) for row in responses] == [2, 2]
    assert sum(body.get("stream", False) for body in servers[0].bodies) == 4
