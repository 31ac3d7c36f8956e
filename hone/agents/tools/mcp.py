"""Tools of MCP servers, over stdio or streamable HTTP, with the official client (`hone-rl[mcp]`).

Each server has one session in a separate thread; the next call reopens a session that failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hone.agents.tools.contract import (
    BaseTool,
    OpenAIFunctionToolSchema,
    ToolError,
    ToolResponse,
)
from hone.text import BadText, clean_values, error_text, read_json, short_repr
from hone.types import Fields, JsonObject, JsonValue, Settings

T = TypeVar("T")
CONNECT_TIMEOUT_S = 60.0  # time limit for a server to start and list its tools
_REQUEST_ERRORS = (-32600, -32601, -32602, -32603, -32002)
"""JSON-RPC codes of errors that concern one request and do not end the session."""


class MCPBaseTool(BaseTool):
    """One tool of an MCP server; override `_parse_tool_result` to parse its results differently."""

    server: McpServer

    async def execute(
        self, instance_id: str, parameters: JsonObject, **kwargs: JsonValue
    ) -> tuple[ToolResponse, float, Fields]:
        result = await self.server.call(self.name, parameters)
        text, metrics = self._parse_tool_result(result.content)
        if result.is_error:
            raise ToolError(text)
        return ToolResponse(text=text), 0.0, metrics

    def _parse_tool_result(self, content: Sequence[Any]) -> tuple[str, Fields]:
        """Returns the parts of a result as text, with `(type)` for a part without text, and no metrics."""
        texts = (getattr(part, "text", None) for part in content)
        pairs = zip(texts, content, strict=True)
        return "\n".join(f"({part.type})" if text is None else text for text, part in pairs), {}


class McpServer:
    """A session with one server, in the event loop of a separate thread."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._name, self._settings = name, settings
        self._loop = asyncio.new_event_loop()
        self._session_task: asyncio.Task[Any] | None = None
        self._close_event = asyncio.Event()
        self._lock = asyncio.Lock()
        self._hang: TimeoutError | None = None  # a call has waited for the connection, in vain
        threading.Thread(target=self._loop.run_forever, name=f"mcp-{name}", daemon=True).start()

    def tools(self) -> list[Any]:
        """Returns the server's tools; raises ToolError if the server cannot be reached."""
        future = asyncio.run_coroutine_threadsafe(self._list_tools(), self._loop)
        try:
            return future.result(CONNECT_TIMEOUT_S)
        except Exception as error:
            future.cancel()
            raise ToolError(
                f"the MCP server {self._name!r} did not list its tools: {error_text(error)}"
            ) from error

    async def call(self, tool: str, arguments: JsonObject) -> Any:
        """Calls a tool; may be awaited in any event loop."""
        request = self._request(lambda session: session.call_tool(tool, arguments))
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(request, self._loop))

    async def _list_tools(self) -> list[Any]:
        from mcp import ClientSession
        from mcp.types import PaginatedRequestParams

        tools: list[Any] = []
        cursor: str | None = None
        while True:
            params = PaginatedRequestParams(cursor=cursor)
            page = await self._request(functools.partial(ClientSession.list_tools, params=params))
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools

    # -- in the server's event loop ------------------------------------------------------------

    async def _request(self, send: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        """Sends one request; reopens a session that has ended."""
        from mcp import MCPError

        session = await self._open_session()
        task, close_event = self._session_task, self._close_event
        try:
            return await send(session)
        except Exception as error:
            if not isinstance(error, MCPError) or error.code not in _REQUEST_ERRORS:
                close_event.set()
                if self._session_task is task:  # no concurrent call has opened a new session
                    self._session_task = None
            raise

    async def _open_session(self) -> Any:
        async with self._lock:
            if self._session_task is None or self._session_task.done():
                self._session_future: asyncio.Future[Any] = self._loop.create_future()
                # asyncio logs an exception that no call retrieves.
                self._session_future.add_done_callback(lambda future: future.exception())
                self._close_event = asyncio.Event()
                session = self._run_session(self._session_future, self._close_event)
                self._session_task = self._loop.create_task(session)
        future = self._session_future
        if self._hang is not None and not future.done():
            raise self._hang  # the connection is made in the background, and no other call waits
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.done():
                self._hang = TimeoutError("no session yet; an earlier call has waited for it")
            raise

    async def _run_session(
        self, session_future: asyncio.Future[Any], close_event: asyncio.Event
    ) -> None:
        """Keeps a session open until `close_event`; anyio requires the same task to open and close."""
        from mcp import ClientSession

        task = asyncio.current_task()
        assert task is not None

        def time_out() -> None:
            if not session_future.done():
                self._hang = TimeoutError(f"no session after {CONNECT_TIMEOUT_S:g} s")
                session_future.set_exception(self._hang)
            task.cancel()

        timer = asyncio.get_running_loop().call_later(CONNECT_TIMEOUT_S, time_out)
        try:
            async with contextlib.AsyncExitStack() as stack:
                streams = await stack.enter_async_context(_transport(self._settings))
                session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
                await session.initialize()
                timer.cancel()
                self._hang = None
                session_future.set_result(session)
                await close_event.wait()
        except BaseException as error:
            # A future accepts no BaseException, such as CancelledError.
            failure = error if isinstance(error, Exception) else RuntimeError(error)
            if not session_future.done():
                session_future.set_exception(failure)
        finally:
            timer.cancel()


def _transport(settings: Settings) -> contextlib.AbstractAsyncContextManager[Any]:
    if "command" in settings:
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        names = {"command", "args", "env", "cwd"} & settings.keys()
        return stdio_client(StdioServerParameters(**{name: settings[name] for name in names}))
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    headers = dict(settings.get("headers") or {})
    if settings.get("auth_token"):
        headers["Authorization"] = f"Bearer {settings['auth_token']}"
    return streamable_http_client(settings["url"], http_client=create_mcp_http_client(headers))


def mcp_tools(
    cls: type[MCPBaseTool], config: Settings, mcp_config: JsonValue, path: str
) -> list[MCPBaseTool]:
    """Connects to the MCP servers in one entry of the tool list; returns one object of `cls` per tool."""
    try:
        import mcp as _  # noqa: F401
    except ModuleNotFoundError as error:
        raise ToolError(f"{path}: MCP tools need the client: pip install 'hone-rl[mcp]'") from error
    options: Fields = dict(mcp_config) if isinstance(mcp_config, dict) else {}
    servers = options.get("mcpServers")
    file = options.get("mcp_servers_config_path")
    if file is not None:
        try:
            data = read_json(Path(str(file)).expanduser().read_text())
        except (OSError, BadText) as error:
            raise ToolError(f"{path}: {file} cannot be read: {error}") from error
        servers = data.get("mcpServers") if isinstance(data, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ToolError(
            f"{path}: give the servers of `mcp` in mcpServers or mcp_servers_config_path; "
            f"got {short_repr(mcp_config)}"
        )
    selected_names = options.get("tool_selected_list")
    tools = []
    for name, settings in servers.items():
        if not isinstance(settings, dict) or not {"url", "command"} & settings.keys():
            raise ToolError(f"{path}: the MCP server {name!r} needs a `url` or a `command`")
        server = McpServer(str(name), settings)
        for spec in server.tools():
            if selected_names is None or spec.name in selected_names:
                function = {
                    "name": spec.name,
                    "description": spec.description or "",
                    "parameters": spec.input_schema or {},
                }
                schema = OpenAIFunctionToolSchema.model_validate(
                    {"function": clean_values(function)}
                )
                tool = cls(config=config, tool_schema=schema)
                tool.server = server
                tools.append(tool)
    missing = sorted({*(selected_names or ())} - {tool.name for tool in tools})
    if missing:
        raise ToolError(f"{path}: no MCP server has the tool {missing[0]!r} of tool_selected_list")
    return tools
