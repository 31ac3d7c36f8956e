from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hone.data.prepare import DATASETS
from hone.data.preprocess.sources import Source, UpstreamDataset
from hone.rewards.ground_truth import GroundTruthError
from hone.rewards.scorer import ScorerSignatureError
from hone.rewards.scores import table
from hone.rewards.scores.table import (
    UnknownSourceError,
    check_sources,
    default_compute_score,
    register_score,
)


@pytest.fixture(autouse=True)
def _fresh_table() -> Iterator[None]:
    before = table.registered_scores()
    yield
    table.restore_scores(before)


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("lighteval/MATH", "math_reward"),
        ("DigitalLearningGmbH/MATH-lighteval", "math_reward"),
        ("HuggingFaceH4/MATH-500", "math_reward"),
        ("math_dapo", "math_dapo"),
        ("math", "math_dapo"),
        ("math_dapo_reasoning", "math_dapo"),
        ("aime2024", "math_dapo"),
        ("numina_olympiads", "prime_math"),
        ("codecontests", "prime_code"),
        ("taco", "prime_code"),
        ("hiyouga/geometry3k", "geo3k"),
        ("searchR1_2wikimultihopqa", "qa_em"),
        ("bamboogle", "qa_em"),
        ("countdown", "countdown"),
        ("my/countdown-4", "countdown"),
        ("yolo/multiply-3_digit", "arithmetic"),
        ("yolo/arithmetic-3_digit", "arithmetic"),
        ("mbpp", "asserts"),
        ("openai/openai_humaneval", "asserts"),
    ],
)
def test_sources_have_verls_rules(source: str, module: str) -> None:
    _, scorer = table.scorer_of(source)
    assert scorer.__module__ == f"hone.rewards.scores.{module}"


def test_every_entry_is_a_scorer_that_accepts_its_arguments() -> None:
    for sources in table.known_sources().values():
        for source in sources:
            _, scorer = table.scorer_of(source)
            assert callable(scorer)
            assert {"solution_str", "ground_truth"} <= set(scorer.__code__.co_varnames)


@pytest.mark.parametrize(
    ("source", "response"),
    [
        ("openai/gsm8k", "#### 72"),
        ("math500", r"\boxed{72}"),
        ("hiyouga/geometry3k", r"<think></think>\boxed{72}"),
        ("math_dapo", "Answer: 72"),
        ("numina_olympiads", r"\boxed{72}"),
    ],
)
def test_a_truth_may_be_a_float_or_a_list_of_one_answer(source: str, response: str) -> None:
    def score(truth: Any) -> Any:
        result = default_compute_score(source, response, truth)
        return result["score"] if isinstance(result, dict) else result

    assert [score(truth) for truth in (72, 72.0, ["72"], np.array([72.0]))] == [1.0] * 4
    assert score(["73"]) < 1.0
    with pytest.raises(GroundTruthError, match="must be one answer"):
        score(["72", "73"])


def test_an_unknown_source_is_an_error_with_suggestions() -> None:
    with pytest.raises(UnknownSourceError, match=r"'openai/gsm8'.*mean 'openai/gsm8k'") as caught:
        default_compute_score("openai/gsm8", "#### 1", "1")
    assert isinstance(caught.value, NotImplementedError)
    assert "countdown" in str(caught.value)
    assert "custom_reward_function.path" in str(caught.value)


def test_checking_names_the_first_row_without_a_score() -> None:
    rows = [
        {"data_source": "countdown"},
        {"data_source": "hh", "reward_model": {"style": "model"}},
        {"data_source": "mystery", "reward_model": {"style": "rule"}},
    ]
    check_sources(rows[:2])
    with pytest.raises(UnknownSourceError, match=r"'mystery' \(row 2\)"):
        check_sources(rows)
    with pytest.raises(UnknownSourceError, match=r"row 0 has no data source in column 'kind'"):
        check_sources(rows, key="kind")
    with pytest.raises(UnknownSourceError, match=r"'mystery' \(row 1\)"):
        check_sources(["gsm8k", "mystery"])


def length_score(solution_str: str) -> float:
    return float(len(solution_str))


def score_details(solution_str: str) -> dict[str, float]:
    return {"score": 1.0, "length": float(len(solution_str))}


def test_the_name_of_a_registered_function_does_not_change_its_result() -> None:
    register_score("mine", score_details)
    assert default_compute_score("mine", "abc", None) == {"score": 1.0, "length": 3.0}


def test_a_registered_function_gets_only_the_arguments_it_names() -> None:
    register_score("mine", length_score)
    assert default_compute_score("mine", "abc", None) == 3.0


