"""How many tokens prompts have, counted on all cores.

Prompts are rendered in the calling thread and tokenised in others, in batches: the tokenizer's own code
runs without the interpreter's lock, so threads are enough and no process has to load it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from hone.cores import usable_cores
from hone.data.prompts import PromptError, is_far_too_long, tokenise
from hone.text import flaw_of
from hone.tokenizer import Tokenizer

BATCH = 64
PROBE = "What is 6 × 7?\n<think> 42 </think>"
Rendered = str | list[int]
"""What `prompt_text` gives."""


def token_counts(
    prompts: Iterable[Callable[[], Rendered]], tokenizer: Tokenizer, max_tokens: int | None = None
) -> Iterator[int | PromptError]:
    """For each prompt, in order, how many tokens it has, or why it cannot be rendered or tokenised.

    A prompt is a call that renders it. `max_tokens` is that of `render_prompt`.
    """
    rest = iter(prompts)
    counter = _Counter(tokenizer, max_tokens)
    running: deque[Future[list[int | PromptError]]] = deque()
    threads = usable_cores()
    with ThreadPoolExecutor(threads, thread_name_prefix="count tokens") as pool:
        while batch := [_tried(render) for render in islice(rest, BATCH)]:
            running.append(pool.submit(counter.counts, batch))
            if len(running) > 2 * threads:
                yield from running.popleft().result()
        while running:
            yield from running.popleft().result()


def _tried(render: Callable[[], Rendered]) -> Rendered | PromptError:
    try:
        return render()
    except PromptError as error:
        return error


class _Counter:
    """Counts the tokens of batches, from any thread."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int | None) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        alone = len(tokenise(PROBE, tokenizer))  # settles the tokenizer's options at its first use
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        # A tokenizer may do more than its backend: then its own method is called for each text.
        if self._backend is not None and self._together([PROBE]) != [alone]:
            self._backend = None

    def counts(self, batch: Sequence[Rendered | PromptError]) -> list[int | PromptError]:
        plain = [index for index, prompt in enumerate(batch) if self._is_plain(prompt)]
        together = self._together([batch[index] for index in plain]) if plain else []
        known = dict(zip(plain, together, strict=True))
        return [
            known[index] if index in known else self._alone(prompt)
            for index, prompt in enumerate(batch)
        ]

    def _is_plain(self, prompt: Rendered | PromptError) -> bool:
        """Whether a prompt may be tokenised in a batch: sound text of a usual length."""
        if self._backend is None or not isinstance(prompt, str):
            return False
        far = self._max_tokens is not None and is_far_too_long(prompt, self._max_tokens)
        return not far and flaw_of(prompt, allow_nul=True) is None

    def _together(self, texts: Sequence[Rendered | PromptError]) -> list[int]:
        assert self._backend is not None
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [len(ids) for ids in encoded]

    def _alone(self, prompt: Rendered | PromptError) -> int | PromptError:
        if isinstance(prompt, PromptError):
            return prompt
        if isinstance(prompt, list):
            return len(prompt)
        try:
            return len(tokenise(prompt, self._tokenizer, self._max_tokens))
        except PromptError as error:
            return error
