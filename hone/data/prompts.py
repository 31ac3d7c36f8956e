"""Converts a row's prompt to token ids: chat messages, a plain string, or pre-rendered text.

Prompts are rendered only in `render_text_or_ids` and truncated only in `truncate`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeAlias

from hone.cores import usable_cores
from hone.data.chat_template import BrokenTemplate, apply_template
from hone.text import error_text, find_flaw, short_repr
from hone.tokenizer import Tokenizer
from hone.types import JsonValue, Settings

Message: TypeAlias = dict[str, Any]
"""One chat message: `role`, `content`, and further keys of the template."""
Prompt: TypeAlias = str | Sequence[Message] | None
"""The prompt of a row: text, messages, or the typed parts of one message."""
Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Tool schemas that a chat template shows to the model."""

ROLES = ("system", "user", "assistant", "tool", "developer", "function", "ipython", "observation")
"""The roles that chat templates know; any other role is an error."""
TOKENIZER_OPTIONS = {"tokenizer_kwargs", "sanitize_control_tokens", "padding", "truncation"}
"""Template options that affect tokenization: with one of them, the tokenizer returns ids."""
RenderedPrompt = str | list[int]
"""A rendered prompt: text, or ids if only the tokenizer can produce them."""
COUNT_BATCH_SIZE = 64
PROBE = "What is 6 × 7?\n<think> 42 </think>"
"""A text whose token count shows whether the tokenizer's backend alone gives the same tokens."""
MAX_CHARACTERS_PER_TOKEN = 32
"""If a text has more characters per allowed token, the start of the text is tokenised first."""


class PromptError(ValueError):
    """Raised for a prompt that cannot be rendered."""


class PromptTooLong(PromptError):
    """Raised for a text far longer than the limit, before all of it is tokenised."""

    reason = "too long"


def as_messages(raw_prompt: Prompt) -> list[Message]:
    """Converts a prompt to messages; a string or a list of typed parts becomes one user message."""
    if isinstance(raw_prompt, str):
        return [{"role": "user", "content": raw_prompt}]
    if raw_prompt is not None and hasattr(raw_prompt, "tolist"):  # a numpy array
        raw_prompt = raw_prompt.tolist()
    if not isinstance(raw_prompt, Sequence) or not raw_prompt:
        raise PromptError(
            f"a prompt must be a string or a non-empty list of messages, got {short_repr(raw_prompt)}"
        )
    entries = [entry for entry in raw_prompt if isinstance(entry, Mapping)]
    if len(entries) < len(raw_prompt):
        raise PromptError(
            f"every message of a prompt must be an object, got {short_repr(raw_prompt)}"
        )
    if all("type" in entry and entry.get("role") is None for entry in entries):
        return [_as_message({"role": "user", "content": entries})]
    return [_as_message(entry) for entry in entries]


def _as_message(entry: Message) -> Message:
    message = remove_nulls(entry)
    if not isinstance(message.get("role"), str):
        raise PromptError(
            f"a message needs a 'role' (system, user, assistant…): {short_repr(entry)}"
        )
    content = message.get("content")
    if content is None and "tool_calls" in message:
        message["content"] = ""
    elif not isinstance(content, (str, list)):
        raise PromptError(
            f"a message's 'content' must be text or a list of parts: {short_repr(entry)}"
        )
    elif isinstance(content, list) and not all(
        isinstance(item, Mapping)
        and isinstance(item.get("type", ""), str)
        and isinstance(item.get("text", ""), str)
        for item in content
    ):
        raise PromptError(
            "every part of a message's 'content' must be an object with a 'type', and its 'text' "
            f"must be text: {short_repr(entry)}"
        )
    return message


def check_message_roles(messages: Sequence[Message]) -> None:
    """Raises PromptError for a role that no chat template knows."""
    for number, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise PromptError(
                f"message {number} has role {short_repr(message['role'])}, which no chat template knows;"
                f" use one of {', '.join(ROLES)}"
            )


