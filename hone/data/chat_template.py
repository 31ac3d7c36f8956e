"""A tokenizer's chat template: code of a model folder, run within limits of time, memory and text.

A template is first tried in a process of its own, which can be ended whatever it does. Then it is
rendered here, where a call that computes for too long is interrupted.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hone.data import template_trial
from hone.data.interruption import Overdue, limited
from hone.text import clean_values
from hone.tokenizer import Tokenizer
from hone.types import Settings

logger = logging.getLogger(__name__)

RENDER_S = 10.0
"""Processor seconds of one rendering."""
TRIAL_BYTES = 1 << 31
MAX_CHARACTERS = 1 << 26
"""Longest text of one rendering."""
_TRIAL_WAIT_S = 120.0
"""Wall-clock seconds for a trial, which computes for a tenth of a second: the machine may be busy."""

_trial_lock = threading.Lock()
_verdicts: dict[str, str | None] = {}
"""Template → what is wrong with it, or None, of those tried in this process."""


class BrokenTemplate(ValueError):
    """A chat template that does not end or asks for too much; no row can be rendered with it."""


def apply_template(
    messages: Sequence[Settings],
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Settings] | None = None,
    tokenize: bool,
    **options: Any,
) -> str | list[int]:
    """`tokenizer.apply_chat_template`, within the limits: text, or ids where `tokenize` is true."""
    _check(messages, tokenizer, tools, options)

    def render() -> str | list[int]:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            tokenize=tokenize,
            return_dict=False,
            **options,
        )

    try:
        rendered = limited(render, RENDER_S)
    except Overdue:
        raise BrokenTemplate(_sentence(tokenizer, _no_end())) from None
    if isinstance(rendered, str) and len(rendered) > MAX_CHARACTERS:
        raise BrokenTemplate(_sentence(tokenizer, _too_large()))
    return rendered


def _no_end() -> str:
    return f"does not end within {RENDER_S:g} s of computing"


def _too_large() -> str:
    return (
        f"writes more than {MAX_CHARACTERS:,} characters, or needs more than "
        f"{TRIAL_BYTES >> 20:,} MiB of memory"
    )


def _sentence(tokenizer: Tokenizer, what: str) -> str:
    name = getattr(tokenizer, "name_or_path", None) or "the tokenizer"
    return (
        f"the chat template of {name} {what}; repair it, or give another one "
        "(actor_rollout_ref.model.custom_chat_template; data.chat_template in hone sft)"
    )


def _check(
    messages: Sequence[Settings],
    tokenizer: Tokenizer,
    tools: Sequence[Settings] | None,
    options: Settings,
) -> None:
    """Try a template that this process has not seen, on the messages at hand."""
    template = _template_of(tokenizer, tools, options)
    if template is None:
        return
    with _trial_lock:
        if template not in _verdicts:
            given = getattr(tokenizer, "special_tokens_map", {})
            variables = {**given, **options, "messages": messages, "tools": tools}
            _verdicts[template] = _tried(template, variables)
    if (what := _verdicts[template]) is not None:
        raise BrokenTemplate(_sentence(tokenizer, what))


def _template_of(
    tokenizer: Tokenizer, tools: Sequence[Settings] | None, options: Settings
) -> str | None:
    """The text that will be rendered; None where the tokenizer has no Jinja template."""
    if not hasattr(tokenizer, "get_chat_template"):
        return None
    try:
        template = tokenizer.get_chat_template(options.get("chat_template"), tools)
    except (ValueError, TypeError):  # the rendering says what is wrong
        return None
    return template if isinstance(template, str) else None


def _tried(template: str, variables: Settings) -> str | None:
    """What a trial in another process found wrong, or None."""
    task = {
        "path": sys.path,
        "template": template,
        "variables": clean_values(variables),
        "seconds": RENDER_S,
        "bytes": TRIAL_BYTES,
        "characters": MAX_CHARACTERS,
    }
    command = [sys.executable, "-I", str(Path(template_trial.__file__))]
    try:
        status = subprocess.run(
            command,
            input=json.dumps(task).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TRIAL_WAIT_S,
            check=False,
        ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("the chat template could not be tried beforehand: %s", error)
        return None
    if status == -signal.SIGPROF:
        return _no_end()
    if status == template_trial.TOO_LARGE:
        return _too_large()
    return f"crashes its interpreter (signal {-status})" if status < 0 else None
