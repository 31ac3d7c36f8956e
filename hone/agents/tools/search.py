"""The tool `search`: sends the model's queries to a retrieval service.

The config has verl's names: `retrieval_service_url`, `topk`, `timeout` (seconds) and `rate_limit`
(concurrent requests).
"""

from __future__ import annotations

import json
import threading

from hone.agents.tools.contract import (
    BaseTool,
    OpenAIFunctionToolSchema,
    ToolError,
    ToolResponse,
    function_schema,
)
from hone.event_loop import run_in_thread
from hone.services.json_client import post_json
from hone.types import Fields, JsonObject, JsonValue, Settings


class SearchTool(BaseTool):
    """Answers `{"result": text}`: numbered passages for each query, with `---` between queries."""

    def __init__(
        self, config: Settings, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self._url = str(config.get("retrieval_service_url") or "")
        if not self._url.startswith(("http://", "https://")):
            raise ToolError(
                f"SearchTool: retrieval_service_url={self._url!r} is not an http(s) URL"
            )
        self._request_slots = threading.BoundedSemaphore(int(config.get("rate_limit", 120)))

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        queries: JsonObject = {"type": "array", "items": {"type": "string"}}
        return function_schema(
            "search",
            "Search for passages that answer questions.",
            query_list=queries | {"description": "Questions to search for"},
        )

    async def execute(
        self, instance_id: str, parameters: JsonObject, **kwargs: JsonValue
    ) -> tuple[ToolResponse, float, Fields]:
        query_list = parameters.get("query_list")
        items = query_list if isinstance(query_list, list) else [query_list]
        queries = [text for text in items if isinstance(text, str)]
        if not queries or queries != query_list:
            raise ToolError("query_list must be a list of questions")
        results = await run_in_thread(self._retrieve, queries=queries)
        text = "\n---\n".join(_format_passages(passages) for passages in results)
        metrics: Fields = {"query_count": len(queries), "total_results": sum(map(len, results))}
        answer_text = json.dumps({"result": text or "No search results found."}, ensure_ascii=False)
        return ToolResponse(text=answer_text), 0.0, metrics

    def _retrieve(self, queries: list[str]) -> list[list[str]]:
        body = {"queries": queries, "topk": self.config.get("topk", 3), "return_scores": True}
        timeout_s = self.config.get("timeout", 30)
        with self._request_slots:
            content = post_json(self._url, json.dumps(body).encode(), timeout_s=timeout_s)
        results = json.loads(content)["result"]
        return [[str(hit["document"]["contents"]) for hit in hits] for hits in results]


def _format_passages(passages: list[str]) -> str:
    blocks = []
    for number, passage in enumerate(passages, start=1):
        title, _, text = passage.partition("\n")
        blocks.append(f"Doc {number} (Title: {title})\n{text}")
    return "\n\n".join(blocks)
