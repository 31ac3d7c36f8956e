"""`hone.LLM` generates responses in this process, with the rollout engine that training uses."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeGuard

from transformers import PreTrainedModel

from hone.agents.contract import default_sampling
from hone.agents.loop_thread import run_with_engine
from hone.api.settings import CallSettings, PathOrName, Value
from hone.config.generation import GenerationConfig
from hone.data.prompt_ids import render_prompt
from hone.data.prompts import row_uid
from hone.event_loop import run_coroutine
from hone.models.from_config import build_tokenizer
from hone.rollout.contract import TokenOutput
from hone.text import short_repr
from hone.tracking import progress
from hone.trainer.generation import build_engine, max_positions, respond, sampling_params
from hone.trainer.job_files import GenerationError
from hone.trainer.ranks import Ranks
from hone.types import Fields

Chat: TypeAlias = Sequence[Fields]
Prompt: TypeAlias = str | Sequence[int] | Chat
"""Text (one user message), token ids, or chat messages."""


@dataclass(frozen=True)
class Response:
    """The first of `n` responses to a prompt; `outputs` holds all `n` responses.

    `log_probs` are of softmax(logits / temperature), as in the trainer; greedy decoding has temperature 1.
    `finish_reason` is `stop` or `length`.
    """

    prompt: Prompt
    text: str
    finish_reason: str
    token_ids: list[int] = field(repr=False)
    log_probs: list[float] = field(repr=False)
    prompt_token_ids: list[int] = field(repr=False)
    outputs: tuple[Response, ...] = field(default=(), repr=False)


class LLM:
    """Generates with a model; `model` is a model folder, a hub name, a checkpoint or a run folder.

    `settings` are keys of the `generation` config, as for `hone generate`. The same call with the same
    `seed` gives the same responses.
    """

    def __init__(
        self, model: PathOrName, config: PathOrName | None = None, **settings: Value
    ) -> None:
        call_settings = CallSettings(
            "generation", "hone.LLM", {**settings, "model.path": model}, config
        )
        self.config: GenerationConfig = call_settings.compose().config
        self.path = self.config.model.path
        self.tokenizer = build_tokenizer(self.config.model)
        self._max_length = self.config.rollout.max_total_tokens
        self._lock = threading.Lock()

        def limit_length(lm: PreTrainedModel) -> None:
            self._max_length = min(self._max_length, max_positions(lm) or self._max_length)

        with progress("load the model"):
            self._engine = build_engine(self.config, self.tokenizer, Ranks.from_env(), limit_length)
        engine = self._engine
        self._close = weakref.finalize(self, lambda: run_coroutine(engine.close()))

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
        """Returns one response per prompt, in the order of the prompts, each with `n` outputs.

        A string becomes one user message of the chat template, as in training; with `prompt_format="raw"`
        the string is the whole prompt. `temperature=0` is greedy. `sampling` takes `top_p`, `top_k`,
        `min_p`, `stop`, `stop_token_ids` and `ignore_eos`.
        """
        if not self._close.alive:
            raise GenerationError("this LLM is closed; create a new one")
        for name, value in (("n", n), ("max_tokens", max_tokens)):
            if value is not None and value < 1:
                raise GenerationError(f"{name}={value}; use 1 or more")
        params = default_sampling(self.config.rollout) | sampling
        if temperature is not None:
            params["temperature"] = temperature
        seeds = (seed, self.config.rollout.seed, self.config.trainer.seed)
        call_seed = next(value for value in seeds if value is not None)
        prompt_list = _as_prompt_list(prompts)
        prompt_format = prompt_format or self.config.data.prompt_format
        prompt_ids = [self._prompt_ids(prompt, prompt_format) for prompt in prompt_list]
        response_limits = [self._max_response_tokens(len(ids), max_tokens) for ids in prompt_ids]
        prompt_params = [
            sampling_params(
                params, n, seed=call_seed, uid=row_uid("prompt", i, 0, 0), max_tokens=limit
            )
            for i, limit in enumerate(response_limits)
        ]
        responses: dict[int, Response] = {}

        def on_finish(index: int, outputs: list[TokenOutput]) -> None:
            prompt, ids = prompt_list[index], prompt_ids[index]
            group = tuple(self._response(prompt, ids, output) for output in outputs)
            responses[index] = replace(group[0], outputs=group)
            bar.advance(n)

        with self._lock, progress("generate", len(prompt_list) * n) as bar:
            coroutine = respond(
                self._engine.generate,
                prompt_ids,
                prompt_params.__getitem__,
                on_finish,
                prompt_name=lambda index: f"prompt {index}",
                max_in_flight=max(len(prompt_ids), 1),
            )
            run_with_engine(self._engine, coroutine)
        return [responses[index] for index in range(len(prompt_list))]

    def chat(
        self, messages: Chat | Sequence[Chat], n: int = 1, **sampling: Value
    ) -> list[Response]:
        """Returns the next turn of each conversation; `sampling` takes the arguments of `generate`."""
        return self.generate(messages, n, prompt_format="chat", **sampling)  # type: ignore[arg-type]

    def close(self) -> None:
        """Frees the model's memory; a second call does nothing."""
        self._close()
        vars(self).pop("_engine", None)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self.path!r})"

    def _prompt_ids(self, prompt: Prompt, prompt_format: str) -> list[int]:
        """Returns a prompt as token ids."""
        if prompt and _is_token_ids(prompt):
            return list(prompt)
        if not _is_text_or_chat(prompt):
            raise GenerationError(
                f"a prompt is text, token ids or chat messages, not {prompt!r:.80}"
            )
        options = self.config.data.apply_chat_template_kwargs
        return render_prompt(prompt, self.tokenizer, prompt_format, template_kwargs=options)

    def _max_response_tokens(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Returns the maximum length of the response; raises an error if prompt and response do not fit."""
        free_tokens = self._max_length - prompt_tokens
        if not prompt_tokens or free_tokens < (max_tokens or 1):
            raise GenerationError(
                f"a prompt of {prompt_tokens} tokens and max_tokens={max_tokens or 1} do not fit: "
                "the prompt must have at least 1 token, and together they may have at most "
                f"{self._max_length} (max_model_len, or the model's maximum length if that is smaller)"
            )
        return max_tokens or min(free_tokens, self.config.rollout.response_length)

    def _response(self, prompt: Prompt, prompt_ids: list[int], output: TokenOutput) -> Response:
        return Response(
            prompt,
            text=self.tokenizer.decode(output.token_ids, skip_special_tokens=True),
            finish_reason=output.stop_reason.value,
            token_ids=list(output.token_ids),
            log_probs=list(output.log_probs),
            prompt_token_ids=prompt_ids,
        )


def _is_token_ids(prompt: Prompt | Sequence[Prompt]) -> TypeGuard[Sequence[int]]:
    return isinstance(prompt, (list, tuple)) and all(isinstance(token, int) for token in prompt)


def _is_text_or_chat(prompt: Prompt | Sequence[Prompt]) -> TypeGuard[str | Chat]:
    if isinstance(prompt, str):
        return True
    return isinstance(prompt, (list, tuple)) and all(isinstance(item, Mapping) for item in prompt)


def _array_to_list(value: Any) -> Any:
    """Converts an array or a tensor to a list, and returns any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def _as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns the prompts as a list; a single prompt (text, token ids or messages) becomes a list of one."""
    prompts = _array_to_list(prompts)
    if isinstance(prompts, (Mapping, bytes)) or not isinstance(prompts, Iterable):
        raise GenerationError(
            "prompts are text, token ids, chats (lists of messages), or a list of these; got "
            f"{short_repr(prompts)}"
        )
    if not isinstance(prompts, str):
        prompts = [_array_to_list(prompt) for prompt in prompts]
        if not prompts:
            return []
    is_single = _is_token_ids(prompts) or _is_text_or_chat(prompts)
    return [prompts] if is_single else list(prompts)
