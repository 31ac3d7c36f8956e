"""The ReAct parser: `Thought: … Action: NAME Action Input: {…} Observation: …`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hone.agents.parsers.contract import (
    STRING_TYPES,
    Schemas,
    ToolCall,
    ToolParser,
    as_tool_call,
    bad_call,
    parameter_schemas,
)
from hone.text import BadText, read_json

ACTION, ACTION_INPUT, OBSERVATION = "Action:", "Action Input:", "Observation:"
FINAL_ANSWER = "Final Answer:"
_ACTION_LINE = re.compile(rf"(?m)^[ \t]*{ACTION}")
_INSTRUCTIONS = """\
You may use these tools:

{tools}

Write in this form:
Thought: what to do next
Action: the name of one tool ({names})
Action Input: its arguments as a JSON object
Observation: what the tool answers
and repeat these lines as often as needed. Then end with:
Thought: what follows from it
Final Answer: the answer"""


class ReactToolParser(ToolParser):
    """Named `react`: one call per turn, whose input is a JSON object or the first argument."""

    template_renders_tools = False
    stop = (f"\n{OBSERVATION}",)

    def content(self, text: str) -> str:
        return text.partition(ACTION)[0]

    def calls_with_schemas(self, tools: Schemas, text: str) -> list[ToolCall]:
        text = text.partition(f"\n{OBSERVATION}")[0]
        if ACTION not in text:
            return []
        action_ends = [match.end() for match in _ACTION_LINE.finditer(text)]
        start = action_ends[-1] if action_ends else text.find(ACTION) + len(ACTION)
        if text.rfind(FINAL_ANSWER) > start:
            return []
        name, separator, argument_text = text[start:].partition(ACTION_INPUT)
        name, argument_text = name.strip(), argument_text.strip()
        if not separator and name.endswith("]"):  # for example `search[a question]`
            name, _, argument_text = name[:-1].partition("[")
        if not name:
            return [bad_call(f"write the name of a tool after {ACTION}")]
        if argument_text.startswith("{"):
            return [as_tool_call(name, argument_text)]
        parameters = parameter_schemas(name, tools)
        if not argument_text or not parameters:
            return [ToolCall(name, {})]
        first_parameter, schema = next(iter(parameters.items()))
        try:
            value = read_json(argument_text, strict=True)
        except BadText:
            value = argument_text
        if schema.get("type") in STRING_TYPES and not isinstance(value, str):
            value = argument_text
        return [ToolCall(name, {first_parameter: value})]

    def instructions(self, tools: Schemas) -> str:
        tool_lines = []
        for tool in (schema.function for schema in tools):
            arguments = ", ".join(
                f"{name} ({field.type}): {field.description or name}"
                for name, field in tool.parameters.properties.items()
            )
            tool_lines.append(f"{tool.name}: {tool.description} Arguments: {arguments or 'none'}.")
        names = ", ".join(schema.function.name for schema in tools)
        return _INSTRUCTIONS.format(tools="\n".join(tool_lines), names=names)

    def observation(self, text: str, answers: Sequence[str]) -> str:
        prefix = "" if text.rstrip().endswith(OBSERVATION) else f"\n{OBSERVATION}"
        return f"{prefix} {' '.join(answers)}\nThought:"
