"""Scores of a served classifier: vLLM's `/classify`, `/pooling` and `/score`, or plain texts.

| kind | request | answer |
|---|---|---|
| classify | `{model, input: [text]}` | `{data: [{index, probs: [score]}]}` |
| pooling | `{model, input: [text]}` | `{data: [{index, data: [score]}]}`, or a list per token |
| score | `{model, text_1: [prompt], text_2: [response]}` | `{data: [{index, score}]}` |
| texts | `{texts: [text]}` | `{scores: [score]}` |
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

from hone.config.reward import RewardServerConfig
from hone.data.prompts import as_messages
from hone.rewards.conversation import (
    conversation_text,
    escape_special_tokens,
    has_template,
    prompt_text,
)
from hone.rewards.failures import Failed, Scored
from hone.rewards.outcome import Response, read_result
from hone.rewards.remote import RemoteError, ScoringServer, cache_key
from hone.tokenizer import Tokenizer
from hone.types import Fields, JsonObject, JsonValue

PATHS = {"classify": "/classify", "pooling": "/pooling", "score": "/score", "texts": ""}
_RAW_OUTPUT = {"use_activation": False, "activation": False}
"""Requests the output of the head without an activation function."""


class ServedClassifier:
    """Scores whole conversations, rendered with the reward model's own chat template.

    Without a tokenizer, plain text is sent. `is_chat` makes a text prompt a message.
    """

    def __init__(
        self, settings: RewardServerConfig, tokenizer: Tokenizer | None, *, is_chat: bool
    ) -> None:
        self.kind, self.model = settings.kind, settings.model
        self.server = ScoringServer(settings, PATHS[settings.kind])
        self._size, self._tokenizer, self._is_chat = settings.batch_size, tokenizer, is_chat
        # A chat template writes the special tokens itself.
        self._is_rendered = is_chat and has_template(tokenizer)

    async def score_rows(self, rows: Sequence[Response]) -> list[Scored | Failed]:
        """Returns one result per row, in order."""
        texts = [self._text(row.extra_info["prompt"], row.solution_str) for row in rows]
        scores = await self.scores(texts)
        return [score if isinstance(score, Failed) else read_result(score) for score in scores]

    def pop_metrics(self) -> dict[str, float]:
        return self.server.pop_metrics()

    def connection_error(self) -> str | None:
        return self.server.connection_error()

    def _text(self, prompt: Any, answer: str) -> tuple[str, ...]:
        answer = escape_special_tokens(answer, self._tokenizer)
        if self.kind == "score":
            return prompt_text(prompt), answer
        if self._tokenizer is None:
            return (f"{prompt_text(prompt)}\n\n{answer}" if self._is_chat else f"{prompt}{answer}",)
        turns = as_messages(prompt) if self._is_chat else prompt
        return (conversation_text(turns, answer, self._tokenizer),)

    async def scores(self, texts: Sequence[tuple[str, ...]]) -> list[float | Failed]:
        """Returns one score per text, or the failure of its request; equal texts are sent once.

        A text is a tuple of one rendered conversation, or of prompt and response (`kind` score).
        """
        cache = self.server.cache
        name = self.model or self.server.address
        keys = {text: cache_key(self.kind, name, list(text)) for text in texts}
        scores: dict[tuple[str, ...], float | Failed] = {}
        for text, key in keys.items():
            if isinstance(cached := cache.get(key), int | float):
                scores[text] = cached
        self.server.counts["cache_hits"] += len(scores)
        uncached = [text for text in keys if text not in scores]
        batches = [uncached[i : i + self._size] for i in range(0, len(uncached), self._size)]
        answers = await asyncio.gather(*map(self._request_scores, batches))
        for text, score in zip(uncached, chain.from_iterable(answers), strict=True):
            scores[text] = score
            if not isinstance(score, Failed) and math.isfinite(score):
                cache.put(keys[text], score)
        return [scores[text] for text in texts]

    async def _request_scores(self, texts: Sequence[tuple[str, ...]]) -> Sequence[float | Failed]:
        first: list[JsonValue] = [text[0] for text in texts]
        body: JsonObject = {"model": self.model}
        if self.kind == "texts":
            body = {"texts": first}
        elif self.kind == "score":
            body |= {"text_1": first, "text_2": [text[1] for text in texts]}
        else:
            special = {"add_special_tokens": not self._is_rendered}
            body |= {"input": first, **_RAW_OUTPUT, **special}
        try:
            return await self.server.post(body, lambda answer: self._parse(answer, len(texts)))
        except RemoteError as error:
            return [error.failure] * len(texts)

    def _parse(self, answer: Fields, count: int) -> list[float]:
        """Returns the scores of an answer; raises an error for any other content."""
        if self.kind == "texts":
            values = list(answer["scores"])
        else:
            rows = sorted(answer["data"], key=lambda row: row.get("index", 0))
            name = {"classify": "probs", "pooling": "data", "score": "score"}[self.kind]
            values = [_last_value(row[name]) for row in rows]
        if len(values) != count:
            raise ValueError(f"{count} texts got {len(values)} scores")
        return [_number(value) for value in values]


def _last_value(value: JsonValue) -> JsonValue:
    """Returns the only value of a row, or that of the last token if there is a row per token."""
    while isinstance(value, list):
        if len(value) > 1 and not isinstance(value[-1], list):
            raise ValueError(f"a reward model has one label, this one has {len(value)}")
        value = value[-1]
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"a score is {value!r:.40}, not a number")
    return float(value)
