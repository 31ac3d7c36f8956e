"""`hone.LLM`: a model in this process that answers prompts, over the engine that training generates with."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeGuard

from transformers import PreTrainedModel

from hone.agents.loop_thread import run_beside
from hone.api.settings import Asked, Name, Value
from hone.config.generation import GenerationConfig
from hone.data.loader import row_uid
from hone.data.prompts import render_prompt
from hone.event_loop import run_coroutine
from hone.models.from_config import build_tokenizer
from hone.ops.counter_rng import trajectory_seed
from hone.rollout.contract import RolloutEngine, Sampling
from hone.tracking import progress
from hone.trainer.generated import GenerationError
from hone.trainer.generation import build_engine
from hone.trainer.ranks import Ranks
from hone.types import Row

Chat: TypeAlias = Sequence[Row]
Prompt: TypeAlias = str | Sequence[int] | Chat
"""Text (one user turn), token ids, or chat messages."""
_USUAL = ("top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos")
"""Keywords whose default is the `generation` tree's, beside `temperature` and `max_tokens`."""


@dataclass(frozen=True)
class Response:
    """A response to a prompt. Of `n` this is the first, and `outputs` holds all.

    `log_probs` are under softmax(logits / temperature), as the trainer computes them; greedy ones
    under temperature 1. `finish_reason` is `stop` or `length`.
    """

    prompt: Prompt
    text: str
    finish_reason: str
    token_ids: list[int] = field(repr=False)
    log_probs: list[float] = field(repr=False)
    prompt_token_ids: list[int] = field(repr=False)
    outputs: tuple[Response, ...] = field(default=(), repr=False)


class LLM:
    """A model folder, a hub name, a checkpoint or a run folder, loaded to generate.

    `settings` are keys of the `generation` tree, as of `hone generate`. The same call gives the same
    responses; another `seed` gives others.
    """

    def __init__(self, model: Name, config: Name | None = None, **settings: Value) -> None:
        asked = Asked("generation", "hone.LLM", {**settings, "model.path": model}, config)
        self.config: GenerationConfig = asked.composed().config
        self.path = self.config.model.path
        self.tokenizer = build_tokenizer(self.config.model)
        self._longest = self.config.rollout.max_total_tokens
        self._lock = threading.Lock()

        def limit(lm: PreTrainedModel) -> None:
            positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
            self._longest = min(self._longest, positions or self._longest)

        with progress("load the model"):
            self._engine = build_engine(self.config, self.tokenizer, Ranks.here(), limit)
        self._close = weakref.finalize(self, _close, self._engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        n: int = 1,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        prompt_format: str | None = None,
        **sampling: Value,
    ) -> list[Response]:
        """Responses to one prompt or several, in their order, each with `n` outputs.

        A string is one user turn of the chat template, as in training; `prompt_format="raw"` takes it
        as it is. `temperature=0` is greedy. `sampling`: `top_p`, `top_k`, `min_p`, `stop`,
        `stop_token_ids`, `ignore_eos`.
        """
        if not self._close.alive or n < 1:
            what = "this LLM is closed; make a new one" if n > 0 else f"n={n}; use 1 or more"
            raise GenerationError(what)
        rollout = self.config.rollout
        usual = rollout.temperature if rollout.do_sample else 0.0
        params = {name: getattr(rollout, name) for name in _USUAL} | sampling
        params["temperature"] = usual if temperature is None else temperature
        run_seed = self.config.trainer.seed if seed is None else seed
        listed = _listed(prompts)
        requests: list[tuple[Prompt, list[int], Sampling]] = []
        for number, prompt in enumerate(listed):
            ids = self._ids(prompt, prompt_format or self.config.data.prompt_format)
            room, uid = self._room(ids, max_tokens), row_uid("prompt", number, 0, 0)
            for own in (trajectory_seed(run_seed, uid, sample) for sample in range(n)):
                drawn = Sampling.from_mapping(params, max_tokens=room, seed=own)
                requests.append((prompt, ids, drawn))
        with self._lock, progress("generate", len(requests)) as bar:
            done = run_beside(self._engine, self._all(requests, bar.advance))
        groups = [tuple(done[i * n : (i + 1) * n]) for i in range(len(listed))]
        return [replace(group[0], outputs=group) for group in groups]

    def chat(
        self, messages: Chat | Sequence[Chat], n: int = 1, **sampling: Value
    ) -> list[Response]:
        """The next turn of one conversation or several; keywords as of `generate`."""
        return self.generate(messages, n, prompt_format="chat", **sampling)  # type: ignore[arg-type]

    def close(self) -> None:
        """Give the model's memory back; closing twice does no harm."""
        self._close()
        vars(self).pop("_engine", None)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self.path!r})"

    def _ids(self, prompt: Prompt, prompt_format: str) -> list[int]:
        if prompt and _are_ids(prompt):
            return list(prompt)
        if not _is_text_or_chat(prompt):
            raise GenerationError(
                f"a prompt is text, token ids or chat messages, not {prompt!r:.80}"
            )
        options = self.config.data.apply_chat_template_kwargs
        return render_prompt(prompt, self.tokenizer, prompt_format, template_kwargs=options)

    def _room(self, ids: list[int], asked: int | None) -> int:
        """Tokens that a response may have."""
        room = self._longest - len(ids)
        if not ids or room < (asked or 1):
            raise GenerationError(
                f"a prompt of {len(ids)} tokens and max_tokens={asked or 1} do not fit: both together have "
                f"1 to {self._longest} tokens (the model's positions, and LLM(…, max_model_len=N))"
            )
        return asked or min(room, self.config.rollout.response_length)

    async def _all(
        self, requests: Sequence[tuple[Prompt, list[int], Sampling]], advance: Callable[[], None]
    ) -> list[Response]:
        async def one(number: int, prompt: Prompt, ids: list[int], sampling: Sampling) -> Response:
            out = await self._engine.generate(ids, sampling, str(number))
            advance()
            text = self.tokenizer.decode(out.token_ids, skip_special_tokens=True)
            drawn = list(out.token_ids), list(out.log_probs)
            return Response(prompt, text, out.stop_reason.value, *drawn, ids)

        tasks = [one(number, *request) for number, request in enumerate(requests)]
        return list(await asyncio.gather(*tasks))


def _are_ids(prompt: Prompt | Sequence[Prompt]) -> TypeGuard[Sequence[int]]:
    return isinstance(prompt, (list, tuple)) and all(isinstance(token, int) for token in prompt)


def _is_text_or_chat(prompt: Prompt | Sequence[Prompt]) -> TypeGuard[str | Chat]:
    is_list = isinstance(prompt, (list, tuple))
    return isinstance(prompt, str) or (is_list and all(isinstance(t, Mapping) for t in prompt))


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Prompts as a list; one alone is a text, token ids, or messages."""
    prompts = getattr(prompts, "tolist", lambda: prompts)()  # token ids of a tokenizer's
    is_one = isinstance(prompts, str) or (
        bool(prompts) and (_are_ids(prompts) or _is_text_or_chat(prompts))
    )
    return [prompts] if is_one else list(prompts)  # type: ignore[list-item, arg-type]


def _close(engine: RolloutEngine) -> None:
    run_coroutine(engine.close())
