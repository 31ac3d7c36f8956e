"""Search-R1's loop: the model searches a retrieval service, reads the passages, and answers.

The answer to `<search>query</search>` is `<information>passages</information>`, with mask 0. A
trajectory ends with `<answer>…</answer>`, after `max_assistant_turns`, or at the length limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple

from hone.agents.agent_data import AgentData
from hone.agents.contract import AgentLoopBase, AgentLoopOutput
from hone.data.prompts import tokenise, truncate
from hone.retrieval.client import RetrievalClient, RetrievalFailed, retrieve
from hone.rollout.contract import TokenOutput
from hone.text import clean_text
from hone.tokenizer import Tokenizer
from hone.types import Fields, Row

Generate = Callable[[list[int], int], Awaitable[TokenOutput]]

STOPS = ("</search>", "</answer>")
"""Stop strings of a turn; the response includes the token that completes a stop string."""
_PROBE_TIMEOUT_S = 10.0
INFORMATION_START, INFORMATION_END = "\n\n<information>", "</information>\n\n"
INVALID_ACTION_TEXT = (
    "\nThat was not a valid action. To search, I write the query between <search> and </search>; "
    "to give the final answer, I write it between <answer> and </answer>. I try again.\n"
)


class Action(NamedTuple):
    """A search query or an answer in a model turn."""

    kind: Literal["search", "answer"]
    content: str


def read_action(text: str) -> Action | None:
    """Returns the first complete search or answer of a turn, or None."""
    first: tuple[int, Action] | None = None  # start position and action
    kinds: tuple[Literal["search", "answer"], ...] = ("search", "answer")
    for kind in kinds:
        start = text.find(f"<{kind}>")
        end = text.find(f"</{kind}>", start)
        if 0 <= start < end and (first is None or start < first[0]):
            first = start, Action(kind, text[start + len(kind) + 2 : end].strip())
    return first[1] if first else None


def format_passages(passages: Sequence[str]) -> str:
    """Formats passages for the model, numbered and with their titles."""
    lines = []
    for number, passage in enumerate(passages, start=1):
        title, _, text = passage.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    return "".join(lines)


@dataclass
class SearchCounts:
    """The counts of one trajectory for the `env/*` metrics."""

    valid_actions: int = 0
    valid_searches: int = 0
    retrieval_failures: int = 0
    has_answer: bool = False

    def columns(self, num_turns: int) -> Row:
        """Returns the values of the `env/*` columns after `num_turns` turns."""
        return {
            "env/number_of_actions": num_turns,
            "env/finish_ratio": float(self.has_answer),
            "env/number_of_valid_action": self.valid_actions,
            "env/ratio_of_valid_action": self.valid_actions / num_turns,
            "env/number_of_valid_search": self.valid_searches,
            "env/retrieval_failures": self.retrieval_failures,
        }


@dataclass(frozen=True)
class SearchConversation:
    """Runs the turns of one search trajectory."""

    tokenizer: Tokenizer
    client: RetrievalClient
    response_length: int
    max_turns: int | None = None
    max_observation_tokens: int | None = None

    async def run(self, agent_data: AgentData, generate: Generate) -> SearchCounts:
        """Generates turns with `generate(prompt_ids, max_tokens)` until an answer or a limit."""
        counts = SearchCounts()
        while True:
            start_time = time.perf_counter()
            max_tokens = self.response_length - len(agent_data.response_mask)
            output = await generate(list(agent_data.prompt_ids), max_tokens)
            agent_data.seconds["model"] += time.perf_counter() - start_time
            agent_data.add_turn(output)
            text = self.tokenizer.decode(output.token_ids, skip_special_tokens=False)
            action = read_action(text)
            counts.valid_actions += action is not None
            counts.valid_searches += action is not None and action.kind == "search"
            counts.has_answer = action is not None and action.kind == "answer"
            is_last_turn = not output.token_ids or agent_data.assistant_turns == self.max_turns
            if counts.has_answer or is_last_turn:
                return counts
            ids = await self._observation_ids(action, agent_data, counts)
            if len(agent_data.response_mask) + len(ids) >= self.response_length:
                return counts
            agent_data.add_observation(ids, "tool")

    async def _observation_ids(
        self, action: Action | None, agent_data: AgentData, counts: SearchCounts
    ) -> list[int]:
        """Returns the ids of the retrieved passages, or of a hint if the model's turn has no action."""
        encode = partial(tokenise, tokenizer=self.tokenizer)
        if action is None:
            return encode(INVALID_ACTION_TEXT)
        agent_data.turn_spans[-1]["calls"] = 1
        start_time = time.perf_counter()
        passages = await asyncio.wrap_future(self.client.submit(action.content))
        agent_data.seconds["tools"] += time.perf_counter() - start_time
        counts.retrieval_failures += passages is None
        text = clean_text(format_passages(passages or ()).strip())
        ids = encode(INFORMATION_START + text + INFORMATION_END)
        max_tokens = self.max_observation_tokens
        if max_tokens is None or len(ids) <= max_tokens:
            return ids
        end_ids = encode(INFORMATION_END)
        max_passage_tokens = max(max_tokens - len(end_ids), 0)
        return [*encode(INFORMATION_START + text)[:max_passage_tokens], *end_ids]


