"""Environments with `reset` and `step` in the tool loop."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hone.agents.interactions.contract import BaseInteraction
from hone.agents.interactions.environment import (
    EnvironmentInteraction,
    _observation_text,
    _parse_step,
)
from hone.agents.tools.contract import ToolError
from hone.agents.tools.loading import initialize_interactions_from_config
from hone.event_loop import DeadlineExceeded, run_with_deadline

GUESS = """
class Guess:
    closed = []

    def __init__(self, most=9):
        self.most = most

    def reset(self, number=0):
        self.number = number
        return f"a number from 0 to {self.most}", {}

    async def step(self, text):
        guess = int(text)
        if guess == self.number:
            return "right", 1.0, True, False, {}
        return ("higher" if guess < self.number else "lower"), -0.1, False, False, {}

    def close(self):
        Guess.closed.append(self.number)
"""


def test_what_reset_says_ends_the_prompt_and_steps_answer(
    run_row: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "guess.py").write_text(GUESS)
    listed = (
        f"  - name: guess\n    class_name: {tmp_path / 'guess.py'}:Guess\n    config: {{most: 5}}\n"
    )
    prompt, response, fields = run_row(listed, ["3", "4", "never"], name="guess", number=4)
    assert "u:Guess" in prompt
    assert "u:a number from 0 to 5" in prompt
    assert response == "3</s>\nu:higher\na:4</s>"
    assert fields["turn_scores"] == [-0.1, 1.0]
    assert fields["reward_scores"] == {"guess": pytest.approx(0.9)}
    assert [r["token"] for r in fields["turn_rewards"]] == [1, 15]


@pytest.mark.parametrize("limit", ["max_assistant_turns=2", "max_user_turns=1"])
def test_the_turn_at_a_limit_is_a_step_too_and_its_reward_counts(
    run_row: Callable[..., Any], tmp_path: Path, limit: str
) -> None:
    (tmp_path / "guess.py").write_text(GUESS)
    listed = f"  - name: guess\n    class_name: {tmp_path / 'guess.py'}:Guess\n"
    limit = f"actor_rollout_ref.rollout.multi_turn.{limit}"
    for second, rewards in (("4", [-0.1, 1.0]), ("2", [-0.1, -0.1])):
        row = {"name": "guess", "number": 4}
        _, response, fields = run_row(listed, ["3", second, "never"], limit, **row)
        assert response == f"3</s>\nu:higher\na:{second}</s>"
        assert fields["turn_scores"] == rewards
        assert fields["reward_scores"] == {"guess": pytest.approx(sum(rewards))}


DECORATED = """
import functools


def logged(method):
    @functools.wraps(method)
    def call(*arguments, **options):
        return method(*arguments, **options)

    return call


class Decorated:
    @logged
    async def reset(self, **options):
        return "look"

    @logged
    async def step(self, text):
        return "", 1.0, True
"""


def test_async_methods_may_be_decorated_by_plain_functions(
    run_row: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "decorated.py").write_text(DECORATED)
    listed = f"  - name: it\n    class_name: {tmp_path / 'decorated.py'}:Decorated\n"
    prompt, _, fields = run_row(listed, ["x", "never"], name="it")
    assert "u:look" in prompt
    assert (fields["reward_scores"], fields["tool_failures"]) == ({"it": 1.0}, 0)


TALKS = """
class Talks:
    def reset(self, text="", times=1):
        return text * times

    def step(self, text):
        return text, 1.0, False


async def say(self, instance_id=None, first=None, **kwargs):
    return instance_id, first
