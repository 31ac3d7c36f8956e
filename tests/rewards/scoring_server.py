"""A fake scoring server on a real socket, whose answers, delays and restarts a test controls."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web


class ScoringServer:
    """Answers POST requests of any path with `answer(path, body)`, which is JSON or a response."""

    def __init__(self, answer: Callable[[str, Any], Any]) -> None:
        self.answer = answer
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.max_concurrent = self._concurrent = 0
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listens on a free port, or on the same port as before."""
        self._loop = asyncio.new_event_loop()
        listening = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(listening,), daemon=True)
        self._thread.start()
        assert listening.wait(60)

    def stop(self) -> None:
        """Stops the server: connections break, and new ones are refused."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(60)

    def _serve(self, listening: threading.Event) -> None:
        self._loop.run_until_complete(self._until_stopped(listening))
        self._loop.close()

    async def _until_stopped(self, listening: threading.Event) -> None:
        self._stopping = asyncio.Event()
        app = web.Application()
        app.router.add_post("/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = runner.addresses[0][1]
        listening.set()
        await self._stopping.wait()
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self._concurrent += 1
        self.max_concurrent = max(self.max_concurrent, self._concurrent)
        try:
            body = await request.json()
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            answer = self.answer(request.path, body)
            if asyncio.iscoroutine(answer):
                answer = await answer
            return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)
        finally:
            self._concurrent -= 1


def by_length(path: str, body: Any) -> Any:
    """Scores a text by its length, in the format of each endpoint."""
    if path == "/texts" or "texts" in body:
        return {"scores": [float(len(text)) for text in body["texts"]]}
    if path.endswith("/score"):
        pairs = zip(body["text_1"], body["text_2"], strict=True)
        return {"data": [{"index": i, "score": len(b)} for i, (_, b) in enumerate(pairs)]}
    name = "probs" if path.endswith("/classify") else "data"
    rows = []
    for index, text in enumerate(body["input"]):
        value: Any = [float(len(text))]
        if name == "data":
            value = [[0.5], value]  # one list per token
        rows.append({"index": index, name: value, "num_classes": 1})
    return {"data": rows[::-1], "object": "list"}  # the index gives the order


def digits_judge(path: str, body: Any) -> Any:
    """An OpenAI-compatible judge that grades the share of digits in a response."""
    assert path == "/v1/chat/completions"
    (turn,) = body["messages"]
    match = re.search(r"<response-[0-9a-f]{16}>\n(.*)\n</response-", turn["content"], re.DOTALL)
    assert match is not None
    grade = 10 * sum(map(str.isdigit, match[1])) / max(len(match[1]), 1)
    return {"choices": [{"message": {"role": "assistant", "content": f"Score: {grade:.6f}"}}]}
