"""Seam proof: a loop outside the package trains, and its environment's tokens teach exactly nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from hone.agents.contract import ServerManager
from hone.agents.loop_names import loop_arguments
from hone.engine.engine import Engine
from hone.models.load import load_tokenizer
from hone.models.tiny import character_tokenizer
from hone.plugins import load_object
from hone.protocol import DataProto
from hone.rollout.scripted import ScriptedRollout
from hone.tracking import read_metrics
from hone.trainer.main_ppo import run
from hone.verl.actor_rollout_ref import ActorRolloutRefWorker
from hone.verl.dialect import load_config
from hone.workers.actor import PolicyObjective

Command = Callable[..., list[str]]


@pytest.fixture
def train(command: Command, examples: Path) -> list[str]:
    loop = f"{examples / 'two_turn_loop.py'}:TwoTurnAgentLoop"
    return command(
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={loop}",
    )


def test_the_loop_trains_two_steps_and_env_tokens_get_no_gradient(
    train: list[str], examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    original = Engine._forward

    def watched(self: Engine, micro: DataProto, options: Mapping[str, Any]) -> dict[str, Tensor]:
        out = original(self, micro, options)
        if out["log_probs"].requires_grad:
            out["log_probs"].retain_grad()
            seen.append((out["log_probs"], micro.batch["response_mask"]))
        return out

    monkeypatch.setattr(Engine, "_forward", watched)
    run(load_config(train))
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert seen
    for log_probs, mask in seen:
        assert log_probs.grad is not None
        hint = mask == 0
        assert bool((log_probs.grad[hint] == 0).all())
        assert int((log_probs.grad[~hint] != 0).sum()) > 0
    rows = pq.read_table(tmp_path / "rollouts" / "step_2.parquet").to_pylist()
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    text = load_object(f"{examples / 'two_turn_loop.py'}:HINT")
    hints = 0
    for row in rows:
        env = [t for t, m in zip(row["response_ids"], row["response_mask"], strict=True) if not m]
        assert row["num_turns"] == 4
        hints += tokenizer.decode(env) == text
    assert hints == len(rows)


def test_a_second_turn_without_room_is_left_out(examples: Path) -> None:
    tokenizer = character_tokenizer()
    engine = ScriptedRollout(["x" * 9, "y"], tokenizer=tokenizer)
    limits = ["data.max_prompt_length=8", "data.max_response_length=64"]
    short = "actor_rollout_ref.rollout.max_model_len=20"
    config = load_config(["actor_rollout_ref.model.path=unused", *limits, short])

    async def play() -> Any:
        manager = ServerManager(engine, seed=1, max_tokens=64, max_model_len=20)
        factory = load_object(f"{examples / 'two_turn_loop.py'}:TwoTurnAgentLoop")
        loop = factory(server_manager=manager, **loop_arguments(config, tokenizer))
        return await loop.run({}, prompt_ids=[5] * 4)

    assert tokenizer.decode(asyncio.run(play()).response_ids) == "x" * 8


def two_turn_batch(worker: ActorRolloutRefWorker, config: Any) -> DataProto:
    """Trajectories of the loop, with advantages as an estimator might give."""
    from hone.agents.collate import object_array

    rows = DataProto.from_dict(
        non_tensors={
            "uid": object_array([f"row-{i // 2}" for i in range(4)]),
            "sample_index": object_array([i % 2 for i in range(4)]),
            "raw_prompt": object_array([f"{i // 2}+1=" for i in range(4)]),
        }
    )
    rows.meta_info["sampling_params"] = {"temperature": 1.0}
    batch = worker.generate_sequences(rows)
    batch.meta_info["temperature"] = 1.0
    batch = batch.union(worker.compute_log_prob(batch))
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(batch.batch["responses"].shape, generator=generator)
    batch.batch["advantages"] = advantages * batch.batch["response_mask"]
    return batch


def trained_weights(config: Any, change: Callable[[DataProto], None]) -> list[Tensor]:
    worker = ActorRolloutRefWorker(config, "actor_rollout")
    worker.init_model()
    batch = two_turn_batch(worker, config)
    change(batch)
    objective = PolicyObjective(config.actor_rollout_ref.actor, temperature=1.0)
    worker.actor.engine.train_minibatch(batch, objective)
    worker.close()
    return [p.detach().clone() for p in worker.actor.engine.module.parameters()]


def spoil(batch: DataProto, where: int) -> None:
    """Absurd advantages and log-probs at the tokens with this mask."""
    chosen = batch.batch["response_mask"] == where
    assert bool(chosen.any())
    for name, value in (("advantages", 1e6), ("old_log_probs", -5.0), ("rollout_log_probs", -3.0)):
        batch.batch[name] = batch.batch[name].masked_fill(chosen, value)


def test_whatever_stands_at_env_tokens_the_weights_are_the_same_bit_for_bit(
    train: list[str],
) -> None:
    config = load_config(train)
    plain = trained_weights(config, lambda batch: None)
    spoiled = trained_weights(config, lambda batch: spoil(batch, where=0))
    assert all(torch.equal(a, b) for a, b in zip(plain, spoiled, strict=True))
    learned = trained_weights(config, lambda batch: spoil(batch, where=1))
    assert not all(torch.equal(a, b) for a, b in zip(plain, learned, strict=True))
