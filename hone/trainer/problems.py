"""Mistakes of the user, collected so that all of them are told at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from hone.trainer.command_line import mistake_in_words

T = TypeVar("T")


class PreflightError(ValueError):
    """Everything that would stop the run later, one sentence per line."""

    changes_nothing = True
    """Nothing of the run has begun: no log of the error goes to its folder."""

    def __init__(self, problems: list[str]) -> None:
        count = f"{len(problems)} problems"
        text = problems[0] if len(problems) == 1 else "\n- ".join([count, *problems])
        super().__init__(text)
        self.problems = problems


class Problems:
    """The sentences so far; a mistake that stops one check leaves the others to be made."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self._errors: list[Exception] = []

    def attempt(self, part: Callable[[], T]) -> T | None:
        """What the part returns; None where it raised a mistake of the user, which is kept."""
        try:
            return part()
        except Exception as error:
            sentence = mistake_in_words(error)
            if sentence is None:
                raise
            if self._is_new(sentence):
                self.sentences.append(sentence)
                self._errors.append(error)
            return None

    def add(self, sentences: Iterable[str]) -> None:
        """Sentences of a check that goes on after its first."""
        for sentence in sentences:
            if self._is_new(sentence):
                self.sentences.append(sentence)

    def _is_new(self, sentence: str) -> bool:
        """One cause may stop several parts: it is told by the first."""
        cause = sentence.rpartition("cannot be built: ")[2]
        return not any(cause in known for known in self.sentences)

    def raise_all(self) -> None:
        """Raise what was found: a single mistake as itself, several as one error."""
        if not self.sentences:
            return
        if len(self.sentences) == len(self._errors) == 1:
            vars(self._errors[0])["changes_nothing"] = True
            raise self._errors[0]
        cause = self._errors[0] if self._errors else None
        raise PreflightError(self.sentences) from cause
