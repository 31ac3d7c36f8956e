from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.rewards import repetition
from hone.rewards.repetition import repeatness

PANGRAM = "The quick brown fox jumps over the lazy dog."


@pytest.mark.parametrize(
    ("text", "value"),
    [("abab", 0.3), ("aaaa", 0.6), ("abcabcabc", 0.4667), ("", 0.0), ("a", 0.0), ("ab", 0.0)],
)
def test_values_of_the_original_implementation(text: str, value: float) -> None:
    assert repeatness([text])[0] == pytest.approx(value, abs=1e-4)


def test_a_sentence_is_not_repetitive_and_five_times_the_same_is() -> None:
    assert repeatness([PANGRAM])[0] < 0.03
    assert repeatness([PANGRAM * 5])[0] == pytest.approx(0.64, abs=0.01)


def common_prefix(left: str, right: str) -> int:
    length = 0
    while left[length : length + 1] == right[length : length + 1] != "":
        length += 1
    return length


def reference(text: str) -> float:
    """A slow reference: sorts all suffixes and compares neighbours."""
    suffixes = sorted(text[i:] for i in range(len(text)))
    common = sum(common_prefix(suffixes[i], suffixes[i + 1]) for i in range(len(text) - 1))
    return 2 * common / (len(text) * (len(text) + 1)) if text else 0.0


@given(st.lists(st.text(alphabet="abé𝒳", max_size=40), max_size=5))
@settings(max_examples=100, deadline=None)
def test_it_equals_sorting_all_suffixes(texts: list[str]) -> None:
    assert repeatness(texts) == pytest.approx([reference(text) for text in texts])


@given(st.text(alphabet="abé𝒳", min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_long_texts_are_measured_as_short_ones(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repetition, "PAIRWISE_CHARS", 0)
        sorted_suffixes = repeatness([text])
    assert sorted_suffixes == repeatness([text])


def test_long_loops_are_repetitive() -> None:
    assert repeatness(["again and " * 30_000])[0] > 0.99
