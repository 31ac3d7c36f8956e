"""The manager of reward models behind a server (judges and classifiers), and the client of classifiers.

Classifiers are served by vLLM's `/classify`, `/pooling` and `/score`, or by an endpoint that reads `texts`:

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
from typing import Any, Protocol

from hone.config.reward import RewardServerConfig
from hone.data.messages import as_messages
from hone.event_loop import run_coroutine
from hone.protocol import DataProto
from hone.rewards.conversation import (
    conversation_text,
    escape_special_tokens,
    has_template,
    prompt_text,
)
from hone.rewards.failures import Failed, Scored
from hone.rewards.managers.rule import RuleRewardManager
from hone.rewards.remote import ScoringServer, cache_key
from hone.rewards.scorer import ScorerInput, read_result
from hone.tokenizer import Tokenizer
from hone.types import Fields, JsonObject, JsonValue

PATH_BY_KIND = {"classify": "/classify", "pooling": "/pooling", "score": "/score", "texts": ""}
_RAW_OUTPUT = {"use_activation": False, "activation": False}
"""Request fields that turn off the activation function of the classification head."""


class ModelScorer(Protocol):
    """A reward model that scores rows; `extra_info["prompt"]` of a row is its prompt."""

    async def score_rows(self, rows: Sequence[ScorerInput]) -> list[Scored | Failed]: ...

    def pop_metrics(self) -> dict[str, float]: ...

    def connection_error(self) -> str | None:
        """Returns the reason why the server of the model cannot be reached, or None."""


class ModelRewardManager(RuleRewardManager):
    """Scores all rows of a batch concurrently with a `ModelScorer`."""

    def __init__(self, tokenizer: Tokenizer, *, scorer: ModelScorer, **kwargs: Any) -> None:
        super().__init__(tokenizer, 0, scorer.score_rows, **kwargs)
        self.scorer = scorer

    def read_rows(
        self, data: DataProto, ids: list[list[int]], is_policy: list[list[bool]]
    ) -> list[ScorerInput]:
        """Returns rows whose `extra_info` has the prompt."""
        rows = super().read_rows(data, ids, is_policy)
        for row, prompt in zip(rows, data.non_tensor_batch["raw_prompt"], strict=True):
            row.extra_info["prompt"] = prompt
        return rows

    def score_rows(self, rows: Sequence[ScorerInput]) -> list[Scored | Failed]:
        return run_coroutine(self.scorer.score_rows(rows))

    def pop_metrics(self) -> dict[str, float]:
        """Returns failures by reason (`reward/model_failures/…`) and the scorer's metrics."""
        items = super().pop_metrics().items()
        failures = {name.replace("reward/", "reward/model_", 1): value for name, value in items}
        return failures | self.scorer.pop_metrics()


class ServedClassifier:
    """Scores whole conversations, rendered with the reward model's own chat template.

    Without a tokenizer, plain text is sent. With `is_chat`, a text prompt becomes a user message.
    """

    def __init__(
        self, config: RewardServerConfig, tokenizer: Tokenizer | None, *, is_chat: bool
    ) -> None:
        self.kind, self.model = config.kind, config.model
        self.server = ScoringServer(config, PATH_BY_KIND[config.kind])
        self.pop_metrics = self.server.pop_metrics
        self.connection_error = self.server.connection_error
        self._batch_size, self._tokenizer, self._is_chat = config.batch_size, tokenizer, is_chat
        # A chat template writes the special tokens itself, so the server must not add them.
        self._has_special_tokens = is_chat and has_template(tokenizer)

    async def score_rows(self, rows: Sequence[ScorerInput]) -> list[Scored | Failed]:
        """Returns one outcome per row, in order."""
        texts = [self._request_texts(row.extra_info["prompt"], row.solution_str) for row in rows]
        scores = await self.scores(texts)
        return [score if isinstance(score, Failed) else read_result(score) for score in scores]

    def _request_texts(self, prompt: Any, response: str) -> tuple[str, ...]:
        """Returns (prompt, response) for `kind` score, else (conversation,)."""
        response = escape_special_tokens(response, self._tokenizer)
        if self.kind == "score":
            return prompt_text(prompt), response
        if self._tokenizer is None:
            text = f"{prompt_text(prompt)}\n\n" if self._is_chat else str(prompt)
            return (text + response,)
        conversation = as_messages(prompt) if self._is_chat else prompt
        return (conversation_text(conversation, response, self._tokenizer),)

    async def scores(self, texts: Sequence[tuple[str, ...]]) -> list[float | Failed]:
        """Returns the score or the failure for each result of `_request_texts`."""
        cache = self.server.cache
        name = self.model or self.server.address
        keys = {text: cache_key(self.kind, name, list(text)) for text in texts}
        scores: dict[tuple[str, ...], float | Failed] = {}
        for text, key in keys.items():
            cached_score = cache.get(key)
            if isinstance(cached_score, int | float):
                scores[text] = cached_score
        self.server.counts["cache_hits"] += len(scores)
        uncached = [text for text in keys if text not in scores]
        starts = range(0, len(uncached), self._batch_size)
        batches = [uncached[start : start + self._batch_size] for start in starts]
        answers = await asyncio.gather(*map(self._request_scores, batches))
        for text, score in zip(uncached, chain.from_iterable(answers), strict=True):
            scores[text] = score
            if not isinstance(score, Failed) and math.isfinite(score):
                cache.put(keys[text], score)
        return [scores[text] for text in texts]

    async def _request_scores(self, texts: Sequence[tuple[str, ...]]) -> Sequence[float | Failed]:
        first_texts: list[JsonValue] = [text[0] for text in texts]
        body: JsonObject = {"model": self.model}
        if self.kind == "texts":
            body = {"texts": first_texts}
        elif self.kind == "score":
            body |= {"text_1": first_texts, "text_2": [text[1] for text in texts]}
        else:
            options = {**_RAW_OUTPUT, "add_special_tokens": not self._has_special_tokens}
            body |= {"input": first_texts, **options}
        scores = await self.server.post(body, lambda answer: self._parse(answer, len(texts)))
        return [scores] * len(texts) if isinstance(scores, Failed) else scores

    def _parse(self, answer: Fields, count: int) -> list[float]:
        """Returns the `count` scores of an answer; raises an error for any other content."""
        if self.kind == "texts":
            values = list(answer["scores"])
        else:
            rows = sorted(answer["data"], key=lambda row: row.get("index", 0))
            field = {"classify": "probs", "pooling": "data", "score": "score"}[self.kind]
            values = [_last_value(row[field]) for row in rows]
        if len(values) != count:
            raise ValueError(f"{count} scores expected, got {len(values)}")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"a score is {value!r:.40}, not a number")
        return [float(value) for value in values]


def _last_value(value: JsonValue) -> JsonValue:
    """Returns the only value of a row, or the last value of a row with a value per token."""
    while isinstance(value, list):
        if len(value) > 1 and not isinstance(value[-1], list):
            raise ValueError(f"a reward model has one label, this one has {len(value)}")
        value = value[-1]
    return value
