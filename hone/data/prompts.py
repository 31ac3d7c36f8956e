"""Converts the prompts of rows to token ids: chat messages, plain strings, or pre-rendered text.

Prompts are rendered only in `render_text_or_ids` and truncated only in `truncate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from hone.data.chat_template import BrokenTemplate, apply_template
from hone.data.rows import DataError
from hone.text import error_text, find_flaw, short_repr
from hone.tokenizer import Processor, Tokenizer
from hone.types import Fields, JsonValue, Row, Settings

if TYPE_CHECKING:
    from hone.config.data import DataConfig
    from hone.data.loader import RowStore

Message: TypeAlias = dict[str, Any]
"""One chat message: `role`, `content`, and further keys of the template."""
Prompt: TypeAlias = str | Sequence[Message] | None
"""The prompt of a row: text, messages, or the typed parts of one message."""
Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Tool schemas that a chat template shows to the model."""

PromptBuilder: TypeAlias = Callable[[Row], tuple[Prompt, Tools | None] | None]
"""Maps a row to the prompt and tools of its agent loop, or to None if the prompt is unchanged."""

SINGLE_TURN_AGENT = "single_turn_agent"
KWARGS_COLUMNS = ("tools_kwargs", "interaction_kwargs", "tool_config")
"""The columns with keyword arguments of agent loops."""
ROLES = ("system", "user", "assistant", "tool", "developer", "function", "ipython", "observation")
"""The roles that chat templates know; any other role is an error."""
TOKENIZER_OPTIONS = {"tokenizer_kwargs", "sanitize_control_tokens", "padding", "truncation"}
"""Template options that affect tokenization: with one of them, the tokenizer returns ids."""
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


class PromptRows:
    """Rows with their prompts: `rows[i]` is one row as a dict, with the token ids of its prompt."""

    store: RowStore
    positions: list[int]
    """Positions in `store` of the rows in use."""
    prompt_builder: PromptBuilder | None = None
    """Builds prompts with what agent loops add, such as instructions."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: DataConfig,
        processor: Processor | None,
        tools: Tools | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self.processor = processor
        self.tools = tools
        self.prompt_key, self.max_prompt_length = settings.prompt_key, settings.max_prompt_length
        self.image_key, self.video_key = settings.image_key, settings.video_key
        # With truncation=error, a far too long text fails before all of it is tokenised.
        self._max_tokens = self.max_prompt_length if settings.truncation == "error" else None
        self.added_rows: list[Row] = []

    def __getitem__(self, index: int) -> Row:
        try:
            row = self._prepare(dict(self.raw_row(index)))
        except PromptError as error:
            raise DataError(f"{self.where(index)}: {error}") from error
        number = row["extra_info"].get("index")
        row["index"] = index if number is None else number
        return row

    def raw_row(self, index: int) -> Row:
        """Returns a row as the file, or on_batch_end, gave it."""
        if index < len(self.positions):
            return self.store[self.positions[index]]
        return self.added_rows[index - len(self.positions)]

    def where(self, index: int) -> str:
        """Returns the file and number of a row, for messages."""
        if index < len(self.positions):
            return self.store.where(self.positions[index])
        return f"row {index - len(self.positions)} added by on_batch_end"

    def key(self, index: int) -> tuple[str, int]:
        """Returns (dataset name, row number), from which the uid is derived."""
        if index < len(self.positions):
            return self.store.key(self.positions[index])
        return f"{self.store.fingerprint}+added", index - len(self.positions)

    def _render(self, row: Row) -> str | list[int]:
        prompt: Prompt = row[self.prompt_key]
        tools: Tools | None = self.tools or None
        if row.get("agent_name") == SINGLE_TURN_AGENT:
            tools = None
        if self.prompt_builder is not None:
            prompt, tools = self.prompt_builder(row) or (prompt, tools)
        return render_text_or_ids(
            prompt,
            self.tokenizer,
            self.settings.prompt_format,
            tools=tools,
            template_kwargs=self.settings.apply_chat_template_kwargs,
        )

    def _prepare(self, row: Row) -> Row:
        text = self._render(row)  # or token ids
        ids = tokenise(text, self.tokenizer, self._max_tokens) if isinstance(text, str) else text
        row["prompt_ids"] = truncate(ids, self.max_prompt_length, self.settings.truncation)
        prompt = row[self.prompt_key]
        if self.settings.prompt_format == "raw":
            row["raw_prompt"] = raw_text(prompt)
        elif self.processor is None:
            row["raw_prompt"] = as_messages(prompt)
        else:
            from hone.data.media import with_typed_parts

            keys = self.image_key, self.video_key
            row["raw_prompt"] = with_typed_parts(as_messages(prompt), row, *keys)
        if self.prompt_key != "raw_prompt":
            del row[self.prompt_key]
        defaults = {"extra_info": {}, "data_source": "unknown", "reward_model": {}}
        row |= {name: row.get(name) or default for name, default in defaults.items()}
        row["agent_name"] = row.get("agent_name")
        row |= {name: loop_kwargs(row, name) for name in KWARGS_COLUMNS}
        return row


def loop_kwargs(row: Row, name: str) -> Fields:
    """Returns a dict of keyword arguments of a row, from its top level or its `extra_info`."""
    extra_info = row.get("extra_info") or {}
    value: Fields = remove_nulls(row.get(name) or extra_info.get(name) or {})
    return value
