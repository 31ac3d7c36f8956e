"""Tries a scorer before training, on rows of the data with responses that contain the ground truth.

A scorer is refused if all responses fail with one error that does not depend on the response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hone.config.reward import CustomRewardFunctionConfig
from hone.plugins import definition_location, load_extern_object
from hone.rewards.failures import Failed
from hone.rewards.managers.rule import NaiveRewardManager, RuleRewardManager
from hone.rewards.scorer import ScorerInput, extra_info_of, policy_transcript_info
from hone.types import Fields, JsonValue, Settings

RESPONSE_FORMATS = (
    "{truth}",
    "<think> so </think>\n<answer>{truth}</answer>",
    "The answer is \\boxed{{{truth}}}.",
    "So it is {truth}\n#### {truth}",
    '{{"answer": "{truth}"}}',
    "```python\n{truth}\n```",
    "{prompt}\n{truth}",
    "",
)
"""Formats of responses, simplest first. A repeated prompt often has an example answer."""
TEXT_ERRORS = {"ValueError", "LookupError", "TypeError", "AttributeError", "AssertionError"}
"""Errors that a scorer may raise for a text that the scorer cannot parse; subclasses are included."""


@dataclass(frozen=True)
class TrialRow:
    """A row of the data, its location in the file, and the scorer's arguments for it."""

    location: str
    data_source: str
    ground_truth: JsonValue
    extra_info: Fields
    prompt: str

    @staticmethod
    def of(row: Settings, location: str, source_key: str, prompt_key: str) -> TrialRow:
        reward_model = dict(row.get("reward_model") or {})
        return TrialRow(
            location,
            str(row.get(source_key)),
            reward_model.get("ground_truth"),
            extra_info_of({"extra_info": [row.get("extra_info")]}, reward_model, 0),
            _text_of(row.get(prompt_key)),
        )

    def responses(self) -> list[ScorerInput]:
        """Returns a response in each format."""
        inputs = []
        for response_format in RESPONSE_FORMATS:
            text = response_format.format(truth=_text_of(self.ground_truth), prompt=self.prompt)
            info = self.extra_info | policy_transcript_info(text)
            inputs.append(ScorerInput(self.data_source, text, self.ground_truth, info))
        return inputs


@dataclass(frozen=True)
class Verdict:
    """The outcome of a trial: a problem that stops training, or a warning."""

    problem: str | None = None
    warning: str | None = None


def try_scorer(manager: RuleRewardManager, rows: Sequence[TrialRow]) -> Verdict:
    """Calls the scorer like the run does, until a response has a score; `rows` have one data source."""
    failures: list[Failed] = []
    for row in rows:
        for response in row.responses():
            outcome = manager.score_checked_rows([response])[0]
            if not isinstance(outcome, Failed):
                return Verdict()
            failures.append(outcome)
            if outcome.reason in ("no_ground_truth", "timeout"):
                break  # other texts would fail too, or take the whole time limit
    first_failure = failures[0]
    detail = first_failure.detail
    location = None if manager.uses_table else definition_location(manager.compute_score)
    if location is not None and location.rpartition(":")[0] not in detail:
        detail = f"the score function of {location}: {detail}"
    is_same_error = len({(failed.reason, failed.error_classes) for failed in failures}) == 1
    source = f"{rows[0].location} (data_source {rows[0].data_source!r})"
    # A function without a final `return` returns None for a text that it does not recognize.
    may_depend_on_response = (
        bool(TEXT_ERRORS & set(first_failure.error_classes))
        or first_failure.reason not in ("exception", "no_ground_truth", "nan", "inf", "bad_return")
        or (first_failure.reason == "bad_return" and first_failure.detail.startswith("None "))
    )
    if is_same_error and not may_depend_on_response:
        return Verdict(problem=f"{source} cannot be scored, whatever the response: {detail}")
    policy = manager.failure_policy
    consequence = (
        "such a response stops the run (reward_model.reward_kwargs.on_failure=raise)"
        if policy.on_failure == "raise"
        else f"such a response scores {policy.failure_score:g}"
    )
    return Verdict(
        warning=f"the score function failed on {source} with the ground truth as the response: "
        f"{detail}; {consequence}"
    )


def _text_of(value: JsonValue) -> str:
    """Returns a value as text: the last item of a list, and `content` or the first value of a dict."""
    if isinstance(value, Mapping):
        return _text_of(value.get("content") or next(iter(value.values()), ""))
    if isinstance(value, (list, tuple)):
        return _text_of(value[-1]) if value else ""
    return "" if value is None else str(value)


def ground_truth_scorer(
    target: str, source_key: str, prompt_key: str
) -> Callable[[Settings], float | str]:
    """Returns a function that scores the ground truth of a row, or returns the failure as text."""
    path, _, name = target.rpartition(":")  # file.py:name, or file.py
    name = (path and name) or CustomRewardFunctionConfig.name
    function = load_extern_object(path or target, name)
    manager = NaiveRewardManager(None, 0, function)
    manager.check_scorer()

    def score(row: Settings) -> float | str:
        reasons = []
        for response in TrialRow.of(row, "", source_key, prompt_key).responses():
            outcome = manager.score_checked_rows([response])[0]
            if not isinstance(outcome, Failed):
                return outcome.score
            reasons.append(f"{outcome.reason}: {outcome.detail}")
        return reasons[0]

    return score
