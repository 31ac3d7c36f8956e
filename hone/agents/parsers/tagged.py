"""Parsers of calls with one tag per argument: Qwen3-Coder and GLM.

<tool_call><function=add><parameter=a>1</parameter></function></tool_call>
<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
"""

from __future__ import annotations

from hone.agents.parsers.contract import (
    DelimitedParser,
    FunctionCall,
    Schemas,
    ToolCall,
    as_function_call,
    bad_call,
    parameter_schemas,
    parse_value,
    texts_between,
)

_EXPECTED_FORMAT = "a call is <function=NAME><parameter=KEY>VALUE</parameter></function>"
_EXPECTED_GLM_ARGUMENT = "an argument is <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"


class _TaggedParser(DelimitedParser):
    """Base class of both parsers; the content is the text before the first call, later text is dropped."""

    opening, closing = "<tool_call>", "</tool_call>"

    def content(self, text: str) -> str:
        return text.partition(self.opening)[0]


class Qwen3XMLToolParser(_TaggedParser):
    """Named `qwen3_coder`: the tool's schema defines which arguments are strings."""

    def parse_body(self, body: str, tools: Schemas) -> list[ToolCall]:
        bodies = list(texts_between(body, "<function=", "</function>"))
        if not bodies or body.rfind("<parameter=") > body.rfind("</parameter>"):
            return [bad_call(_EXPECTED_FORMAT)]
        return [_parse_qwen3_call(call, tools) for call in bodies]

    def _parse_xml_function_call(
        self, function_call_str: str, tools: Schemas | None
    ) -> FunctionCall | None:
        call = _parse_qwen3_call(function_call_str, tools or ())
        return None if call.error else as_function_call(call)


def _parse_qwen3_call(body: str, tools: Schemas) -> ToolCall:
    name, separator, parameters = body.partition(">")
    if not separator:
        return bad_call(_EXPECTED_FORMAT)
    schemas = parameter_schemas(name, tools)
    arguments = {}
    for parameter in texts_between(parameters, "<parameter=", "</parameter>"):
        key, separator, value = parameter.partition(">")
        if not separator:
            return bad_call(_EXPECTED_FORMAT)
        json_type = schemas.get(key, {}).get("type", "string")
        arguments[key] = parse_value(value.removeprefix("\n").removesuffix("\n"), json_type)
    return ToolCall(name, arguments)


class GLMToolParser(_TaggedParser):
    """Named `glm`: a value that is valid JSON is parsed as JSON, unless the schema's type is string."""

    stop_tokens = ("<|observation|>",)

    def parse_body(self, body: str, tools: Schemas) -> list[ToolCall]:
        name = body.partition("<arg_key>")[0].strip()
        schemas = parameter_schemas(name, tools)
        arguments = {}
        if body.rfind("<arg_key>") > body.rfind("</arg_value>"):
            return [bad_call(_EXPECTED_GLM_ARGUMENT)]
        for pair in texts_between(body, "<arg_key>", "</arg_value>"):
            key, separator, value = pair.partition("</arg_key>")
            value_start = value.lstrip()
            if not separator or not value_start.startswith("<arg_value>"):
                return [bad_call(_EXPECTED_GLM_ARGUMENT)]
            key, value = key.strip(), value_start.removeprefix("<arg_value>").strip()
            arguments[key] = parse_value(value, schemas.get(key, {}).get("type"))
        return [ToolCall(name, arguments)]
