"""The part of the Hugging Face tokenizer interface that this package uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Converts text to token ids and back; every Hugging Face tokenizer implements this interface."""

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
        self, conversation: Sequence[Mapping[str, Any]], **options: Any
    ) -> str | list[int]: ...

    def save_pretrained(self, save_directory: str | Path) -> tuple[str, ...]: ...


class Processor(Protocol):
    """Converts a row's images and text to model inputs; a custom dataset class receives a processor."""

    tokenizer: Tokenizer