"""


@pytest.fixture
def talks(tmp_path: Path) -> str:
    (tmp_path / "talks.py").write_text(TALKS)
    return f"  - name: talks\n    class_name: {tmp_path / 'talks.py'}:Talks\n"


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize("truncation", ["error", "right"])
@pytest.mark.parametrize("times", [30, 300_000])
def test_a_first_observation_that_does_not_fit_is_truncated_and_counted(
    run_row: Callable[..., Any], talks: str, side: str, truncation: str, times: int
) -> None:
    prompt, _, fields = run_row(
        talks,
        ["x"],
        "data.max_prompt_length=100",
        f"data.truncation={truncation}",
        f"actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side={side}",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=1",
        name="talks",
        text="0123456789",
        times=times,
    )
    assert prompt.startswith("u:Guess\nu:")  # the template and the row's own prompt stay whole
    assert prompt.endswith("\na:")
    assert len(prompt) == 100
    assert fields["env/truncated_observations"] == 1
    assert fields["tool_failures"] == 0


def test_an_observation_that_fits_is_not_touched(run_row: Callable[..., Any], talks: str) -> None:
    limit = "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=1"
    prompt, _, fields = run_row(talks, ["x"], limit, name="talks", text="look", times=3)
    assert prompt == "u:Guess\nu:looklooklook\na:"
    assert fields["env/truncated_observations"] == 0


def test_prompts_of_plain_text_and_templates_of_alternate_turns_take_an_observation(
    run_row: Callable[..., Any], talks: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=1"
    raw = "data.prompt_format=raw"
    prompt, _, _ = run_row(talks, ["x"], limit, raw, prompt="Guess", name="talks", text="look")
    assert prompt == "Guess\nlook\n"
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns alternate') }}{% endif %}{{ m.role[0] + ':' + m.content + '|' }}"
        "{% endfor %}a:"
    )
    monkeypatch.setattr(tokenizer, "chat_template", strict)
    prompt, _, fields = run_row(talks, ["x"], limit, name="talks", text="look")
    assert prompt == "u:Guess\n\nlook|a:"
    assert fields["tool_failures"] == 0


def test_text_that_a_template_refuses_ends_the_talk_and_is_counted(
    run_row: Callable[..., Any], talks: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    picky = (
        "{% for m in messages %}{% if 'bad' in m.content %}"
        "{{ raise_exception('bad words') }}{% endif %}"
        "{{ m.role[0] + ':' + m.content + '|' }}{% endfor %}a:"
    )
    monkeypatch.setattr(tokenizer, "chat_template", picky)
    prompt, response, fields = run_row(talks, ["x", "never"], name="talks", text="bad")
    assert (prompt, response) == ("u:Guess|a:", "x</s>")
    assert fields["tool_failures"] == 1
    _, response, fields = run_row(talks, ["bad", "never"], name="talks", text="good")
    assert response == "bad</s>"
    assert fields["tool_failures"] == 1


@pytest.mark.parametrize(
    "kwargs",
    [{"first": None}, {"first": 5}, {"first": ["a"]}, {"function": "x"}, {"instance_id": "x"}],
    ids=str,
)
def test_a_start_that_is_no_start_is_a_failure_of_its_trajectory(
    run_row: Callable[..., Any], tmp_path: Path, kwargs: dict[str, Any]
) -> None:
    (tmp_path / "odd.py").write_text(
        "from hone.agents.interactions.contract import BaseInteraction\n"
        f"{TALKS}\n\nclass Odd(BaseInteraction):\n    start_interaction = say\n"
    )
    listed = f"  - name: odd\n    class_name: {tmp_path / 'odd.py'}:Odd\n"
    _, response, fields = run_row(listed, ["x", "never"], name="odd", **kwargs)
    assert response == "x</s>"
    assert fields["tool_failures"] >= 1


def test_an_environment_that_fails_ends_the_talk(
    run_row: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "guess.py").write_text(GUESS)
    listed = f"  - name: guess\n    class_name: {tmp_path / 'guess.py'}:Guess\n"
    _, response, fields = run_row(listed, ["not a number", "never"], name="guess")
    assert response == "not a number</s>"
    assert fields["tool_failures"] == 1


def test_results_are_read_in_every_usual_form() -> None:
    typed = SimpleNamespace(observation=SimpleNamespace(text="hi"), reward=None, done=True)
    assert _parse_step(("a", 1, False)) == ("a", 1.0, False)
    assert _parse_step(("a", None, True, {})) == ("a", 0.0, True)
    assert _parse_step(("a", 1, False, True, {})) == ("a", 1.0, True)
    observation, reward, done = _parse_step(typed)
    assert (_observation_text(observation), reward, done) == ("hi", 0.0, True)
    assert _observation_text({"board": [1]}) == '{"board": [1]}'
    with pytest.raises(ToolError, match="step returned 2 values"):
        _parse_step(("a", 1))


def test_a_data_set_of_reasoning_gym_is_an_environment_by_its_name(
    run_row: Callable[..., Any],
) -> None:
    gym = pytest.importorskip("reasoning_gym", reason="pip install 'hone-rl[gym]'")
    entry = gym.create_dataset("basic_arithmetic", size=500, seed=42)[3]
    name = "reasoning_gym:basic_arithmetic"
    prompt, _, fields = run_row(f"  - name: {name}\n", [entry["answer"]], name=name, index=3)
    assert entry["question"] in prompt
    assert fields["reward_scores"] == {name: 1.0}


OPENENV_SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Say(Action):
    message: str

class Heard(Observation):
    text: str

class Parrot(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, word="hi", **kwargs):
        self.word = word
        return Heard(text=f"say {word}", done=False, reward=0.0)

    def step(self, action, **kwargs):
        right = action.message == self.word
        return Heard(text="again", done=right, reward=float(right))

    @property
    def state(self):
        return State()

uvicorn.run(create_app(Parrot, Say, Heard, max_concurrent_envs=4), port=int(sys.argv[1]), log_level="error")
"""