class SearchAgentLoop(AgentLoopBase):
    """The loop `search_agent`, which searches with the service of the config `retriever`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._hone.problems = self._service_problems

    def _service_problems(self) -> Iterator[str]:
        """Yields a problem if the token limit leaves no room for passages, or the service is down."""
        limit = self.rollout_config.multi_turn.max_observation_tokens
        tags = tokenise(INFORMATION_START + INFORMATION_END, self.tokenizer)
        if limit is not None and limit <= len(tags):
            yield (
                f"actor_rollout_ref.rollout.multi_turn.max_observation_tokens={limit} leaves no token "
                f"for passages, because <information> and </information> have {len(tags)}; raise it"
            )
        retriever = self.config.retriever
        timeout_s = min(retriever.timeout_s, _PROBE_TIMEOUT_S)
        try:
            retrieve(retriever.url, ["capital of France"], 1, timeout_s)
        except RetrievalFailed as error:
            yield (
                f"retriever.url does not answer ({error}); start `hone serve-retriever --corpus "
                "FILE`, or set do_search=false"
            )

    async def run(self, sampling_params: Fields, **row: Any) -> AgentLoopOutput:
        multi_turn = self.rollout_config.multi_turn
        prompt = truncate(
            self._hone.prompt_ids(row), self._hone.prompt_length, self.data_config.truncation
        )
        agent_data = AgentData([], list(prompt), row["trajectory_id"], {})
        max_tokens_per_turn = sampling_params.get("max_tokens") or self._hone.response_length

        async def generate(prompt_ids: list[int], max_tokens: int) -> TokenOutput:
            sampling = sampling_params | {
                "max_tokens": min(max_tokens_per_turn, max_tokens),
                "stop": (*(sampling_params.get("stop") or ()), *STOPS),
            }
            return await self.server_manager.generate(
                agent_data.request_id, prompt_ids=prompt_ids, sampling_params=sampling
            )

        retriever = self.config.retriever
        counts = await SearchConversation(
            self.tokenizer,
            retrieval_client(retriever.url, retriever.topk, retriever.timeout_s, retriever.retries),
            self._hone.response_limit(len(prompt)),
            multi_turn.max_assistant_turns,
            multi_turn.max_observation_tokens,
        ).run(agent_data, generate)
        columns = counts.columns(agent_data.assistant_turns)
        return agent_data.to_output({"turn_spans": agent_data.turn_spans, **columns})


@cache
def retrieval_client(url: str, topk: int, timeout_s: float, retries: int) -> RetrievalClient:
    """Returns this process's client of a service; the client batches queries of all trajectories."""
    return RetrievalClient(url, topk, timeout_s=timeout_s, retries=retries)
