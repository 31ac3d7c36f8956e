"""What this package asks of a tokenizer: the part of Hugging Face's that it uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from hone.types import Settings


class Tokenizer(Protocol):
    """Text to token ids and back. Every Hugging Face tokenizer is one."""

    pad_token_id: int
    eos_token_id: int | None
    chat_template: str | None

    def __len__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...

    def apply_chat_template(
        self, conversation: Sequence[Settings], **options: Any
    ) -> str | list[int]: ...

    def save_pretrained(self, save_directory: str | Path) -> tuple[str, ...]: ...


class Processor(Protocol):
    """Turns a row's images and text into a model's input; handed to data sets of the user's own."""

    tokenizer: Tokenizer
