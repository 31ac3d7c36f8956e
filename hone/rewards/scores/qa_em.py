"""Scores answers to questions by exact match: the last `<answer>` must equal a reference (Search-R1).

Answers in an `<information>` block never count, even in a block that the policy wrote.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable

from hone.data.values import decode_json, to_python
from hone.rewards.ground_truth import ground_truth_error
from hone.rewards.scorer import all_answers, last_answer
from hone.types import JsonValue, Settings

MAX_TAGS = 10  # a response with more opening or closing answer tags gets a quarter of the score

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Converts to lower case and removes punctuation, articles and extra spaces, as SQuAD does."""
    text_without_punctuation = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text_without_punctuation).split())


def reference_answers(ground_truth: JsonValue) -> list[str]:
    """Returns the reference answers: `target` of a dict, or the ground truth itself; one or several."""
    decoded = decode_json(to_python(ground_truth))
    target = decoded.get("target") if isinstance(decoded, dict) else decoded
    if isinstance(target, str):
        return [target]
    if isinstance(target, Iterable):
        return [str(item) for item in target if item is not None]
    raise ground_truth_error(
        f"ground_truth must be {{'target': [answers]}}; got {ground_truth!r:.80}"
    )


def em_check(prediction: str, golden_answers: str | Iterable[str]) -> bool:
    """Returns whether the prediction equals a reference answer; a text of articles only is not normalized."""
    normalized = normalize_answer(prediction)
    for answer in [golden_answers] if isinstance(golden_answers, str) else golden_answers:
        if normalized and normalized == normalize_answer(answer):
            return True
        if not normalized and prediction.strip() and prediction.strip().lower() == answer.lower():
            return True
    return False


def subem_check(prediction: str, golden_answers: str | Iterable[str]) -> bool:
    """Returns whether the prediction contains a reference answer."""
    normalized = normalize_answer(prediction)
    answers = [golden_answers] if isinstance(golden_answers, str) else golden_answers
    return any(answer and answer in normalized for answer in map(normalize_answer, answers))


def remove_information(text: str) -> str:
    """Removes closed `<information>…</information>` blocks from the text."""
    outer_texts: list[str] = []
    position = 0
    while (start := text.find("<information>", position)) >= 0:
        end = text.find("</information>", start)
        if end < 0:
            break
        outer_texts.append(text[position:start])
        position = end + len("</information>")
    return "".join([*outer_texts, text[position:]])


def extract_solution(solution_str: str, *, compat: bool = False) -> str | None:
    """Returns the last answer; `compat` ignores the first answer, the example in the prompt."""
    if compat:
        answers = all_answers(solution_str)
        return answers[-1] if len(answers) > 1 else None
    return last_answer(remove_information(solution_str))


def score_details(
    solution_str: str,
    ground_truth: JsonValue,
    format_score: float = 0.0,
    score: float = 1.0,
    structure_format_score: float = 0.0,
    final_format_score: float = 0.0,
    retrieval_score: float = 0.0,
    extra_info: Settings | None = None,
    score_observations: bool = False,
) -> dict[str, float]:
    """Returns the score and `acc`, which is 1 for an exact match in any format."""
    if structure_format_score or final_format_score or retrieval_score:
        from hone.rewards.scores import qa_em_format

        return qa_em_format.score_details(
            solution_str,
            ground_truth,
            structure_format_score,
            final_format_score,
            retrieval_score,
            score,
            extra_info,
            score_observations,
        )
    return _grade_answer(solution_str, ground_truth, em_check, format_score, score)


def compute_score(
    solution_str: str,
    ground_truth: JsonValue,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Returns `score` for an exact match, `format_score` for another answer, 0 for no answer."""
    return _grade_answer(solution_str, ground_truth, em_check, format_score, score)["score"]


compute_score_em = compute_score


def compute_score_subem(
    solution_str: str,
    ground_truth: JsonValue,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Scores like `compute_score`; the prediction only needs to contain a reference answer."""
    return _grade_answer(solution_str, ground_truth, subem_check, format_score, score)["score"]


def _grade_answer(
    text: str,
    ground_truth: JsonValue,
    is_match: Callable[[str, list[str]], bool],
    format_score: float,
    score: float,
) -> dict[str, float]:
    answer = extract_solution(text)
    if answer is None:
        return {"score": 0.0, "acc": 0.0}
    if not is_match(answer, reference_answers(ground_truth)):
        return {"score": format_score, "acc": 0.0}
    is_spam = max(text.count("<answer>"), text.count("</answer>")) > MAX_TAGS
    return {"score": score / 4 if is_spam else score, "acc": 1.0}
