"""Scores of a served classifier: `/classify`, `/pooling` and `/score` as vLLM has them, or plain texts.

| kind | request | answer |
|---|---|---|
| classify | `{model, input: [text]}` | `{data: [{index, probs: [score]}]}` |
| pooling | `{model, input: [text]}` | `{data: [{index, data: [score]}]}`, or one such list per token |
| score | `{model, text_1: [prompt], text_2: [response]}` | `{data: [{index, score}]}` |
| texts | `{texts: [text]}` | `{scores: [score]}` |
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from hone.config.reward import RewardServerConfig
from hone.data.prompts import as_messages
from hone.rewards.conversation import conversation_text, defused, has_template, prompt_text
from hone.rewards.failures import Failed, Scored
from hone.rewards.outcome import Response, read_result
from hone.rewards.remote import RemoteError, ScoringServer, cache_key
from hone.tokenizer import Tokenizer
from hone.types import JsonObject, JsonValue, Row

PATHS = {"classify": "/classify", "pooling": "/pooling", "score": "/score", "texts": ""}
_RAW = {"use_activation": False, "activation": False}
"""Asks for the head's output itself."""


class ServedClassifier:
    """Scores whole conversations, rendered with the reward model's own chat template.

    Without a tokenizer the text of prompt and response is sent. `is_chat` renders a plain prompt as a turn.
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

    def refusal(self) -> str | None:
        return self.server.refusal()

    def _text(self, prompt: Any, answer: str) -> tuple[str, ...]:
        answer = defused(answer, self._tokenizer)
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
        known: dict[tuple[str, ...], float | Failed] = {}
        for text, key in keys.items():
            if isinstance(answer := cache.get(key), int | float):
                known[text] = answer
        self.server.counts["cache_hits"] += len(known)
        unknown = [text for text in keys if text not in known]
        batches = [unknown[i : i + self._size] for i in range(0, len(unknown), self._size)]
        for batch, scores in zip(
            batches, await asyncio.gather(*map(self._ask, batches)), strict=True
        ):
            for text, score in zip(batch, scores, strict=True):
                known[text] = score
                if not isinstance(score, Failed) and math.isfinite(score):
                    cache.put(keys[text], score)
        return [known[text] for text in texts]

    async def _ask(self, texts: Sequence[tuple[str, ...]]) -> Sequence[float | Failed]:
        first: list[JsonValue] = [text[0] for text in texts]
        body: JsonObject = {"model": self.model}
        if self.kind == "score":
            body |= {"text_1": first, "text_2": [text[1] for text in texts]}
        else:
            special = {"add_special_tokens": not self._is_rendered}
            body = (
                {"texts": first}
                if self.kind == "texts"
                else body | {"input": first, **_RAW, **special}
            )
        try:
            return await self.server.ask(body, lambda answer: self._read(answer, len(texts)))
        except RemoteError as error:
            return [error.failed] * len(texts)

    def _read(self, answer: Row, count: int) -> list[float]:
        """Returns the scores of an answer; whatever else it holds raises an error."""
        if self.kind == "texts":
            values = list(answer["scores"])
        else:
            rows = sorted(answer["data"], key=lambda row: row.get("index", 0))
            name = {"classify": "probs", "pooling": "data", "score": "score"}[self.kind]
            values = [_one(row[name]) for row in rows]
        if len(values) != count:
            raise ValueError(f"{count} texts got {len(values)} scores")
        return [_number(value) for value in values]


def _one(value: JsonValue) -> JsonValue:
    """Returns the only value of a row; of one row per token, that of the last token."""
    while isinstance(value, list):
        if len(value) > 1 and not isinstance(value[-1], list):
            raise ValueError(f"a reward model has one label, this one has {len(value)}")
        value = value[-1]
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"a score is {value!r:.40}, not a number")
    return float(value)
