"""Search-R1's loop: the model thinks, searches a retrieval service, reads the passages, and answers.

`<search>query</search>` gets `<information>passages</information>` as tokens with mask 0; a turn with
neither a search nor an answer gets a message about it. A trajectory ends with `<answer>…</answer>`,
after `multi_turn.max_assistant_turns` turns (the last one cannot search), or at the length limit.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hone.agents.agent_data import AgentData
from hone.agents.contract import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from hone.data.prompts import truncate
from hone.retrieval.client import RetrievalClient, RetrievalFailed, retrieve
from hone.rollout.contract import TokenOutput
from hone.text import clean_text
from hone.tokenizer import Tokenizer
from hone.types import Row

Generate = Callable[[list[int], int], Awaitable[TokenOutput]]

STOPS = ("</search>", "</answer>")
"""Strings that end a turn; the token that completes one is kept in full."""
_PROBE_S = 10.0
OPENING, CLOSING = "\n\n<information>", "</information>\n\n"
INVALID = (
    "\nThat was not a valid action. To search, I write the query between <search> and </search>; to "
    "give the final answer, I write it between <answer> and </answer>. I try again.\n"
)


class Action(NamedTuple):
    """A search query or an answer in a model turn."""

    kind: Literal["search", "answer"]
    content: str


def read_action(text: str) -> Action | None:
    """Returns the first closed search or answer of a turn."""
    first: tuple[int, Action] | None = None
    kinds: tuple[Literal["search", "answer"], ...] = ("search", "answer")
    for kind in kinds:
        start = text.find(f"<{kind}>")
        end = text.find(f"</{kind}>", start)
        if 0 <= start < end and (first is None or start < first[0]):
            first = start, Action(kind, text[start + len(kind) + 2 : end].strip())
    return first[1] if first else None


def passages_text(passages: Sequence[str]) -> str:
    """Formats passages for the model, numbered and with their titles."""
    lines = [passage.partition("\n") for passage in passages]
    return "".join(
        f"Doc {i}(Title: {title}) {text}\n" for i, (title, _, text) in enumerate(lines, 1)
    )


@dataclass
class SearchFacts:
    """The counts of one trajectory for the `env/*` metrics."""

    valid_actions: int = 0
    valid_searches: int = 0
    retrieval_failures: int = 0
    answered: bool = False

    def columns(self, turns: int) -> Row:
        return {
            "env/number_of_actions": turns,
            "env/finish_ratio": float(self.answered),
            "env/number_of_valid_action": self.valid_actions,
            "env/ratio_of_valid_action": self.valid_actions / turns,
            "env/number_of_valid_search": self.valid_searches,
            "env/retrieval_failures": self.retrieval_failures,
        }


@dataclass(frozen=True)
class SearchConversation:
    """The rules of one search conversation, carried out by `run`."""

    tokenizer: Tokenizer
    client: RetrievalClient
    response_length: int
    max_turns: int | None = None
    max_observation_tokens: int | None = None

    async def run(self, talk: AgentData, generate: Generate) -> SearchFacts:
        """Runs turns until an answer or a limit; `generate` takes the ids so far and a token limit."""
        facts = SearchFacts()
        while True:
            started = time.perf_counter()
            room = self.response_length - len(talk.response_mask)
            output = await generate(list(talk.prompt_ids), room)
            talk.seconds["model"] += time.perf_counter() - started
            talk.add_turn(output)
            text = self.tokenizer.decode(output.token_ids, skip_special_tokens=False)
            action = read_action(text)
            facts.valid_actions += action is not None
            facts.valid_searches += action is not None and action.kind == "search"
            facts.answered = action is not None and action.kind == "answer"
            is_last = not output.token_ids or talk.assistant_turns == self.max_turns
            if facts.answered or is_last:
                return facts
            ids = await self._observation(action, talk, facts)
            if len(talk.response_mask) + len(ids) >= self.response_length:
                return facts
            talk.add_observation(ids, "tool")

    async def _observation(
        self, action: Action | None, talk: AgentData, facts: SearchFacts
    ) -> list[int]:
        if action is None:
            return self._ids(INVALID)
        talk.spans[-1]["calls"] = 1
        started = time.perf_counter()
        passages = await asyncio.wrap_future(self.client.submit(action.content))
        talk.seconds["tools"] += time.perf_counter() - started
        facts.retrieval_failures += passages is None
        text = clean_text(passages_text(passages or ()).strip())
        ids, limit = self._ids(OPENING + text + CLOSING), self.max_observation_tokens
        if limit is None or len(ids) <= limit:
            return ids
        closing = self._ids(CLOSING)
        return [*self._ids(OPENING + text)[: max(limit - len(closing), 0)], *closing]

    def _ids(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=False)]


class SearchAgentLoop(AgentLoopBase):
    """Named `search_agent` in rows; the `retriever` config gives the service."""

    def problems(self) -> Iterator[str]:
        """Reports a retrieval service that does not respond before training begins."""
        service = self.config.retriever
        try:
            retrieve(service.url, ["capital of France"], 1, min(service.timeout_s, _PROBE_S))
        except RetrievalFailed as error:
            yield (
                f"retriever.url does not answer ({error}); start `hone serve-retriever --corpus FILE`, "
                "or set do_search=false"
            )

    async def run(self, sampling_params: Row, **row: Any) -> AgentLoopOutput:
        limits = self.rollout_config.multi_turn
        prompt = truncate(self.prompt_ids(row), self.prompt_length, self.data_config.truncation)
        talk = AgentData([], list(prompt), row["trajectory_id"], {})
        turn_limit = sampling_params.get("max_tokens") or self.response_length
        stops = (*(sampling_params.get("stop") or ()), *STOPS)

        async def generate(prompt_ids: list[int], room: int) -> TokenOutput:
            return await self.server_manager.generate(
                talk.request_id,
                prompt_ids=prompt_ids,
                sampling_params={
                    **sampling_params,
                    "max_tokens": min(turn_limit, room),
                    "stop": stops,
                },
            )

        service = self.config.retriever
        facts = await SearchConversation(
            self.tokenizer,
            client_of(service.url, service.topk, service.timeout_s, service.retries),
            self.response_limit(len(prompt)),
            limits.max_assistant_turns,
            limits.max_observation_tokens,
        ).run(talk, generate)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=talk.prompt_ids[len(prompt) :],
            response_mask=talk.response_mask,
            response_logprobs=talk.response_logprobs,
            versions=talk.versions,
            num_turns=talk.assistant_turns + talk.user_turns + 1,
            metrics=AgentLoopMetrics(talk.seconds["model"], talk.seconds["tools"]),
            stop_reason=talk.stop_reason,
            routed_experts=talk.routed_experts,
            extra_fields={"turn_spans": talk.spans, **facts.columns(talk.assistant_turns)},
        )


@functools.cache
def client_of(url: str, topk: int, timeout_s: float, retries: int) -> RetrievalClient:
    """Returns one client per service and process, so that queries of all trajectories are batched."""
    return RetrievalClient(url, topk, timeout_s=timeout_s, retries=retries)
