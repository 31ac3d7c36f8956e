"""Environments of the package verifiers in the tool loop, if it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone.agents.interactions import verifiers
from hone.agents.tools.contract import ToolError

ENVIRONMENT = '''
import verifiers as vf
from datasets import Dataset

ROWS = [
    {"prompt": [{"role": "user", "content": f"Say {word}"}], "answer": word} for word in ("yes", "no")
]


class Patient(vf.MultiTurnEnv):
    """Asks again until the answer is right; the answer `boom` raises."""

    async def env_response(self, messages, state, **kwargs):
        if messages[-1].content == "boom":
            raise vf.Error("broken")
        return [{"role": "user", "content": f"Not {messages[-1].content}"}]

    @vf.stop
    async def is_right(self, state):
        turns = state["trajectory"]
        return bool(turns) and turns[-1]["completion"][-1].content == state["answer"]


async def right(completion, answer):
    return float(completion[-1].content == answer)


def load_environment(weight=1.0, tools=()):
    rubric = vf.Rubric(funcs=[right], weights=[weight])
    rows = Dataset.from_list(ROWS)
    if tools:
        return vf.ToolEnv(tools=[len], dataset=rows, rubric=rubric)
    return Patient(dataset=rows, rubric=rubric, system_prompt="Be brief.", max_turns=3)
'''
needs_verifiers = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None,
    reason="verifiers is not installed: pip install 'verifiers>=0.1.14,<0.4' (its pins are its own)",
)


@pytest.fixture
def patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "patient_env.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "  - name: verifiers:patient-env\n    config: {weight: 2.0}\n"


@needs_verifiers
@pytest.mark.parametrize(
    ("index", "lines", "reward"),
    [(0, ["yes"], 2.0), (1, ["maybe", "no", "never"], 2.0), (4, ["a", "b", "c", "never"], 0.0)],
)
def test_an_environment_of_verifiers_is_played_to_its_reward(
    run_row: Callable[..., Any],
    patient: str,
    index: int,
    lines: list[str],
    reward: float,
) -> None:
    name = "verifiers:patient-env"
    prompt, response, fields = run_row(patient, lines, name=name, index=index)
    assert f"u:Be brief.\n\nSay {('yes', 'no')[index % 2]}" in prompt
    turns = [line for line in lines if line != "never"]
    replies = [f"\nu:Not {turn}\na:" for turn in turns[:-1]]
    turn_texts = [f"{turn}</s>{reply}" for turn, reply in zip(turns, [*replies, ""], strict=True)]
    assert response == "".join(turn_texts)
    assert fields["reward_scores"] == {name: reward}
    assert fields["tool_failures"] == 0


@needs_verifiers
def test_an_error_of_the_environment_ends_the_talk_and_is_counted(
    run_row: Callable[..., Any], patient: str
) -> None:
    _, response, fields = run_row(patient, ["boom", "never"], name="verifiers:patient-env")
    assert response == "boom</s>"
    assert fields["tool_failures"] == 1
    assert fields["reward_scores"] == {}


@needs_verifiers
@pytest.mark.usefixtures("patient")
def test_tools_of_an_api_are_refused() -> None:
    with pytest.raises(ToolError, match="needs the tool calls of a chat API"):
        verifiers.VerifiersEnvironment("patient-env", tools=["len"])


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="it is installed")
def test_its_absence_is_explained() -> None:
    with pytest.raises(ToolError, match=r"verifiers is not installed .*pip install 'verifiers"):
        verifiers.VerifiersEnvironment("any")
