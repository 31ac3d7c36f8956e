"""The model's programs run only in the sandbox."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hone.agents.tools.code_interpreter import CodeInterpreterTool, SandboxFusionTool
from hone.agents.tools.contract import ToolError
from hone.sandbox import SandboxUnavailable
from hone.sandbox.result import SandboxResult, Status


def run(code: str) -> str:
    tool = CodeInterpreterTool({"timeout_s": 60})
    return asyncio.run(tool.execute("i", {"code": code}))[0].text or ""


def test_it_prints_raises_and_reaches_nothing() -> None:
    try:
        assert run("print(6 * 7)").strip() == "42"
    except SandboxUnavailable as missing:
        pytest.skip(str(missing))
    assert "ZeroDivisionError" in run("1 / 0")
    assert run("x = 1") == "(ok, nothing printed)"
    assert "Error" in run("import socket; socket.create_connection(('127.0.0.1', 80), 1)")


def test_the_tool_of_verls_name_asks_the_service_with_its_limits() -> None:
    request: dict[str, object] = {}

    class Service(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            result = {"status": "Finished", "stdout": "42", "stderr": "", "return_code": 0}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"status": "Success", "run_result": result}).encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/run_code"
        config = {"sandbox_fusion_url": url, "default_timeout": 5, "num_workers": 9}
        answer = asyncio.run(SandboxFusionTool(config).execute("i", {"code": "print(42)"}))
        server.shutdown()
    assert answer[0].text == "42"
    assert {
        "code": "print(42)",
        "run_timeout": 5,
        "memory_limit_MB": 1024,
    }.items() <= request.items()


@pytest.mark.parametrize(
    "config", [{}, {"sandbox_fusion_url": "http://a/run_code", "default_language": "cpp"}]
)
def test_the_tool_of_verls_name_needs_a_service_and_python(config: dict[str, str]) -> None:
    with pytest.raises(ToolError, match="runs python in the service"):
        SandboxFusionTool(config)


def test_names_stay_between_the_calls_of_a_trajectory() -> None:
    tool = CodeInterpreterTool({"timeout_s": 60})

    def run_code(code: str, instance: str = "i") -> str:
        return (asyncio.run(tool.execute(instance, {"code": code}))[0].text or "").strip()

    try:
        assert (
            run_code(
                "import random\nx = 6\nprint('once')\ndef f(y): return x * y\nr = random.random()"
            )
            == "once"
        )
    except SandboxUnavailable as missing:
        pytest.skip(str(missing))
    assert run_code("y = f(7)\nraise ValueError('kept')").endswith("ValueError: kept")
    assert run_code("y") == "42"
    assert run_code("r == r and x") == "6"
    assert "NameError" in run_code("x", "another")
    asyncio.run(tool.release("i"))
    assert "NameError" in run_code("x")
    alone = CodeInterpreterTool({"timeout_s": 60, "stateful": False})
    asyncio.run(alone.execute("i", {"code": "x = 1"}))
    assert "NameError" in (asyncio.run(alone.execute("i", {"code": "print(x)"}))[0].text or "")


def test_the_model_reads_that_variables_stay_only_if_they_do() -> None:
    def description(tool: CodeInterpreterTool) -> str:
        return str(tool.tool_schema.function.description)

    assert "Variables stay" in description(CodeInterpreterTool({}))
    assert "Variables stay" not in description(CodeInterpreterTool({"stateful": False}))
    service = {"sandbox_fusion_url": "http://localhost:1/run_code"}
    assert "Variables stay" not in description(SandboxFusionTool(service))


def test_cells_of_one_turn_are_kept_in_call_order_whichever_ends_first() -> None:
    first_may_end = threading.Event()
    programs: list[str] = []

    class Recorder(CodeInterpreterTool):
        def run(self, code: str) -> SandboxResult:
            programs.append(code)
            if "run('slow = 1')" in code:
                first_may_end.wait(60)
            else:
                first_may_end.set()
            return SandboxResult(Status.OK, 0, "", "", 0.0)

    async def turns() -> None:
        tool = Recorder({})
        await asyncio.gather(
            tool.execute("i", {"code": "slow = 1"}), tool.execute("i", {"code": "fast = 2"})
        )
        await tool.execute("i", {"code": "3"})

    asyncio.run(turns())
    assert "['slow = 1', 'fast = 2']" in programs[-1]


def test_a_cell_that_did_not_end_is_not_run_again() -> None:
    programs: list[str] = []

    class Timeout(CodeInterpreterTool):
        def run(self, code: str) -> SandboxResult:
            programs.append(code)
            status = Status.TIMEOUT if len(programs) == 1 else Status.OK
            return SandboxResult(status, None, "", "", 0.0)

    tool = Timeout({})
    for code in ("while True: pass", "1"):
        asyncio.run(tool.execute("i", {"code": code}))
    assert "while True" not in programs[-1]
