"""From `rollout.server.urls` to an engine, and a run that trains through it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.families.tiny import tiny_config
from hone.models.load import load_causal_lm
from hone.models.lora import AdapterSettings, adapter_weights, merged_weights, wrap_lora
from hone.models.policy import PolicyModel
from hone.models.tiny import save_pretrained
from hone.rollout.build import build_rollout
from hone.rollout.contract import RolloutError, Sampling
from hone.rollout.server_build import server_urls
from hone.verl.dialect import compose, load_config

from .contract_server import ContractServer
from .models import TOKENIZER, policy, trainer_log_probs
from .opened_servers import PROMPT, SHORT
from .test_build import spec_of

URLS = "actor_rollout_ref.rollout.server.urls"


def test_each_rollout_worker_has_servers_of_its_own() -> None:
    config = load_config([f"{URLS}=[http://a:1/,http://b:2/v1,http://c:3]"])
    spec = replace(spec_of("hf"), config=config.actor_rollout_ref.rollout)
    assert server_urls(spec) == ["http://a:1", "http://b:2", "http://c:3"]
    assert server_urls(replace(spec, rank=1, world_size=2)) == ["http://b:2"]
    with pytest.raises(RolloutError, match="3 servers for 4 rollout workers"):
        server_urls(replace(spec, world_size=4))
    wrong = load_config([f"{URLS}=[localhost:30000]"]).actor_rollout_ref.rollout
    with pytest.raises(RolloutError, match="'localhost:30000' must begin with http"):
        server_urls(replace(spec, config=wrong))


def test_ranks_that_generate_share_servers_unless_each_loads_an_adapter_into_its_own() -> None:
    urls = ["http://a:1", "http://b:2"]
    config = load_config(
        [f"rollout.server.urls=[{','.join(urls)}]"], config_name="generation"
    ).rollout
    spec = replace(spec_of("hf"), config=config, rank=1, world_size=2)
    assert server_urls(spec) == urls
    assert server_urls(replace(spec, current_weights=list)) == urls[1:]


def test_vllm_servers_refuse_to_train_mixtures_of_experts_before_anything_starts(
    tmp_path: Path,
) -> None:
    tiny_config("qwen3_moe").save_pretrained(tmp_path)
    rollout = load_config([f"{URLS}=[http://a:1]"])
    config = replace(rollout.actor_rollout_ref.rollout, name="vllm")
    spec = replace(spec_of("hf"), config=config, model_path=str(tmp_path))
    with pytest.raises(
        RolloutError, match="a running vLLM server cannot load new weights of a mixture"
    ):
        build_rollout(spec)
    server = "rollout.server."
    words = [f"{server}urls=[http://127.0.0.1:9]", f"{server}max_start_wait_time=0.1"]
    config = replace(load_config(words, config_name="generation").rollout, name="vllm")
    with pytest.raises(
        RolloutError, match="not healthy"
    ):  # the servers of `hone generate` get no weights
        build_rollout(replace(spec, config=config))


@pytest.mark.parametrize("weights", ["disk", "tensor"])
def test_the_experts_of_a_mixture_reach_sglang_by_the_names_of_a_checkpoint(
    weights: str, tmp_path: Path, servers: list[ContractServer]
) -> None:
    """The trainer has the experts of a layer in one tensor, which no checkpoint has."""
    torch.manual_seed(0)
    lms = []
    for _ in range(2):
        AutoModelForCausalLM.from_config(tiny_config("qwen3_moe")).save_pretrained(tmp_path)
        lms.append(load_causal_lm(str(tmp_path), dtype=torch.float32).eval())
    old, new = lms
    servers.append(ContractServer(PolicyModel(old)))
    rollout = [f"{URLS}=[{servers[0].url}]", f"{URLS.removesuffix('urls')}weights={weights}"]
    config = replace(load_config(rollout).actor_rollout_ref.rollout, name="sglang")
    engine = build_rollout(replace(spec_of("hf"), config=config, model_path=str(tmp_path)))

    async def scenario() -> None:
        await engine.begin_update()
        await engine.load(new.named_parameters())
        await engine.commit(1)
        out = await engine.generate([1, 2, 3], Sampling(8, 1.0, 0, ignore_eos=True), "new")
        expected = trainer_log_probs(PolicyModel(new), [1, 2, 3], out.token_ids, 1.0)
        assert out.log_probs == pytest.approx(expected, abs=1e-4)
        await engine.close()

    asyncio.run(scenario())
    for name, value in new.named_parameters():
        assert torch.equal(old.get_parameter(name), value), name


@pytest.fixture
def adapted(tmp_path: Path) -> Any:
    """Saves a model in a folder; returns the model with a LoRA adapter whose weights are not zero."""
    save_pretrained(policy().lm, TOKENIZER, tmp_path)
    lm = wrap_lora(
        load_causal_lm(str(tmp_path), dtype=torch.float32).eval(),
        AdapterSettings(4, 8.0, 0.0, ("q_proj", "v_proj")),
    )
    changed(lm)
    return lm


def changed(lm: Any) -> None:
    with torch.no_grad():
        for _, parameter in adapter_weights(lm):
            parameter.normal_(0.0, 0.3)


def lora_engine(lm: Any, folder: Path, *servers: ContractServer, world_size: int = 1) -> Any:
    urls = ",".join(server.url for server in servers)
    config = replace(load_config([f"{URLS}=[{urls}]"]).actor_rollout_ref.rollout, name="sglang")
    return build_rollout(
        replace(
            spec_of("hf"),
            config=config,
            model_path=str(folder),
            load_policy=lambda: PolicyModel(lm),
            has_adapters=True,
            world_size=world_size,
        )
    )


def test_an_adapter_is_published_alone_and_given_again_to_a_server_that_restarts(
    adapted: Any, tmp_path: Path, servers: list[ContractServer]
) -> None:
    servers.append(ContractServer(policy()))
    servers[0].lora = True
    engine = lora_engine(adapted, tmp_path, servers[0])
    assert engine.traits.loads_adapters

    async def scenario() -> None:
        for version in (1, 2):
            changed(adapted)
            await engine.begin_update()
            await engine.load(adapter_weights(adapted))
            await engine.commit(version)
            out = await engine.generate(PROMPT, SHORT, "new")
            assert out.versions == [version] * SHORT.max_tokens
            expected = trainer_log_probs(PolicyModel(adapted), PROMPT, out.token_ids, 1.0)
            assert out.log_probs == pytest.approx(expected, abs=1e-4)
            assert len(servers[0].adapters) == 1, "the adapter before it stays"
        await engine.sleep()
        assert servers[0].released == {"kv_cache"}, "the copy here has no base"
        servers[0].die()
        await asyncio.to_thread(servers[0].come_back)
        assert (await engine.generate(PROMPT, SHORT, "again")).token_ids == out.token_ids
        await engine.close()
        assert not servers[0].adapters

    asyncio.run(scenario())
    assert "/update_weights_from_disk" not in servers[0].calls
    following = lora_engine(adapted, tmp_path, servers[0])
    assert following.traits.loads_adapters, "its base is that of the files"
    asyncio.run(following.close())


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("lora", False, "without --enable-lora"),
        ("dp_size", 2, "has replicas"),
        ("max_lora_rank", 3, "--max-lora-rank 3, and the adapter has rank 4"),
        ("lora_target_modules", ["q_proj"], "without v_proj in --lora-target-modules"),
        ("version", "another-run-7", "has weights 'another-run-7' instead of those of its files"),
    ],
)
def test_a_server_that_cannot_take_the_adapter_gets_merged_weights(
    attribute: str,
    value: Any,
    words: str,
    adapted: Any,
    tmp_path: Path,
    servers: list[ContractServer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """This holds for servers of other workers too, because all workers get the same tensors."""
    servers += [ContractServer(policy()) for _ in range(2)]
    for server in servers:
        server.lora = True
    setattr(servers[1], attribute, value)
    with caplog.at_level("INFO"):
        engine = lora_engine(adapted, tmp_path, *servers, world_size=2)
    assert words in caplog.text
    assert not engine.traits.loads_adapters
    asyncio.run(engine.close())


def test_an_adapter_to_generate_with_is_merged_into_the_servers_weights(
    adapted: Any, tmp_path: Path, servers: list[ContractServer]
) -> None:
    servers.append(ContractServer(policy()))
    words = ["rollout.name=sglang", f"rollout.server.urls=[{servers[0].url}]"]
    spec = replace(
        spec_of("hf"),
        config=load_config(words, config_name="generation").rollout,
        model_path=str(tmp_path),
        current_weights=lambda: merged_weights(adapted),
    )
    engine = build_rollout(spec)

    async def scenario() -> None:
        out = await engine.generate(PROMPT, SHORT, "adapted")
        expected = trainer_log_probs(PolicyModel(adapted), PROMPT, out.token_ids, 1.0)
        assert out.log_probs == pytest.approx(expected, abs=1e-4)
        await engine.close()

    asyncio.run(scenario())


def test_sglang_stays_where_servers_run_and_is_native_where_nothing_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    monkeypatch.setattr("hone.config.checks.find_spec", lambda name: object())
    assert compose([name]).config.actor_rollout_ref.rollout.name == "sglang"


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_run_trains_through_a_running_server(
    lora: bool, tmp_path: Path, servers: list[ContractServer]
) -> None:
    """The server ends with the weights of the last step, and its log-probs are the trainer's."""
    from hone.trainer.main_ppo import run
    from tests.workers.tasks import config_of, write_model

    model = write_model(tmp_path / "model")
    lm = load_causal_lm(str(model), dtype=torch.float32).eval()
    servers.append(ContractServer(PolicyModel(lm), eos=lm.config.eos_token_id))
    servers[0].lora = lora
    row = {"data_source": "arithmetic", "prompt": "1+1=", "reward_model": {"ground_truth": 2}}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    run(
        config_of(
            model,
            "actor_rollout_ref.rollout.name=sglang",
            f"{URLS}=[{servers[0].url}]",
            *["actor_rollout_ref.model.lora_rank=4"] * lora,
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
    assert ("/load_lora_adapter" in servers[0].calls) == lora
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
