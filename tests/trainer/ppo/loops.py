"""Agent loops for tests: one that scores itself, one with a token that the policy did not write."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

from hone.agents.contract import AgentLoopBase, AgentLoopOutput


class ScoresItself(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt = self.prompt_ids(row)
        out = await self.server_manager.generate(prompt_ids=prompt, sampling_params=sampling_params)
        return AgentLoopOutput(
            prompt,
            out.token_ids,
            [1] * len(out.token_ids),
            out.log_probs,
            reward_score=float(len(set(out.token_ids))),
            num_turns=2,
        )


class TwoTurns(AgentLoopBase):
    """Writes, is told something by the environment, writes again."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt = self.prompt_ids(row)
        message = self.tokenizer.encode("xyz"[:2], add_special_tokens=False)
        params = {**sampling_params, "max_tokens": 2}
        first = await self.server_manager.generate(prompt_ids=prompt, sampling_params=params)
        second = await self.server_manager.generate(
            prompt_ids=[*prompt, *first.token_ids, *message], sampling_params=params
        )
        return AgentLoopOutput(
            prompt,
            [*first.token_ids, *message, *second.token_ids],
            [1] * len(first.token_ids) + [0] * len(message) + [1] * len(second.token_ids),
            [*first.log_probs, *[0.0] * len(message), *second.log_probs],
            num_turns=4,
            extra_fields={"tool_outputs": ["xy"]},
        )


class SaysMore(TwoTurns):
    """Says things beyond the trajectory: of one type, of several, and by names that the file has."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **row)
        output.extra_fields = {
            "searches": row["sample_index"],
            "plan": {"depth": 2} if row["sample_index"] else "none",
            "prompt_text": "mine",
            "turn_scores": [0.5, None],
        }
        return output


class ByLength(AgentLoopBase):
    """Rows of an odd index get six tokens, the others one."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt = self.prompt_ids(row)
        length = 1 + 5 * (row["extra_info"]["index"] % 2)
        out = await self.server_manager.generate(
            prompt_ids=prompt, sampling_params={**sampling_params, "max_tokens": length}
        )
        tokens = len(out.token_ids)
        return AgentLoopOutput(prompt, out.token_ids, [1] * tokens, out.log_probs, num_turns=2)


class Gated(ByLength):
    """Rows whose index modulo 4 is above 1 wait until the file `gate` lies in the run's folder."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        gate = Path(self.config.trainer.default_local_dir) / "gate"
        while row["extra_info"]["index"] % 4 > 1 and not gate.exists():
            await asyncio.sleep(0.01)
        return await super().run(sampling_params, **row)


class TwentyFold(AgentLoopBase):
    """The first half of the rows gets one token each, the other half twenty."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt = self.prompt_ids(row)
        length = 20 if row["extra_info"]["index"] % 4 >= 2 else 1
        params = {**sampling_params, "max_tokens": length, "ignore_eos": True}
        out = await self.server_manager.generate(prompt_ids=prompt, sampling_params=params)
        tokens = len(out.token_ids)
        return AgentLoopOutput(prompt, out.token_ids, [1] * tokens, out.log_probs, num_turns=2)


class Summarises(AgentLoopBase):
    """One to three rows per trajectory: each prompt ends with the last token of the row before."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        prompt = list(self.prompt_ids(row))
        rows = []
        for turn in range(1 + (row["extra_info"]["index"] + row["sample_index"]) % 3):
            params = {**sampling_params, "max_tokens": 2 + turn, "ignore_eos": True}
            out = await self.server_manager.generate(prompt_ids=prompt, sampling_params=params)
            rows.append(self.output(prompt, out))
            prompt = [*self.prompt_ids(row), out.token_ids[-1]]
        return rows

    def output(self, prompt: list[int], out: Any) -> AgentLoopOutput:
        return AgentLoopOutput(
            prompt,
            out.token_ids,
            [1] * len(out.token_ids),
            out.log_probs,
            num_turns=2,
            versions=out.versions,
        )


class ScoresRows(Summarises):
    """Scores its first row with 1 and leaves the others without a score."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        rows = await super().run(sampling_params, **row)
        rows[0].reward_score = 1.0 + row["sample_index"]
        return rows


class Measured(Summarises):
    """Both responses of a row count its index as tool calls; they score differently."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        output = (await super().run(sampling_params, **row))[0]
        output.reward_score = float(row["sample_index"])
        output.metrics = {"tool_calls": row["extra_info"]["index"]}
        return [output]


class Recorded(AgentLoopBase):
    """The same tokens for a row in every run, whatever the policy's weights are."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        random = Random(f"{row['extra_info']['index']} {row['sample_index']}")
        tokens = [random.randrange(3, len(self.tokenizer)) for _ in range(random.randint(1, 6))]
        return AgentLoopOutput(
            self.prompt_ids(row),
            tokens,
            [1] * len(tokens),
            [-3.0] * len(tokens),
            reward_score=sum(tokens) % 7 / 7,
            num_turns=2,
        )
