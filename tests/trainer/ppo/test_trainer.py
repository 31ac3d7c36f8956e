"""The loop as a whole: what a step writes, that a seed fixes everything, and that it learns."""

from __future__ import annotations

from collections.abc import Callable

from ..runs import Run


def test_the_same_seed_gives_the_same_metrics(train: Callable[..., Run]) -> None:
    first, second = train(folder="a"), train(folder="b")
    assert len(first.steps) == 2
    assert first.numbers == second.numbers


def test_another_seed_gives_other_metrics(train: Callable[..., Run]) -> None:
    first, second = train(folder="a"), train("trainer.seed=2", folder="b")
    assert first.numbers != second.numbers
