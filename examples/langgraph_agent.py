"""A LangGraph agent as an agent loop, outside the package: a graph of a model node and a tool node.

    pip install langgraph
    actor_rollout_ref.rollout.agent.default_agent_loop=examples/langgraph_agent.py:LangGraphAgentLoop

The graph sees messages; the tokens of the trajectory are kept beside them, so that nothing the model wrote
is tokenised again.
"""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.graph import END, START, MessagesState, StateGraph

from hone.agents.agent_data import AgentData
from hone.agents.contract import AgentLoopBase, AgentLoopOutput
from hone.agents.observations import observation_ids
from hone.agents.parsers.json_calls import HermesToolParser
from hone.agents.tools.function_tool import tool_of
from hone.data.messages import as_messages


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


TOOLS = {tool.name: tool for tool in (tool_of(add),)}


class LangGraphAgentLoop(AgentLoopBase):
    """Ends when the model calls no tool, or where the response is full."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        schemas = [tool.tool_schema.model_dump() for tool in TOOLS.values()]
        prompt = self.prompt_ids(row, schemas)
        talk = AgentData(as_messages(row["raw_prompt"]), list(prompt), self.request_id, {})
        graph = StateGraph(MessagesState)
        graph.add_node("model", self._model(talk, sampling_params))
        graph.add_node("tools", self._tools(talk))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", lambda state: "tools" if _calls(state) else END)
        graph.add_conditional_edges("tools", lambda state: END if _is_full(state) else "model")
        question = [HumanMessage(str(message["content"])) for message in talk.messages]
        await graph.compile().ainvoke({"messages": question}, {"recursion_limit": 64})
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=talk.prompt_ids[len(prompt) :],
            response_mask=talk.response_mask,
            response_logprobs=talk.response_logprobs,
            versions=talk.versions,
            num_turns=talk.assistant_turns + talk.user_turns + 1,
            extra_fields={"turn_spans": talk.turn_spans},
        )

    def _room(self, talk: AgentData) -> int:
        used = len(talk.response_mask)
        return self.response_limit(len(talk.prompt_ids) - used) - used

    def _model(self, talk: AgentData, sampling_params: dict[str, Any]) -> Any:
        async def model(state: MessagesState) -> dict[str, Any]:
            room = self._room(talk)
            output = await self.server_manager.generate(
                talk.request_id,
                prompt_ids=list(talk.prompt_ids),
                sampling_params={**sampling_params, "max_tokens": room},
            )
            talk.add_turn(output)
            text = self.tokenizer.decode(output.token_ids)
            calls = [] if self._room(talk) <= 0 else HermesToolParser().calls(text)
            made = [
                {"name": call.name or "none", "args": dict(call.arguments), "id": str(number)}
                for number, call in enumerate(calls)
            ]
            return {"messages": [AIMessage(content=text, tool_calls=made)]}

        return model

    def _tools(self, talk: AgentData) -> Any:
        async def tools(state: MessagesState) -> dict[str, Any]:
            answers = [ToolMessage(await _answer(c), tool_call_id=c["id"]) for c in _calls(state)]
            ids = observation_ids(
                [{"role": "tool", "content": answer.content} for answer in answers],
                self.tokenizer,
                last_token=talk.prompt_ids[-1],
                template_kwargs=self.apply_chat_template_kwargs,
                chat=self.data_config.get("prompt_format", "chat") == "chat",
            )
            if len(ids) >= self._room(talk):
                answers[-1].additional_kwargs["full"] = True
            else:
                talk.add_observation(ids, "tool")
            return {"messages": answers}

        return tools


def _calls(state: MessagesState) -> list[Any]:
    return getattr(state["messages"][-1], "tool_calls", [])


def _is_full(state: MessagesState) -> bool:
    return bool(state["messages"][-1].additional_kwargs.get("full"))


async def _answer(call: Any) -> str:
    try:
        return str(await TOOLS[call["name"]].call(call["args"]))
    except Exception as error:  # the model reads what went wrong
        return f"Error: {type(error).__name__}: {error}"
