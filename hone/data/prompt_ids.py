"""Renders single prompts, and the system prompt of a template, to token ids without truncation."""

from __future__ import annotations

from hone.data.messages import Prompt, Tools
from hone.data.prompts import render_text_or_ids, tokenise
from hone.tokenizer import Tokenizer
from hone.types import JsonValue, Settings


def render_prompt(
    raw_prompt: Prompt,
    tokenizer: Tokenizer,
    prompt_format: str = "chat",
    tools: Tools | None = None,
    template_kwargs: Settings | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """Returns all token ids of a prompt.

    `max_tokens` only saves time: a long text whose start has over 2 · max_tokens + 64 tokens raises
    PromptTooLong instead.
    """
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
