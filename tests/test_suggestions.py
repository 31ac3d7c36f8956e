"""The known name that an error message suggests."""

from __future__ import annotations

import pytest

from hone.suggestions import did_you_mean, nearest, suggestion


def test_the_most_similar_name_is_suggested() -> None:
    assert nearest("grppo", ["gae", "grpo", "rloo"]) == "grpo"
    assert suggestion("grppo", ["gae", "grpo", "rloo"]) == " Did you mean 'grpo'?"


def test_nothing_is_suggested_without_a_similar_name() -> None:
    assert nearest("seed", ["grpo"]) is None
    assert nearest("grppo", ["grpo"], min_similarity=0.95) is None
    assert suggestion("seed", ["grpo"]) == did_you_mean() == did_you_mean(None) == ""


def test_several_names_are_joined() -> None:
    assert did_you_mean("a.lr", None, "b.lr") == " Did you mean 'a.lr' or 'b.lr'?"


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("num_generations", "log_train_generations"),
        ("max_completion_length", "max_prompt_length"),
        ("num_iterations", "num_threads"),
        ("max_steps", "many_steps"),
        ("max_steps", "max_restarts"),
        ("report_to", "repetition"),
        ("use_vllm", "vllm"),
        ("output_dir", "output_path"),
        ("logging_steps", "long_steps"),
        ("scale_rewards", "score_kwargs"),
        ("peft_config", "override_config"),
        ("total_steps", "total_epochs"),
        ("serve", "serve-rm"),
    ],
)
def test_a_name_of_another_meaning_is_not_suggested(name: str, other: str) -> None:
    assert suggestion(name, [other]) == ""


def test_a_misspelling_with_another_number_of_words_is_suggested() -> None:
    assert nearest("trainfiles", ["train_files"]) == "train_files"


def test_a_word_of_one_letter_may_be_wrong() -> None:
    assert nearest("top_q", ["top_k_top", "top_p"]) == "top_p"


def test_what_hone_does_not_do_is_said_instead_of_a_similar_name() -> None:
    assert suggestion("dpo", ["gdpo"]) == " It is a loss of `hone dpo`."
    assert suggestion("qlora", ["lora"]) == " 4-bit weights are not supported yet."
