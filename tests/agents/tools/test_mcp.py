"""Tools of a real MCP server, over stdio and streamable HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hone.agents.agent_data import AgentData
from hone.agents.parsers.contract import ToolCall
from hone.agents.tools.contract import ToolError, function_schema
from hone.agents.tools.loading import initialize_tools_from_config
from hone.agents.tools.mcp import MCPBaseTool, McpServer
from hone.agents.tools.session import ToolSession

pytest.importorskip("mcp", reason="pip install 'hone-rl[mcp]'")

SERVER = """
import os, sys
from mcp.server import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@server.tool()
def fail(why: str) -> str:
    "Fail."
    raise ValueError(why)

@server.tool()
def leave() -> str:
    "End the server."
    os._exit(1)

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(SERVER)
    return file


@pytest.fixture(scope="module")
def url(server: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(server), str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def listed(folder: Path, settings: dict[str, Any], *names: str) -> dict[str, Any]:
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"sums": settings}}))
    chosen = f", tool_selected_list: [{', '.join(names)}]" if names else ""
    (folder / "tools.yaml").write_text(
        "tools:\n  - class_name: verl.tools.mcp_base_tool.MCPBaseTool\n    config: {type: mcp}\n"
        f"    mcp: {{mcp_servers_config_path: {folder / 'servers.json'}{chosen}}}\n"
    )
    return {tool.name: tool for tool in initialize_tools_from_config(str(folder / "tools.yaml"))}


def answers(tools: dict[str, Any], *calls: ToolCall) -> tuple[list[str], int]:
    """Returns the answers of calls, each made in a new event loop, and the failures."""
    session = ToolSession(tools, AgentData([], [1], "r", {}), 9, None, 60.0, str)
    texts = [text for call in calls for text in asyncio.run(session.run_calls([call]))]
    return texts, session.failures


ADD = ToolCall("add", {"a": 2, "b": 3})


def test_a_part_without_text_becomes_its_type() -> None:
    parts = [
        SimpleNamespace(text="5"),
        SimpleNamespace(type="image"),
        SimpleNamespace(type="x", text=None),
    ]
    tool = MCPBaseTool({}, function_schema("add", "Adds."))
    assert tool._parse_tool_result(parts) == ("5\n(image)\n(x)", {})


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_tools_of_a_server_are_listed_and_called(
    transport: str, server: Path, url: str, tmp_path: Path
) -> None:
    command = {"command": sys.executable, "args": [str(server)], "env": dict(os.environ)}
    tools = listed(tmp_path, command if transport == "stdio" else {"url": url}, "add", "fail")
    assert sorted(tools) == ["add", "fail"]
    schema = tools["add"].tool_schema.model_dump()["function"]
    assert schema["description"] == "Add two numbers."
    assert schema["parameters"]["required"] == ["a", "b"]
    texts, failures = answers(tools, ADD, ToolCall("fail", {"why": "no reason"}), ADD)
    assert (texts[0], texts[2], failures) == ("5", "5", 1)
    assert texts[1].startswith("Error: fail failed")


@pytest.mark.slow
def test_a_server_that_ended_is_started_again_at_the_next_call(
    server: Path, tmp_path: Path
) -> None:
    command = {"command": sys.executable, "args": [str(server)], "env": dict(os.environ)}
    texts, failures = answers(listed(tmp_path, command), ADD, ToolCall("leave", {}), ADD)
    assert (texts[0], texts[2], failures) == ("5", "5", 1)


@pytest.mark.parametrize(
    ("settings", "names", "why"),
    [
        ({"url": "http://127.0.0.1:9/mcp"}, (), "'sums' did not list its tools"),
        ({"command": "no-such-program"}, (), "'sums' did not list its tools"),
        ({"port": 1}, (), "needs a `url` or a `command`"),
    ],
)
def test_a_server_that_cannot_be_reached_is_told_before_training(
    settings: dict[str, Any], names: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ToolError, match=why):
        listed(tmp_path, settings, *names)


@pytest.mark.slow
def test_a_server_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hone.agents.tools.mcp.CONNECT_TIMEOUT_S", 2.0)
    silent = {"command": sys.executable, "args": ["-c", "import time; time.sleep(600)"]}
    with pytest.raises(ToolError, match="did not list its tools: TimeoutError"):
        listed(tmp_path, silent)
    with pytest.raises(TimeoutError, match="no session after 2 s"):
        asyncio.run(McpServer("sums", silent).call("add", {}))


@pytest.mark.slow
@pytest.mark.parametrize(("connect_limit_s", "call_limit_s"), [(60.0, 2.0), (2.0, 60.0)])
def test_one_call_waits_for_a_server_that_hangs_when_it_is_connected_again(
    server: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    connect_limit_s: float,
    call_limit_s: float,
) -> None:
    starts = tmp_path / "starts"
    hanging = tmp_path / "hanging.py"
    hanging.write_text(
        f"import os, runpy, time\nwith open({str(starts)!r}, 'a') as file: file.write('x')\n"
        f"if os.path.getsize({str(starts)!r}) > 1: time.sleep(600)\n"
        f"runpy.run_path({str(server)!r})\n"
    )
    command = {"command": sys.executable, "args": [str(hanging)], "env": dict(os.environ)}
    tools = listed(tmp_path, command)
    assert answers(tools, ADD)[0] == ["5"]
    monkeypatch.setattr("hone.agents.tools.mcp.CONNECT_TIMEOUT_S", connect_limit_s)
    answers(tools, ToolCall("leave", {}))
    session = ToolSession(tools, AgentData([], [1], "r", {}), 9, None, call_limit_s, str)
    [first] = asyncio.run(session.run_calls([ADD]))
    assert "took longer than 2 s" in first or "no session after 2 s" in first
    monkeypatch.setattr("hone.agents.tools.mcp.CONNECT_TIMEOUT_S", 600.0)
    later = ToolSession(tools, AgentData([], [1], "r", {}), 9, None, 10.0, str)
    texts = [asyncio.run(later.run_calls([ADD]))[0] for _ in range(3)]
    assert all("no session" in text for text in texts), texts


@pytest.mark.slow
def test_a_selected_tool_that_no_server_has_is_refused(server: Path, tmp_path: Path) -> None:
    command = {"command": sys.executable, "args": [str(server)], "env": dict(os.environ)}
    with pytest.raises(ToolError, match="no MCP server has the tool 'subtract'"):
        listed(tmp_path, command, "subtract")