def remove_nulls(value: Any) -> Any:
    """Removes the null entries that parquet adds to objects."""
    if isinstance(value, Mapping):
        return {key: remove_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [remove_nulls(item) for item in value]
    return value


def render_prompt(
    raw_prompt: Prompt,
    tokenizer: Tokenizer,
    prompt_format: str = "chat",
    tools: Tools | None = None,
    template_kwargs: Settings | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """Returns the token ids of a prompt; raises PromptTooLong if it far exceeds `max_tokens`."""
    prompt = render_text_or_ids(raw_prompt, tokenizer, prompt_format, tools, template_kwargs)
    return tokenise(prompt, tokenizer, max_tokens) if isinstance(prompt, str) else prompt


def initialize_system_prompt(
    tokenizer: Tokenizer, **apply_chat_template_kwargs: JsonValue
) -> list[int]:
    """Returns the token ids of the template's own system prompt; the name is verl's."""
    return extract_system_prompt_and_generation(tokenizer, **apply_chat_template_kwargs)[0]


def extract_system_prompt_and_generation(
    tokenizer: Tokenizer, **apply_chat_template_kwargs: JsonValue
) -> tuple[list[int], list[int]]:
    """Returns the ids of the system prompt and of the generation prompt; the name is verl's."""
    turn = {"role": "user", "content": ""}

    def render(count: int, add_generation_prompt: bool) -> list[int]:
        options = {**apply_chat_template_kwargs, "add_generation_prompt": add_generation_prompt}
        return render_prompt([turn] * count, tokenizer, template_kwargs=options)

    one_turn, two_turns = render(1, False), render(2, False)
    return one_turn[: max(2 * len(one_turn) - len(two_turns), 0)], render(1, True)[len(one_turn) :]


def render_text_or_ids(
    raw_prompt: Prompt,
    tokenizer: Tokenizer,
    prompt_format: str = "chat",
    tools: Tools | None = None,
    template_kwargs: Settings | None = None,
) -> str | list[int]:
    """Renders a prompt to text, or to ids if only the tokenizer can produce them.

    `chat` renders the chat template with the generation prompt; without a template, it returns a
    plain string unchanged. `raw` returns a pre-rendered string, or the content of one message.
    """
    if prompt_format == "raw":
        return raw_text(raw_prompt)
    if prompt_format != "chat":
        raise PromptError(
            f"data.prompt_format={prompt_format!r} is not known; use one of ('chat', 'raw')"
        )
    options = {"add_generation_prompt": True, **(template_kwargs or {})}
    if not getattr(tokenizer, "chat_template", None) and "chat_template" not in options:
        if isinstance(raw_prompt, str) and not tools:
            return raw_prompt
        raise PromptError(
            "the tokenizer has no chat template, so messages and tools cannot be rendered; use"
            " data.prompt_format=raw with prompts that contain the whole text, or a tokenizer that"
            " has a chat template"
        )
    messages = as_messages(raw_prompt)
    for number, message in enumerate(messages):
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part.get("type", "text") != "text":  # the template would drop an image
                raise PromptError(
                    f"message {number} has a part of type {short_repr(part['type'])}; give text only"
                )
    if options.get("continue_final_message"):
        options["add_generation_prompt"] = False
    is_custom = not hasattr(tokenizer, "get_chat_template")  # for example, mistral-common
    tokenize = is_custom or bool(TOKENIZER_OPTIONS & options.keys())
    try:
        rendering = apply_template(messages, tokenizer, tools=tools, tokenize=tokenize, **options)
    except BrokenTemplate:
        raise
    except Exception as error:  # a template is third-party code
        raise PromptError(
            f"the tokenizer's chat template cannot render {short_repr(messages)}: {error_text(error)}"
        ) from error
    return rendering if isinstance(rendering, str) else [int(token) for token in rendering]


def raw_text(raw_prompt: Prompt) -> str:
    """Returns a pre-rendered prompt: a string, or the content of its only message."""
    if isinstance(raw_prompt, str):
        return raw_prompt
    messages = as_messages(raw_prompt)
    content = messages[0]["content"]
    if len(messages) != 1 or not isinstance(content, str):
        raise PromptError(
            "data.prompt_format=raw needs a string or a single text message, got"
            f" {short_repr(raw_prompt)}; use data.prompt_format=chat for conversations"
        )
    return content


def tokenise(text: str, tokenizer: Tokenizer, max_tokens: int | None = None) -> list[int]:
    """Returns the token ids of a text, without added special tokens.

    Raises PromptTooLong if the text far exceeds `max_tokens`, before all of it is tokenised.
    """
    length = MAX_CHARACTERS_PER_TOKEN * ((max_tokens or 0) + 64)
    while max_tokens is not None and length < len(text):
        num_tokens = len(_encode(text[:length], tokenizer))
        if num_tokens > 2 * max_tokens + 64:  # a word cut at the end may have more tokens
            raise PromptTooLong(
                f"the first {length:,} of its {len(text):,} characters have {num_tokens:,} tokens, "
                f"at most {max_tokens:,} fit"
            )
        length *= 4
    return _encode(text, tokenizer)


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    try:
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    except (TypeError, UnicodeError):  # for example for a lone surrogate
        if flaw := find_flaw(text, allow_nul=True):
            raise PromptError(f"the text of the row {flaw}") from None
        raise


def truncate(ids: Sequence[int], max_length: int, truncation: str) -> list[int]:
    """Truncates to `max_length` ids by dropping those at the left, right or middle.

    `truncation=error` raises PromptError for a longer prompt instead.
    """
    head_lengths = {"left": 0, "right": max_length, "middle": max_length // 2, "error": 0}
    if truncation not in head_lengths:
        raise PromptError(
            f"data.truncation={truncation!r} is not known; use one of {', '.join(head_lengths)}"
        )
    if len(ids) <= max_length:
        return list(ids)
    if truncation == "error":
        raise PromptError(
            f"the prompt has {len(ids)} tokens, data.max_prompt_length={max_length}; raise it, set"
            " data.filter_overlong_prompts=true, or data.truncation=left|right|middle"
        )
    head = head_lengths[truncation]
    return [*ids[:head], *ids[len(ids) - (max_length - head) :]]


def token_counts(
    prompts: Iterable[Callable[[], RenderedPrompt]],
    tokenizer: Tokenizer,
    max_tokens: int | None = None,
) -> Iterator[int | PromptError]:
    """Yields the number of tokens of each prompt, or its rendering error.

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
        """Returns a prompt's token count or rendering error, or its text for a batch to count."""
        try:
            prompt = render()
            if isinstance(prompt, list):
                return len(prompt)
            max_length = MAX_CHARACTERS_PER_TOKEN * (max_tokens + 64) if max_tokens else len(prompt)
            if (
                can_batch
                and len(prompt) <= max_length
                and find_flaw(prompt, allow_nul=True) is None
            ):
                return prompt
            return len(tokenise(prompt, tokenizer, max_tokens))
        except PromptError as error:
            return error

    def count_batch(batch: Sequence[str | int | PromptError]) -> list[int | PromptError]:
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
