"""Every call gets an answer and is recorded in order, also refused, late and failed calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from hone.agents.agent_data import AgentData
from hone.agents.parsers.contract import ToolCall
from hone.agents.tools.contract import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from hone.agents.tools.session import ToolSession
from hone.event_loop import run_coroutine


class Echo(BaseTool):
    """Returns `text`, after `wait` seconds or `last` of three calls; records its instances."""

    def __init__(self) -> None:
        self.alive: dict[str, dict[str, Any]] = {}
        self.most_at_once = self.running = 0
        schema = {
            "type": "function",
            "function": {"name": "echo", "parameters": {"required": ["text"]}},
        }
        super().__init__({}, OpenAIFunctionToolSchema.model_validate(schema))

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        if kwargs.get("broken"):
            raise ConnectionError("no server")
        self.alive[str(instance_id)] = kwargs
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        assert instance_id in self.alive
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        if "wait" in parameters:
            await asyncio.sleep(parameters["wait"])
        while parameters.get("last") and (self.most_at_once < 3 or self.running > 1):
            await asyncio.sleep(0)
        self.running -= 1
        if parameters["text"] == "raise":
            raise KeyError("oops")
        if parameters["text"] == "old style":
            return "as text", 0.5, {}
        answer = parameters["text"] + kwargs.get("suffix", "")
        return ToolResponse(text=answer), 0.25, {"n": len(answer)}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.75

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.alive[instance_id]


def make_session(tool: BaseTool, kwargs: Any = None, **changes: Any) -> ToolSession:
    limits = {
        "max_calls_per_turn": 3,
        "max_calls": None,
        "timeout_s": 60.0,
        "truncate": lambda text: text[:80],
    }
    data = AgentData([], [1], "r", kwargs or {})
    return ToolSession({tool.name: tool}, data, **{**limits, **changes})


def echo(text: str, **more: Any) -> ToolCall:
    return ToolCall("echo", {"text": text, **more})


def test_calls_of_a_turn_run_together_and_are_kept_in_their_order() -> None:
    tool = Echo()
    session = make_session(tool)
    calls = [echo("late", last=True), echo("b", wait=0), echo("c", wait=0)]
    assert asyncio.run(session.run_calls(calls)) == ["late", "b", "c"]
    assert tool.most_at_once == 3
    assert [output["text"] for output in session.outputs] == ["late", "b", "c"]
    assert session.outputs[0] == {
        "name": "echo",
        "arguments": {"text": "late", "last": True},
        "text": "late",
        "reward": 0.25,
        "metrics": {"n": 4},
    }
    assert session.agent_data.tool_rewards == [0.25] * 3
    assert len(tool.alive) == 1  # one state a trajectory, not one a call


def test_arguments_that_are_a_text_are_an_error_that_the_model_reads() -> None:
    session = make_session(Echo(), {"echo": "a text"}, truncate=lambda text: text)
    (answer,) = asyncio.run(session.run_calls([echo("hi")]))
    assert "tools_kwargs.echo is a text; give an object with create_kwargs" in answer
    assert session.failures == 1


def test_the_rows_arguments_reach_create_and_execute() -> None:
    tool = Echo()
    kwargs = {"echo": {"create_kwargs": {"truth": 7}, "execute_kwargs": {"suffix": "!"}}}
    assert asyncio.run(make_session(tool, kwargs).run_calls([echo("hi")])) == ["hi!"]
    (created,) = tool.alive.values()
    assert created == {"truth": 7, "create_kwargs": {"truth": 7}}


def test_create_may_take_the_rows_arguments_as_one_dict_only() -> None:
    class OneDict(Echo):
        async def create(  # type: ignore[override]
            self, instance_id: str | None = None, create_kwargs: Any = None
        ) -> Any:
            return await super().create(instance_id, **create_kwargs)

    tool = OneDict()
    session = make_session(tool, {"echo": {"create_kwargs": {"truth": 7}}})
    assert asyncio.run(session.run_calls([echo("hi")])) == ["hi"]
    assert list(tool.alive.values()) == [{"truth": 7}]


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (ToolCall("nothing", {}), "Error: there is no tool 'nothing'; the tools are echo"),
        (ToolCall("echo", {}), "Error: echo needs text"),
        (ToolCall("", {}, "the call is not valid JSON"), "Error: the call is not valid JSON"),
        (echo("raise"), "Error: echo failed: KeyError: 'oops'"),
        (echo("x", wait=60), "Error: echo took longer than 0.05 s"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_and_counted(call: ToolCall, answer: str) -> None:
    session = make_session(Echo(), timeout_s=0.05 if "wait" in call.arguments else 60.0)
    assert asyncio.run(session.run_calls([call])) == [answer]
    assert session.failures == 1
    assert session.timeouts == (["echo"] if "longer" in answer else [])
    assert session.agent_data.tool_rewards == []


def test_a_tool_that_cannot_begin_is_an_answer_too() -> None:
    session = make_session(Echo(), {"echo": {"create_kwargs": {"broken": True}}})
    answers = asyncio.run(session.run_calls([echo("x")]))
    assert answers == ["Error: echo failed: ConnectionError: no server"]


def test_calls_beyond_the_turns_limit_are_not_made() -> None:
    tool = Echo()
    answers = asyncio.run(
        make_session(tool, max_calls_per_turn=1).run_calls([echo("a"), echo("b")])
    )
    assert answers == ["a", "Error: not run: at most 1 tool calls per turn"]


def test_calls_beyond_the_trajectorys_limit_are_not_made() -> None:
    async def twice() -> list[str]:
        session = make_session(Echo(), max_calls=2)
        first = await session.run_calls([echo("a"), echo("b"), echo("c")])
        return [*first, *(await session.run_calls([echo("d")]))]

    a, b, c, d = asyncio.run(twice())
    assert (a, b) == ("a", "b")
    assert c == d == "Error: not run: all 2 tool calls are used up; answer without tools"


def test_answers_are_cut() -> None:
    assert asyncio.run(
        make_session(Echo(), truncate=lambda text: text[:2]).run_calls([echo("long")])
    ) == ["lo"]


def test_tools_that_answer_with_text_work() -> None:
    session = make_session(Echo())
    assert asyncio.run(session.run_calls([echo("old style")])) == ["as text"]
    assert session.agent_data.tool_rewards == [0.5]


def test_scores_are_asked_once_and_state_is_forgotten() -> None:
    async def run() -> tuple[dict[str, float], Echo]:
        tool = Echo()
        session = make_session(tool)
        await session.run_calls([echo("a")])
        scores = await session.scores()
        await session.release()
        await session.release()
        return scores, tool

    scores, tool = asyncio.run(run())
    assert scores == {"echo": 0.75}
    assert tool.alive == {}


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class OwnExit(BaseException):
    """A BaseException, which `except Exception` does not catch."""


ERRORS: dict[str, BaseException] = {
    "raises": RuntimeError("boom"),
    "cancels": asyncio.CancelledError(),
    "exits": SystemExit(3),
    "interrupts": KeyboardInterrupt("own"),
    "closes": GeneratorExit("own"),
    "stops": StopAsyncIteration("own"),
    "leaves": OwnExit("own"),
    "is unspeakable": Unspeakable(),
}


class Faulty(Echo):
    """Fails in one method: raises, hangs, …"""

    def __init__(self, verb: str, failure_kind: str) -> None:
        super().__init__()
        self.verb, self.failure_kind = verb, failure_kind

    async def _maybe_fail(self, verb: str) -> None:
        if verb == self.verb:
            if self.failure_kind == "hangs":
                await asyncio.Event().wait()
            raise ERRORS[self.failure_kind]

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        await self._maybe_fail("create")
        return await super().create(instance_id, **kwargs)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        await self._maybe_fail("execute")
        return await super().execute(instance_id, parameters, **kwargs)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        await self._maybe_fail("calc_reward")
        return await super().calc_reward(instance_id)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._maybe_fail("release")
        await super().release(instance_id)


async def run_session(session: ToolSession) -> tuple[list[str], dict[str, float]]:
    answers, scores = await session.run_calls([echo("a")]), await session.scores()
    await session.release()
    return answers, scores


@pytest.mark.parametrize("failure_kind", ["hangs", *ERRORS])
@pytest.mark.parametrize("verb", ["create", "execute", "calc_reward", "release"])
def test_no_verb_of_a_tool_stops_a_run(
    verb: str, failure_kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    session = make_session(
        Faulty(verb, failure_kind), timeout_s=0.05 if failure_kind == "hangs" else 60.0
    )
    (answer,), scores = run_coroutine(run_session(session))
    reason = {
        "hangs": "echo took longer than 0.05 s",
        "raises": "echo failed: RuntimeError: boom",
        "cancels": "echo failed: RuntimeError: it cancelled itself",
        "exits": "echo failed: RuntimeError: SystemExit: 3",
        "interrupts": "echo failed: RuntimeError: KeyboardInterrupt: own",
        "closes": "echo failed: RuntimeError: GeneratorExit: own",
        "stops": "echo failed: StopAsyncIteration: own",
        "leaves": "echo failed: RuntimeError: OwnExit: own",
        "is unspeakable": "echo failed: RuntimeError: Unspeakable (its message cannot be shown)",
    }[failure_kind]
    assert answer.startswith(f"Error: {reason}") if verb in ("create", "execute") else answer == "a"
    expected_scores = {"create": {}, "calc_reward": {"echo": 0.0}}.get(verb, {"echo": 0.75})
    assert scores == expected_scores
    assert session.failures == 1
    assert session.timeouts == (["echo"] if failure_kind == "hangs" else [])
    assert reason in caplog.text


class NotAsync(Echo):
    def execute(self, instance_id: str, parameters: dict[str, Any]) -> Any:  # type: ignore[override]
        raise RuntimeError("before anything is awaited")


class OwnTimeout(Echo):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        raise asyncio.TimeoutError("server")


@pytest.mark.parametrize(
    ("tool", "kwargs", "error"),
    [
        (NotAsync(), {}, "RuntimeError: before anything is awaited"),
        (NotAsync(), {"execute_kwargs": {"q": 1}}, "TypeError: NotAsync.execute() got an unexp"),
        (OwnTimeout(), {}, "TimeoutError: server"),
    ],
)
def test_a_call_that_fails_in_an_odd_place_is_told_as_it_is(
    tool: Echo, kwargs: Any, error: str
) -> None:
    session = make_session(tool, {"echo": kwargs})
    (answer,), _ = asyncio.run(run_session(session))
    assert answer.startswith(f"Error: echo failed: {error}")
    assert (session.failures, session.timeouts) == (1, [])


def test_a_score_that_is_no_finite_number_counts_0_and_as_a_failure() -> None:
    class Undecided(Echo):
        async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
            return float("nan")

    session = make_session(Undecided())
    assert asyncio.run(run_session(session))[1] == {"echo": 0.0}
    assert session.failures == 1


def test_a_tool_may_read_the_trajectory_so_far() -> None:
    class Reading(Echo):
        async def execute(
            self, instance_id: str, parameters: dict[str, Any], agent_data: AgentData
        ) -> Any:
            agent_data.extra_fields["read"] = len(agent_data.messages)
            return f"{agent_data.prompt_ids} {agent_data.tools_kwargs}", 0.5, {}

    session = make_session(Reading(), {"echo": {"create_kwargs": {"x": 1}}})
    session.agent_data.messages.append({"role": "user", "content": "hi"})
    (answer,) = asyncio.run(session.run_calls([echo("a")]))
    assert answer == "[1] {'echo': {'create_kwargs': {'x': 1}}}"
    assert (session.agent_data.extra_fields, session.agent_data.tool_rewards) == (
        {"read": 1},
        [0.5],
    )


def test_an_image_is_an_error_and_not_lost() -> None:
    class Camera(Echo):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
            return ToolResponse(text="seen", image=[{"bytes": b"png"}]), 0.5, {}

    session = make_session(Camera())
    (answer,) = asyncio.run(session.run_calls([echo("a")]))
    assert answer.startswith("Error: echo failed: ToolError: images and video are not supported")
    assert (session.failures, session.agent_data.tool_rewards) == (1, [])


def test_an_array_is_json_and_not_shortened() -> None:
    class Numbers(Echo):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
            return np.arange(3000)

    session = make_session(Numbers(), truncate=lambda text: text)
    (answer,) = asyncio.run(session.run_calls([echo("a")]))
    assert json.loads(answer) == list(range(3000))
