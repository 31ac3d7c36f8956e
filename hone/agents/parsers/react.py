"""ReAct: `Thought: … Action: NAME Action Input: {…} Observation: …`, until a `Final Answer:`.

The prompt explains the format; an answer continues the model's text after `Observation:`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hone.agents.parsers.contract import (
    Schemas,
    ToolCall,
    ToolParser,
    arguments_schema,
    as_tool_call,
    bad_call,
)
from hone.text import BadText, read_json

ACTION, INPUT, OBSERVATION = "Action:", "Action Input:", "Observation:"
FINAL = "Final Answer:"
_LINE = re.compile(rf"(?m)^[ \t]*{ACTION}")
_FORMAT = """\
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
    """Named `react`; one call per turn, with an object of arguments or the text of a single argument."""

    in_template = False
    stop = (f"\n{OBSERVATION}",)

    def content(self, text: str) -> str:
        return text.partition(ACTION)[0]

    def calls_to(self, tools: Schemas, text: str) -> list[ToolCall]:
        text = text.partition(f"\n{OBSERVATION}")[0]
        starts = [mark.end() for mark in _LINE.finditer(text)] or [text.find(ACTION) + len(ACTION)]
        start = starts[-1]
        if ACTION not in text or text.rfind(FINAL) > start:
            return []
        name, mark, given = text[start:].partition(INPUT)
        name, given = name.strip(), given.strip()
        if not mark and name.endswith("]"):  # for example `search[a question]`
            name, _, given = name[:-1].partition("[")
        if not name:
            return [bad_call(f"after {ACTION} stands the name of a tool")]
        if given.startswith("{"):
            return [as_tool_call(name, given)]
        only = next(iter(arguments_schema(name, tools)), None)
        if not given or only is None:
            return [ToolCall(name, {})]
        try:
            value = read_json(given, strict=True)
        except BadText:
            value = given
        return [ToolCall(name, {only: value})]

    def calls(self, text: str) -> list[ToolCall]:
        return self.calls_to((), text)

    def instructions(self, tools: Schemas) -> str:
        lines = []
        for tool in (schema.function for schema in tools):
            arguments = ", ".join(
                f"{name} ({field.type}): {field.description or name}"
                for name, field in tool.parameters.properties.items()
            )
            lines.append(f"{tool.name}: {tool.description} Arguments: {arguments or 'none'}.")
        names = ", ".join(schema.function.name for schema in tools)
        return _FORMAT.format(tools="\n".join(lines), names=names)

    def observation(self, text: str, answers: Sequence[str]) -> str:
        mark = "" if text.rstrip().endswith(OBSERVATION) else f"\n{OBSERVATION}"
        return f"{mark} {' '.join(answers)}\nThought:"
