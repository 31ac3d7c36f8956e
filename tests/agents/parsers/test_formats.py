"""The call formats of other models, and verl's parser interface."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.agents.parsers.contract import (
    MAX_CALL_CHARS,
    PARSERS,
    FunctionCall,
    ToolCall,
    ToolParser,
    as_tool_call,
)
from hone.agents.parsers.json_calls import HermesToolParser
from hone.agents.parsers.tagged import Qwen3XMLToolParser
from hone.agents.tools.contract import OpenAIFunctionToolSchema
from hone.models.tiny import character_tokenizer

ADD = OpenAIFunctionToolSchema.model_validate(
    {
        "function": {
            "name": "add",
            "parameters": {
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "string"},
                    "c": {"type": "array"},
                    "d": {"type": "boolean"},
                }
            },
        }
    }
)
QWEN3 = (
    "hm<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>"
    "<parameter=c>[1, 2]</parameter><parameter=d>True</parameter><parameter=e>3</parameter>"
    "\n</function>\n</tool_call>"
)
GLM = (
    "hm<tool_call>add\n<arg_key>a</arg_key><arg_value>1</arg_value>\n<arg_key>b</arg_key>"
    "<arg_value>two</arg_value></tool_call>"
)
KIMI = (
    "hm<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
)
LLAMA = (
    '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; '
    '{"name": "add", "parameters": {"b": "x"}}<|eom_id|>'
)
MISTRAL = (
    'hm[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]</s>'
)
MISTRAL_11 = 'hm[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"b": "x"}</s>'
DEEPSEEK_3 = (
    "hm<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
DEEPSEEK_31 = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
PYTHONIC = '<|python_start|>[add(a=-1, b="x\\n\\u0041", c=[1.5, (2,), {"k": None}], d=True), stop()]<|eot|>'
GPT_OSS = (
    "<|channel|>analysis<|message|>use add<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
)


@pytest.mark.parametrize(
    ("name", "text", "call"),
    [
        (
            "qwen3_coder",
            QWEN3,
            ToolCall("add", {"a": 1, "b": "2", "c": [1, 2], "d": True, "e": "3"}),
        ),
        ("glm", GLM, ToolCall("add", {"a": 1, "b": "two"})),
        ("kimi", KIMI, ToolCall("add", {"a": 1}, tool_call_id="functions.add:0")),
        ("gpt-oss", GPT_OSS, ToolCall("add", {"a": 1})),
    ],
)
def test_a_call_is_read(name: str, text: str, call: ToolCall) -> None:
    parser = ToolParser.get_tool_parser(name, character_tokenizer())
    assert parser.calls_with_schemas([ADD], text) == [call]
    assert parser.calls_with_schemas([], "no call") == []


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("llama3_json", LLAMA, [("add", {"a": 1}), ("add", {"b": "x"})]),
        (
            "llama3_json",
            LLAMA.removeprefix("<|python_tag|>"),
            [("add", {"a": 1}), ("add", {"b": "x"})],
        ),
        ("llama3_json", '{"answer": 42}', []),
        ("mistral", MISTRAL, [("add", {"a": 1}), ("add", {})]),
        ("mistral", MISTRAL_11, [("add", {"a": 1}), ("add", {"b": "x"})]),
        ("deepseek", DEEPSEEK_3, [("add", {"a": 1})]),
        ("deepseek", DEEPSEEK_31, [("add", {"a": 1})]),
        ("plain", 'hm <tool>add</tool>\n<args>{"a": 1}</args>', [("add", {"a": 1})]),
        (
            "pythonic",
            PYTHONIC,
            [
                ("add", {"a": -1, "b": "x\nA", "c": [1.5, [2], {"k": None}], "d": True}),
                ("stop", {}),
            ],
        ),
        ("pythonic", "[1, 2] is a list", []),
        (
            "react",
            'Thought: x\nAction: add\nAction Input: {"a": 1}\nObservation:',
            [("add", {"a": 1})],
        ),
        ("react", "Action: add\nAction Input: 7", [("add", {"a": 7})]),
        ("react", "Action: add[7]", [("add", {"a": 7})]),
        ("react", "Thought: done\nFinal Answer: 7", []),
    ],
)
def test_calls_of_other_formats_are_read(
    name: str, text: str, calls: list[tuple[str, object]]
) -> None:
    parser = ToolParser.get_tool_parser(name, character_tokenizer())
    assert [(c.name, c.arguments) for c in parser.calls_with_schemas([ADD], text)] == calls
    assert all(call.error is None for call in parser.calls_with_schemas([ADD], text))


def test_what_is_broken_comes_back_with_an_error() -> None:
    for name, text in (
        ("qwen3_coder", "<tool_call><function=add</function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a</parameter></function></tool_call>"),
        ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1</tool_call>"),
        ("kimi", KIMI.replace("1}", "1")),
        ("gpt-oss", GPT_OSS.replace("1}", "1")),
        ("llama3_json", "<|python_tag|>add(1)"),
        ("llama3_json", '{"name": "add", '),
        ("mistral", "[TOOL_CALLS] add"),
        ("deepseek", DEEPSEEK_31.replace("<｜tool▁sep｜>", "")),
        ("plain", "<tool>add</tool><args>{</args>"),
        ("plain", "<tool>add</tool> 1</args>"),
        ("plain", "<tool>add</tool><args>{}"),
        ("pythonic", "[add(1)]"),
        ("pythonic", "[add(a=__import__('os'))]"),
        ("pythonic", "[add(a=1, a=2)]"),
        ("pythonic", "[add(a=1e999)]"),
        ("react", "Action:\nAction Input: {}"),
        ("react", "Action: add\nAction Input: {1}"),
    ):
        (call,) = PARSERS.get(name)().calls_with_schemas([ADD], text)
        assert call.error, name


@pytest.mark.parametrize("arguments", ["{", "x" * (MAX_CALL_CHARS + 1)], ids=["bad", "long"])
def test_a_broken_call_keeps_its_id(arguments: str) -> None:
    call = as_tool_call("add", arguments, "functions.add:0")
    assert call.error
    assert call.tool_call_id == "functions.add:0"


def test_a_parameter_is_never_run() -> None:
    payload = '__import__("os").system("true")'
    call = Qwen3XMLToolParser()._parse_xml_function_call(
        f"add><parameter=c>{payload}</parameter><parameter=cut", [ADD]
    )
    assert call is not None
    assert json.loads(call.arguments) == {"c": payload}
    assert Qwen3XMLToolParser()._parse_xml_function_call("add", None) is None


@pytest.mark.parametrize("name", PARSERS.names())
@given(text=st.text(alphabet='<>|/{}":=_ abcdefilmnorstu', max_size=60))
def test_no_text_breaks_a_parser(name: str, text: str) -> None:
    marks = ("<tool_call>", "<function=", "<|tool_calls_section_begin|><|tool_call_begin|>")
    for mark in (*marks, " to=functions."):
        PARSERS.get(name)().calls_with_schemas(
            [ADD], f"{mark}{text}</function></tool_call><|call|>"
        )


def test_a_parser_gives_text_and_calls_of_token_ids_as_in_verl() -> None:
    tokenizer = character_tokenizer()
    good = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    ids = tokenizer.encode(f"I add {good} now <tool_call>no</tool_call>")
    text, calls = asyncio.run(HermesToolParser(tokenizer).extract_tool_calls(ids))
    assert text.split() == ["I", "add", "now"]
    assert calls == [FunctionCall(name="add", arguments='{"a": 1}')]
    ids = tokenizer.encode("no call")
    assert asyncio.run(HermesToolParser(tokenizer).extract_tool_calls(ids)) == ("no call", [])


def test_a_parser_in_verls_form_is_registered_and_read_by_the_loop() -> None:
    @ToolParser.register("verl_style")
    class Mine(ToolParser):
        async def extract_tool_calls(self, responses_ids, tools=None):  # type: ignore[no-untyped-def]
            text = self.tokenizer.decode(responses_ids)
            bad = FunctionCall(name="bad", arguments="{")
            return "", [FunctionCall(name=text, arguments='{"x": 1}'), bad]

    try:
        tokenizer = character_tokenizer()
        parser = ToolParser.get_tool_parser("verl_style", tokenizer)
        good, bad = asyncio.run(parser.parse("add", tokenizer.encode("add"), [ADD]))
    finally:
        del PARSERS.entries["verl_style"]
    assert good == ToolCall("add", {"x": 1})
    assert bad.error == "`arguments` is not a JSON object"
    with pytest.raises(ValueError, match="unknown tool-call parser 'verl_style'"):
        ToolParser.get_tool_parser("verl_style", tokenizer)


def test_react_reads_the_action_of_a_line_and_none_inside_its_input() -> None:
    parser = ToolParser.get_tool_parser("react", None)
    text = 'Action: search\nAction Input: {"query": "Affirmative Action: history"}'
    (call,) = parser.calls(text)
    assert (call.name, call.arguments) == ("search", {"query": "Affirmative Action: history"})


@pytest.mark.parametrize(
    ("call_id", "name"),
    [("functions.add_user:0", "add_user"), ("functions.sum:1", "sum"), ("call-add-0", "add")],
)
def test_kimi_runs_no_tool_but_the_one_that_the_call_names(call_id: str, name: str) -> None:
    function = OpenAIFunctionToolSchema.model_validate({"function": {"name": "function"}})
    parser = ToolParser.get_tool_parser("kimi", None)
    text = KIMI.replace("functions.add:0", call_id)
    assert [c.name for c in parser.calls_with_schemas([ADD, function], text)] == [name]


def test_glm_takes_strings_as_they_are_and_refuses_a_key_without_a_value() -> None:
    parser = ToolParser.get_tool_parser("glm", None)
    digits = GLM.replace("two", "02134")
    (call,) = parser.calls_with_schemas([ADD], digits)
    assert call.arguments == {"a": 1, "b": "02134"}
    (call,) = parser.calls_with_schemas([ADD], GLM.replace("<arg_value>1</arg_value>", ""))
    assert call.error
    assert not call.arguments


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        (
            "mistral",
            '[TOOL_CALLS][{"name": "add", "arguments": {"b": "[ARGS]{}"}}]',
            {"b": "[ARGS]{}"},
        ),
        (
            "llama3_json",
            '{"name": "add", "parameters": {"b": "<|python_tag|>"}}',
            {"b": "<|python_tag|>"},
        ),
        (
            "llama3_json",
            '<|python_tag|>{"name": "add", "parameters": {"b": "<|python_tag|>"}}',
            {"b": "<|python_tag|>"},
        ),
    ],
)
def test_a_mark_of_the_format_inside_an_argument_is_text(
    name: str, text: str, arguments: dict[str, str]
) -> None:
    (call,) = ToolParser.get_tool_parser(name, character_tokenizer()).calls(text)
    assert (call.name, call.arguments) == ("add", arguments)


@pytest.mark.parametrize("json_type", ["string", ["string", "null"]])
def test_digits_stay_text_where_the_schema_has_a_string(json_type: object) -> None:
    schema = OpenAIFunctionToolSchema.model_validate(
        {"function": {"name": "find", "parameters": {"properties": {"year": {"type": json_type}}}}}
    )
    text = "<tool_call><function=find><parameter=year>1999</parameter></function></tool_call>"
    (call,) = ToolParser.get_tool_parser("qwen3_coder", None).calls_with_schemas([schema], text)
    assert call.arguments == {"year": "1999"}
    react = ToolParser.get_tool_parser("react", None)
    (call,) = react.calls_with_schemas([schema], "Action: find\nAction Input: 1999")
    assert call.arguments == {"year": "1999"}
