"""Suggestions of known names for an unknown name, as the end of an error message."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

NOT_SUPPORTED = {
    "async_training": "Asynchronous training is",
    "bnb_config": "4-bit weights are",
    "callbacks": "Callbacks are",
    "load_in_4bit": "4-bit weights are",
    "load_in_8bit": "8-bit weights are",
    "qlora": "4-bit weights are",
    "quantization_config": "Quantized weights are",
}
"""What a name of other programs asks for, which hone does not do yet."""
PREFERENCE_LOSSES = ("cpo", "dpo", "ipo", "kto", "orpo", "simpo")
"""Names that other programs have beside the estimators; in hone they are losses of a verb of their own."""
_MIN_WHOLE_SIMILARITY = 0.9
"""Names with different numbers of words are alike from this similarity: `trainfiles`, `train_files`."""


def nearest(name: str, known_names: Iterable[str], min_similarity: float = 0.6) -> str | None:
    """Returns the known name that `name` misspells, or None; a similarity of 1 means equal names.

    Each word of the name must be similar: `num_threads` is another name than `num_iterations`, not a
    misspelling of it.
    """
    matches = difflib.get_close_matches(name, list(known_names), 5, min_similarity)
    return next((match for match in matches if _is_misspelling(name, match)), None)


def _is_misspelling(name: str, known_name: str) -> bool:
    words, known_words = (re.split(r"[^A-Za-z0-9]+", text.lower()) for text in (name, known_name))
    if 1 < len(words) < len(known_words) and set(words).issubset(known_words):
        return True  # `lr_warmup` for `lr_warmup_steps`
    if len(words) != len(known_words):
        return _similarity(name, known_name) >= _MIN_WHOLE_SIMILARITY
    return all(map(_is_misspelt_word, words, known_words))


def _is_misspelt_word(word: str, known_word: str) -> bool:
    if len(word) == len(known_word) == 1:
        return True  # `top_q` for `top_p`
    # One wrong letter of two makes `k9` of `k3`.
    return _similarity(word, known_word) >= (0.5 if len(known_word) <= 2 else 0.75)


def _similarity(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


def did_you_mean(*names: str | None) -> str:
    """Returns ` Did you mean 'x' or 'y'?`, or an empty string without names."""
    choices = " or ".join(f"'{name}'" for name in names if name)
    return f" Did you mean {choices}?" if choices else ""


def foreign_answer(name: str) -> str:
    """Returns ` X is not supported yet.`, or the verb that does X, for a name of other programs."""
    if name.lower() in PREFERENCE_LOSSES:
        return " It is a loss of `hone dpo`."
    words = NOT_SUPPORTED.get(name.lower())
    return f" {words} not supported yet." if words else ""


def suggestion(name: str, known_names: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?` if a known name is similar, else an empty string."""
    return foreign_answer(name) or did_you_mean(nearest(name, known_names))