@pytest.mark.slow
def test_a_server_of_openenv_is_an_environment(run_row: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("openenv.core.env_server", reason="pip install openenv-core fastmcp")
    (tmp_path / "server.py").write_text(OPENENV_SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(tmp_path / "server.py"), str(port)])
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        listed = (
            "  - name: parrot\n    class_name: hone.agents.interactions.environment.OpenEnvEnvironment\n"
            f"    config: {{base_url: 'http://127.0.0.1:{port}'}}\n"
        )
        prompt, response, fields = run_row(listed, ["no", "ho", "never"], name="parrot", word="ho")
    finally:
        process.kill()
        process.wait()
    assert "u:say ho" in prompt
    assert "no</s>\nu:again\na:ho" in response
    assert fields["turn_scores"] == [0.0, 1.0]


class Resettable(BaseInteraction):
    def reset(self) -> None: ...

    def step(self) -> None: ...


def test_an_interaction_with_methods_of_these_names_stays_an_interaction(tmp_path: Path) -> None:
    file = tmp_path / "interactions.yaml"
    file.write_text(f"interaction:\n  - class_name: {__name__}.Resettable\n    name: mine\n")
    interaction = initialize_interactions_from_config(str(file))["mine"]
    assert type(interaction).__name__ == "Resettable"


def test_an_environment_that_cannot_reset_is_closed() -> None:
    closed = []

    class Broken:
        def reset(self) -> None:
            raise OSError("no server")

        def close(self) -> None:
            closed.append(self)

    with pytest.raises(OSError, match="no server"):
        asyncio.run(EnvironmentInteraction(Broken, {}).start_interaction())
    assert closed


def test_an_environment_that_is_made_after_the_deadline_is_closed() -> None:
    may_be_made, closed = threading.Event(), threading.Event()

    class Slow:
        def __init__(self) -> None:
            may_be_made.wait(60)

        def close(self) -> None:
            closed.set()

    async def start() -> None:
        with pytest.raises(DeadlineExceeded):
            await run_with_deadline(EnvironmentInteraction(Slow, {}).start_interaction("i"), 0.05)

    asyncio.run(start())
    may_be_made.set()
    assert closed.wait(60)
