"""How a contract server breaks its interface when it is told to."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

Body = dict[str, Any]


class Faults:
    """The faults of a server, and those of its streams."""

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}
        """How often each fault still happens."""

    def fails(self, fault: str) -> bool:
        """Whether the fault happens now; it is counted."""
        if not self.faults.get(fault):
            return False
        self.faults[fault] -= 1
        return True

    async def _breaks(
        self, request: web.Request, answer: web.StreamResponse, event: Body, count: int
    ) -> bool:
        """Falsifies an event, or ends the stream; returns whether it has ended."""
        meta, pairs = event["meta_info"], event["meta_info"]["output_token_logprobs"]
        if self.fails("version is old"):
            meta["weight_version"] = "default"
        if count <= 3 or not pairs:  # the first tokens have no fault
            return False
        if self.fails("connection is reset"):
            assert request.transport is not None
            request.transport.abort()
            return True
        if self.fails("stream ends early"):
            return True
        if self.fails("stream stalls"):
            await asyncio.sleep(3600)
        if self.fails("error in the stream"):
            await answer.write(b'data: {"error": {"message": "out of memory"}}\n\n')
            return True
        if self.fails("json is truncated"):
            await answer.write(json.dumps(event).join(["data: ", "\n\n"])[:40].encode() + b"\n\n")
            return True
        if self.fails("server aborts the request"):
            meta["finish_reason"] = {"type": "abort", "message": "another client"}
        if self.fails("count is wrong"):
            meta["completion_tokens"] += 2
        if self.fails("log-probs are missing"):
            del meta["output_token_logprobs"]
        if self.fails("log-prob is nan"):
            pairs[-1][0] = float("nan")
        if self.fails("log-prob is positive"):
            pairs[-1][0] = 1.5
        if self.fails("a log-prob is null"):
            pairs[-1][0] = None
        if self.fails("another request is answered"):
            meta["id"] = "hone-somebody-else"
        if self.fails("ids differ from log-probs"):
            event["output_ids"][-1] ^= 1
        if self.fails("id is outside the vocabulary"):
            event["output_ids"][-1] = pairs[-1][1] = 10**6
        if self.fails("sent tokens change"):
            event["output_ids"][0] = pairs[0][1] = pairs[0][1] ^ 1
        if self.fails("finish reason is wrong"):
            meta["finish_reason"] = {"type": "stop", "matched": 5}
        if self.fails("finish reason is unknown"):
            meta["finish_reason"] = {"type": "bored"}
        if self.fails("tokens come after the end"):
            extra = [[-0.5, 3, None]] * 4
            meta["output_token_logprobs"] = pairs + extra
            event["output_ids"] = event["output_ids"] + [3] * 4
            meta["completion_tokens"] += 4
        if self.fails("meta is missing"):
            del event["meta_info"]
        return False
