"""200 trajectories at the same time whose tools sleep at random, through the tool loop and the native engine.

The time of all is compared with the least that it can be: the longest trajectory alone, or the decoding
of all of them with tools that answer at once. Every turn calls the tool; turns have a fixed length.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hone.agents.groups import GroupRequest
from hone.agents.parsers.contract import ToolCall, ToolParser
from hone.agents.runner import LoopRunner
from hone.agents.tools.contract import BaseTool, ToolResponse, function_schema
from hone.config import PPOTrainerConfig
from hone.models.policy import PolicyModel
from hone.models.tiny import character_tokenizer, tiny_lm
from hone.rollout.native.core import NativeCore
from hone.rollout.native.engine import NativeRollout
from hone.verl.dialect import load_config

TRAJECTORIES, TURNS, TOKENS = 200, 4, 8
LONGEST_SLEEP_S = 2.0
PAIRS = 3
TARGETS = {"over_least": 1.3}
MULTI = "actor_rollout_ref.rollout.multi_turn"


class Wait(BaseTool):
    """Sleeps as long as the row says for this call."""

    def __init__(self, config: Any, tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self._sleeps: dict[str, list[float]] = {}

    def get_openai_tool_schema(self) -> Any:
        return function_schema("wait", "Sleep.")

    async def create(
        self, instance_id: str | None = None, sleeps: Any = (), **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id, response = await super().create(instance_id)
        self._sleeps[instance_id] = list(sleeps)
        return instance_id, response

    async def execute(self, instance_id: str, parameters: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(self._sleeps[instance_id].pop(0))
        return "awake"


class EveryTurn(ToolParser):
    """Each turn is a call of `wait`."""

    def calls(self, text: str) -> list[ToolCall]:
        return [ToolCall("wait", {})]


def configured(folder: Path) -> PPOTrainerConfig:
    (folder / "tools.yaml").write_text("tools:\n  - class_name: benchmarks.agents.Wait\n")
    return load_config(
        [
            "actor_rollout_ref.model.path=unused",
            "data.prompt_format=raw",
            "data.max_prompt_length=32",
            "data.max_response_length=512",
            f"{MULTI}.enable=true",
            f"{MULTI}.tool_config_path={folder / 'tools.yaml'}",
            f"{MULTI}.format=benchmarks.agents:EveryTurn",
            f"{MULTI}.max_assistant_turns={TURNS}",
        ]
    )


def requests(sleeps: list[list[float]]) -> list[GroupRequest]:
    sampling = {"temperature": 1.0, "max_tokens": TOKENS, "ignore_eos": True}
    return [
        GroupRequest(
            i,
            (
                {
                    "uid": f"t{i}",
                    "trajectory_id": f"t{i}",
                    "sample_index": 0,
                    "raw_prompt": f"task {i:04d}:",
                    "tools_kwargs": {"wait": {"create_kwargs": {"sleeps": nap}}},
                },
            ),
            (sampling,),
        )
        for i, nap in enumerate(sleeps)
    ]


def seconds(runner: LoopRunner, sleeps: list[list[float]]) -> float:
    """Wall time of the trajectories with these sleeps."""
    started = time.perf_counter()
    runner.submit(requests(sleeps))
    runner.run_until(lambda: False)
    spent = time.perf_counter() - started
    for group in runner.pop_finished():
        assert group.outputs[0].extra_fields["tool_call_counts"] == TURNS - 1
    return spent


def main() -> dict[str, Any]:
    torch.set_num_threads(1)
    tokenizer = character_tokenizer()
    lm = tiny_lm(len(tokenizer), hidden=64, layers=2, mlp=128, eos_token_id=None).eval()
    core = NativeCore(
        PolicyModel(lm),
        eos_ids=(),
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        tokenizer=tokenizer,
    )
    engine = NativeRollout(core)
    draw = random.Random(0)
    sleeps = [[draw.uniform(0, LONGEST_SLEEP_S) for _ in range(TURNS)] for _ in range(TRAJECTORIES)]
    longest = max(sleeps, key=lambda nap: sum(nap[: TURNS - 1]))
    at_once = [[0.0] * TURNS] * TRAJECTORIES
    ratios, lines = [], []
    with TemporaryDirectory() as folder:
        runner = LoopRunner(configured(Path(folder)), engine, tokenizer, run_seed=1)
        seconds(runner, at_once)  # warm
        for _ in range(PAIRS):
            alone = seconds(runner, [longest])
            decoding, together = seconds(runner, at_once), seconds(runner, sleeps)
            ratios.append(together / max(alone, decoding))
            lines.append((together, alone, decoding))
    ratio = statistics.median(ratios)
    together, alone, decoding = lines[ratios.index(ratio)]
    print(
        f"{TRAJECTORIES} trajectories: {together:.2f} s; the longest alone {alone:.2f} s, decoding without "
        f"tools {decoding:.2f} s: {ratio:.2f} of the longer (target {TARGETS['over_least']})"
    )
    return {
        "over_least": round(ratio, 3),
        "together_s": round(together, 3),
        "longest_alone_s": round(alone, 3),
        "decoding_s": round(decoding, 3),
        "targets": TARGETS,
    }


if __name__ == "__main__":
    main()
