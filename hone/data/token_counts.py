"""Counts the tokens of many prompts with a thread pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from hone.cores import usable_cores
from hone.data.messages import PromptError
from hone.data.prompts import MAX_CHARACTERS_PER_TOKEN, tokenise
from hone.text import find_flaw
from hone.tokenizer import Tokenizer

RenderedPrompt = str | list[int]
"""A rendered prompt: text, or ids if only the tokenizer can produce them."""
COUNT_BATCH_SIZE = 64
PROBE = "What is 6 × 7?\n<think> 42 </think>"
"""A text whose token count tells whether the tokenizer does more than its backend."""


def token_counts(
    prompts: Iterable[Callable[[], RenderedPrompt]],
    tokenizer: Tokenizer,
    max_tokens: int | None = None,
) -> Iterator[int | PromptError]:
    """Yields the number of tokens or the rendering error of each prompt.

    Prompts are rendered in this thread and tokenised in batches by a thread pool, because
    tokenizers release the GIL.
    """
    probe_tokens = len(tokenise(PROBE, tokenizer))  # the first call sets the tokenizer's options
    backend = getattr(tokenizer, "backend_tokenizer", None)

    def count_texts(texts: Sequence[str]) -> list[int]:
        assert backend is not None
        return [len(ids) for ids in backend.encode_batch_fast(texts, add_special_tokens=False)]

    # A tokenizer that does more than its backend must encode each text itself.
    can_batch = backend is not None and count_texts([PROBE]) == [probe_tokens]

    def render_one(render: Callable[[], RenderedPrompt]) -> str | int | PromptError:
        """Returns the token count or rendering error of a prompt, or its text for `count_batch`."""
        try:
            prompt = render()
            if isinstance(prompt, list):
                return len(prompt)
            # `tokenise` stops early at a far too long text, and reports a flaw of the text.
            is_long = max_tokens and len(prompt) > MAX_CHARACTERS_PER_TOKEN * (max_tokens + 64)
            if can_batch and not is_long and find_flaw(prompt, allow_nul=True) is None:
                return prompt
            return len(tokenise(prompt, tokenizer, max_tokens))
        except PromptError as error:
            return error

    def count_batch(batch: Sequence[str | int | PromptError]) -> list[int | PromptError]:
        """Replaces the texts of a batch by their token counts."""
        texts = [item for item in batch if isinstance(item, str)]
        counts = iter(count_texts(texts) if texts else ())
        return [next(counts) if isinstance(item, str) else item for item in batch]

    rendered_prompts = map(render_one, prompts)
    futures: deque[Future[list[int | PromptError]]] = deque()
    num_threads = usable_cores()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="count tokens") as pool:
        while batch := list(islice(rendered_prompts, COUNT_BATCH_SIZE)):
            futures.append(pool.submit(count_batch, batch))
            if len(futures) > 2 * num_threads:
                yield from futures.popleft().result()
        while futures:
            yield from futures.popleft().result()
