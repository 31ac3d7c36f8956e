"""The lengths of a data set's prompts in tokens, measured once and cached by a hash of all they depend on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from hone.data.dataset import RLHFDataset
from hone.data.prompts import PromptError, PromptTooLong
from hone.data.rows import DataError
from hone.tracking import atomic_write_text

CHUNK = 256


@dataclass(frozen=True)
class Lengths:
    """In tokens, over all rows of a data set."""

    rows: int
    shortest: int
    longest: int
    """At least so many where a text is longer by far than what fits."""
    too_long: int
    """How many are longer than `data.max_prompt_length`."""
    where: str
    """The row of the longest."""


def measure_prompts(dataset: RLHFDataset, *, advance: Callable[[int], None]) -> Lengths:
    """Render every prompt as the run will; a data set measured before is read from the cache."""
    cache = _cache_file(dataset)
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Lengths(**json.loads(cache.read_text()))
    limit = dataset.settings.max_prompt_length
    lengths: list[int] = []
    for index, length in enumerate(dataset.prompt_lengths()):
        if isinstance(length, PromptTooLong):
            length = 2 * limit + 65  # so many are known before the rest is left unread
        elif isinstance(length, PromptError):
            raise DataError(f"{dataset.where(index)}: {length}") from length
        lengths.append(length)
        if index % CHUNK == CHUNK - 1:
            advance(CHUNK)
    longest = max(lengths)
    too_long = sum(length > limit for length in lengths)
    where = dataset.where(lengths.index(longest))
    measured = Lengths(len(lengths), min(lengths), longest, too_long, where)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time only
        atomic_write_text(cache, json.dumps(asdict(measured)))
    return measured


def _cache_file(dataset: RLHFDataset) -> Path:
    """Named by all that the lengths depend on: rows, tokenizer, template, tools and limit."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    tokenizer, config = dataset.tokenizer, dataset.settings
    backend = getattr(tokenizer, "backend_tokenizer", None)
    facts = (
        dataset.fingerprint,
        backend.to_str() if backend is not None else repr(tokenizer),
        str(getattr(tokenizer, "chat_template", None)),
        repr(config.apply_chat_template_kwargs),
        json.dumps(dataset.tools, sort_keys=True, default=str),
        config.prompt_key,
        config.prompt_format,
        str(config.max_prompt_length),
    )
    digest = hashlib.blake2b("\0".join(facts).encode("utf-8", "replace"), digest_size=16)
    return Path(root) / "hone" / "prompt_lengths" / f"{digest.hexdigest()}.json"