def test_a_registered_path_is_loaded_from_its_file(scorer_file: Callable[[str], str]) -> None:
    path = scorer_file("def f(data_source, **kw):\n    return {'score': 2, 'from': data_source}\n")
    register_score("team/", f"{path}:f", match="prefix")
    assert default_compute_score("team/x", "a", 1) == {"score": 2, "from": "team/x"}


def test_a_registered_name_replaces_the_built_in_one() -> None:
    register_score("openai/gsm8k", length_score)
    assert default_compute_score("openai/gsm8k", "abc", "1") == 3.0


@pytest.mark.parametrize(("target", "match"), [("no_colon", "exact"), ("a:b", "regex")])
def test_a_wrong_registration_is_refused(target: str, match: str) -> None:
    with pytest.raises(ValueError):
        register_score("mine", target, match=match)


def test_results_are_converted_as_in_verl() -> None:
    results: dict[str, Any] = {"int": 1, "bool": True, "tuple": (0.5, "why")}
    for name, value in results.items():
        register_score(name, lambda solution_str, value=value: value)
    assert [default_compute_score(name, "", None) for name in results] == [1.0, 1.0, 0.5]


def test_options_are_passed_to_the_rule_and_unknown_ones_are_errors() -> None:
    assert default_compute_score("openai/gsm8k", "#### 2", "3", format_score=0.1) == 0.1
    assert default_compute_score("openai/gsm8k", "2", "2", method="flexible") == 1.0
    with pytest.raises(ScorerSignatureError, match=r"gsm8k.*'formt_score'.*format_score"):
        default_compute_score("openai/gsm8k", "#### 2", "3", formt_score=0.1)


def test_sandbox_options_are_passed_only_to_scorers_that_accept_them() -> None:
    options = {"sandbox_fusion_url": "http://x", "memory_limit_mb": 64, "retrieval_score": 0.1}
    assert default_compute_score("openai/gsm8k", "#### 2", "2", **options) == 1.0


def test_scoring_loads_no_torch_and_no_unused_scorer() -> None:
    code = (
        "import sys; from hone.rewards import default_compute_score as d;"
        "assert d('openai/gsm8k', '#### 1', '1') == 1.0;"
        "assert not {'torch', 'sympy', 'hone.rewards.scores.countdown'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_verls_module_names_can_be_imported() -> None:
    from hone.rewards.scores import (  # noqa: F401
        geo3k,
        gsm8k,
        math,
        math_reward,
        multiply,
        prime_code,
        prime_math,
        search_r1_like_qa_em,
    )

    assert multiply.compute_score("<answer>6</answer>", 6) == 1.0
    assert search_r1_like_qa_em.compute_score("<answer>x</answer>", {"target": ["x"]}) == 1.0


ANY_RECORD = {
    "question": "q?",
    "problem": "p",
    "answer": "#### 1",
    "solution": r"\boxed{1}",
    "golden_answers": ["a"],
    "data_source": "nq",
    "answer_in_corpus": True,
    "activity_label": "a",
    "ctx_a": "b.",
    "ctx_b": "c",
    "endings": list("abcd"),
    "label": "1",
    "prompt": "p",
    "test": "def check(f): pass",
    "entry_point": "f",
    "task_id": 1,
    "test_list": ["assert True"],
    "text": "t",
    "tests": {"inputs": [], "outputs": []},
    "split": "train",
    "images": [b""],
    "nums": [1, 2],
    "numbers": [1, 2],
    "target": 3,
    "chosen": "\n\nHuman: a\n\nAssistant: b",
    "rejected": "\n\nHuman: a\n\nAssistant: c",
}
"""A record with every field that a preparer reads."""


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_every_source_that_a_preparer_writes_has_a_rule(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_records(self: Source, upstream: UpstreamDataset, split: str) -> list[Any] | None:
        return None if split == "examples" else [dict(ANY_RECORD)]

    monkeypatch.setattr(Source, "find_records", find_records)
    dataset = DATASETS[name]
    builders = [b for b in (dataset.source_builder, dataset.generator) if b]
    for builder in builders:
        sizes = {"train_size": 4, "test_size": 2} if builder == dataset.generator else {}
        arguments = {"source": Source()} if builder == dataset.source_builder else sizes
        splits = builder(**arguments, **dataset.preset)
        rows = [row for split in splits.values() for row in split if "data_source" in row]
        assert rows or name in ("gsm8k_multiturn_sft",), name
        check_sources(rows)


@pytest.mark.parametrize("source", ["os:getcwd", "os.getcwd", "file.py:score", "a/b.py:score"])
def test_a_data_source_is_a_name_and_never_imported(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(target: str) -> None:
        raise AssertionError(f"{target} was imported")

    monkeypatch.setattr("hone.rewards.scores.table.load_object", refuse)
    with pytest.raises(UnknownSourceError, match="no scorer for data_source"):
        table.scorer_of(source)
