"""The loop runner: seeds, order, the loop of a row, and bad loops."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from hone.agents.contract import LOOPS, AgentLoopBase, AgentLoopOutput, SingleTurnAgentLoop
from hone.agents.runner import AgentLoopFailed, LoopRunner
from hone.event_loop import run_with_deadline
from hone.ops.counter_rng import fold_seed
from hone.plugins import PluginError
from hone.protocol import DataProto
from hone.rollout.scripted import ScriptedRollout

Rows = Callable[..., DataProto]
Runner = Callable[..., LoopRunner]


class FixedLoop(AgentLoopBase):
    """Returns an output without the engine; each test sets it."""

    def __init__(self, *arguments: Any, text: str = "mine", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.text = text

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        ids = self.tokenizer.encode(self.text, add_special_tokens=False)
        return AgentLoopOutput(self.prompt_ids(row), ids, [1] * len(ids), num_turns=2)


class BadLoop(AgentLoopBase):
    """Returns the output in the row."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        return AgentLoopOutput(**{"prompt_ids": [5], **row["output"]})


class SlowOrRaising(AgentLoopBase):
    ended: list[str] = []  # noqa: RUF012

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        if row["uid"] == "u1":
            await asyncio.sleep(0.01)
            raise KeyError("no such tool")
        try:
            await asyncio.sleep(30)
        finally:
            self.ended.append(row["uid"])
        raise AssertionError("was not cancelled")


def register_loop(name: str) -> str:
    """Registers a loop of this file and returns its name."""
    LOOPS.add(f"{__file__}:{name}", f"{__file__}:{name}")
    return f"{__file__}:{name}"


def decode(tokenizer: Any, batch: DataProto) -> list[str]:
    return [
        tokenizer.decode(ids[mask.bool()])
        for ids, mask in zip(batch.batch["responses"], batch.batch["response_mask"], strict=True)
    ]


@pytest.fixture
def echo(tokenizer: Any) -> ScriptedRollout:
    """An engine that answers with the reversed prompt."""
    return ScriptedRollout(lambda p: tokenizer.decode(p)[::-1], tokenizer=tokenizer)


def test_outputs_stand_in_the_order_of_the_rows(
    runner: Runner, rows: Rows, echo: ScriptedRollout, tokenizer: Any
) -> None:
    """Short and long answers finish at different times."""
    batch = runner(echo).run(rows(["abcdefgh", "a", "xyz", "12345"]))
    assert decode(tokenizer, batch) == ["hgfedcba</s>", "a</s>", "zyx</s>", "54321</s>"]
    assert list(batch.non_tensor_batch["stop_reason"]) == ["stop"] * 4


def test_a_seed_is_folded_from_run_seed_uid_and_sample_index(
    runner: Runner, rows: Rows, echo: ScriptedRollout
) -> None:
    data = rows(["a", "a", "b"], uid=["p", "p", "q"], sample_index=[0, 1, 0])
    runner(echo, run_seed=7).run(data)
    seeds = [r.sampling.seed for r in echo.requests]
    assert seeds == [fold_seed(7, "p", 0), fold_seed(7, "p", 1), fold_seed(7, "q", 0)]
    assert len(set(seeds)) == 3


def test_a_rows_seed_does_not_depend_on_its_neighbours(
    runner: Runner, rows: Rows, tokenizer: Any
) -> None:
    def seeds(uids: list[str]) -> dict[str, int]:
        engine = ScriptedRollout(lambda p: "x", tokenizer=tokenizer)
        runner(engine).run(rows(uids, uid=uids))
        return {tokenizer.decode(r.prompt_ids): r.sampling.seed for r in engine.requests}

    assert seeds(["p", "q", "r"])["q"] == seeds(["q"])["q"] == seeds(["r", "q"])["q"]


def test_sampling_parameters_and_the_length_limit_reach_the_engine(
    runner: Runner, rows: Rows, echo: ScriptedRollout
) -> None:
    sampling = {"temperature": 0.3, "top_k": 5, "stop": ("#",), "max_tokens": 99}
    runner(echo).run(rows(["a"], sampling=sampling))
    sampling = echo.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.stop) == (0.3, 5, ("#",))
    assert sampling.max_tokens == 12


def test_each_row_goes_through_the_loop_it_names(
    runner: Runner, rows: Rows, echo: ScriptedRollout, tokenizer: Any
) -> None:
    data = rows(["ab", "ab"], agent_name=[register_loop("FixedLoop"), None])
    assert decode(tokenizer, runner(echo).run(data)) == ["mine", "ba</s>"]


def test_loops_listed_in_a_yaml_file_get_their_arguments(
    runner: Runner, rows: Rows, echo: ScriptedRollout, tokenizer: Any, tmp_path: Path
) -> None:
    listing = tmp_path / "loops.yaml"
    listing.write_text(
        f"- name: polite\n  _target_: {register_loop('FixedLoop')}\n  text: please\n"
        f"- name: curt\n  _target_: {register_loop('FixedLoop')}\n  text: nope\n"
    )
    key = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={listing}"
    data = rows(["a", "b", "c"], agent_name=["polite", "curt", "single_turn_agent"])
    assert decode(tokenizer, runner(echo, key).run(data)) == ["please", "nope", "c</s>"]


class WaitingLoop(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


def test_a_loop_that_waits_for_ever_is_ended_and_named(
    runner: Runner, rows: Rows, echo: ScriptedRollout
) -> None:
    data = rows(["a", "b"], agent_name=[None, register_loop("WaitingLoop")])
    with pytest.raises(AgentLoopFailed, match=r"1 of 2 .* not ended.*uid=u1.*phase_deadline_floor"):
        runner(echo, "trainer.phase_deadline_floor_s=3").run(data)


def test_a_misspelt_loop_is_told_the_listed_names_too(
    runner: Runner, rows: Rows, echo: ScriptedRollout, tmp_path: Path
) -> None:
    listing = tmp_path / "loops.yaml"
    listing.write_text(f"- name: polite\n  _target_: {register_loop('FixedLoop')}\n")
    key = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={listing}"
    with pytest.raises(
        PluginError, match=r"Did you mean 'polite'\? A row may name .*single_turn_agent"
    ):
        runner(echo, key).run(rows(["a"], agent_name=["polit"]))


def test_a_listed_loop_without_a_target_is_refused(
    runner: Runner, echo: ScriptedRollout, tmp_path: Path
) -> None:
    listing = tmp_path / "loops.yaml"
    listing.write_text("- name: polite\n")
    with pytest.raises(ValueError, match="every loop needs `name` and `_target_`"):
        runner(echo, f"actor_rollout_ref.rollout.agent.agent_loop_config_path={listing}")


def test_an_unknown_loop_proposes_the_nearest_name(
    runner: Runner, rows: Rows, echo: ScriptedRollout
) -> None:
    with pytest.raises(PluginError, match="Did you mean 'single_turn_agent'"):
        runner(echo).run(rows(["a"], agent_name=["single_turn_agnt"]))


@pytest.mark.parametrize(
    "name",
    [
        f"{__file__}:FixedLoop",
        "tests.agents.test_runner:BadLoop",
        "os:getcwd",
        5,
        0,
        ["x"],
        np.array(["x", "y"]),
    ],
)
def test_a_row_cannot_name_a_place_to_import_a_loop_from(
    runner: Runner, rows: Rows, echo: ScriptedRollout, name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOOPS, "entries", {"single_turn_agent": SingleTurnAgentLoop})
    monkeypatch.setattr("hone.plugins.load_module", _no_import)
    with pytest.raises(PluginError, match="agent_name"):
        runner(echo).run(rows(["a"], agent_name=[name]))


def _no_import(path: str) -> None:
    raise AssertionError(f"{path} was imported")


def test_a_row_may_name_the_default_loop_whatever_it_is_called(
    runner: Runner, rows: Rows, echo: ScriptedRollout, tokenizer: Any
) -> None:
    loop = f"{__file__}:FixedLoop"
    key = f"actor_rollout_ref.rollout.agent.default_agent_loop='{loop}'"
    batch = runner(echo, key).run(rows(["a", "b", "c"], agent_name=[loop, None, ""]))
    assert decode(tokenizer, batch) == ["mine"] * 3


def test_a_registered_loop_is_found_by_its_name(
    runner: Runner,
    rows: Rows,
    echo: ScriptedRollout,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LOOPS, "entries", dict(LOOPS.entries))  # forgotten after the test
    LOOPS.add("fixed_for_test", FixedLoop)
    batch = runner(echo).run(rows(["a"], agent_name=["fixed_for_test"]))
    assert decode(tokenizer, batch) == ["mine"]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"response_ids": [1, 2], "response_mask": [1]}, "2 response_ids but 1 response_mask"),
        (
            {"response_ids": [1], "response_mask": [1], "response_logprobs": [0.0, 0.0]},
            "1 response_ids but 2 response_logprobs",
        ),
        ({"response_ids": [1], "response_mask": [1], "versions": []}, "but 0 versions"),
        ({"response_ids": [], "response_mask": []}, "empty prompt or response"),
        ({"prompt_ids": [], "response_ids": [1], "response_mask": [1]}, "empty prompt or response"),
        ({"response_ids": [1], "response_mask": [2]}, "values other than 0, 1"),
        ({"response_ids": [-4], "response_mask": [1]}, "response_ids from -4 to -4"),
        (
            {"response_ids": [1], "response_mask": [1], "reward_score": float("nan")},
            "reward_score=nan",
        ),
        (
            {"response_ids": [1], "response_mask": [1], "extra_fields": {"uid": "x"}},
            "column 'uid' is a column of the data row",
        ),
        (
            {"response_ids": [1], "response_mask": [1], "metrics": {"tool_calls": None}},
            r"metrics\['tool_calls'\]=None",
        ),
    ],
)
def test_a_bad_output_is_refused_with_a_sentence(
    runner: Runner, rows: Rows, echo: ScriptedRollout, output: dict[str, Any], message: str
) -> None:
    data = rows(["a"], agent_name=[register_loop("BadLoop")], output=[output])
    with pytest.raises(AgentLoopFailed, match=message) as caught:
        runner(echo).run(data)
    assert "BadLoop" in str(caught.value)
    assert "uid=u0" in str(caught.value)


class Returns(AgentLoopBase):
    """Returns something other than an output."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        good = AgentLoopOutput([5], [1], [1])
        return {"nothing": None, "no_rows": [], "a_stranger": [good, "text"]}[row["kind"]]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nothing", "returned None"),
        ("no_rows", r"returned \[\]"),
        ("a_stranger", "returned 'text'"),
    ],
)
def test_what_is_no_output_is_refused_with_a_sentence(
    runner: Runner, rows: Rows, echo: ScriptedRollout, kind: str, message: str
) -> None:
    with pytest.raises(AgentLoopFailed, match=f"{message}; return an AgentLoopOutput, or a list"):
        runner(echo).run(rows(["a"], agent_name=[register_loop("Returns")], kind=[kind]))


def test_a_response_is_cut_at_the_limit_with_all_that_goes_with_it(
    runner: Runner, rows: Rows, echo: ScriptedRollout
) -> None:
    long = {
        "response_ids": list(range(3, 23)),
        "response_mask": [1, 0] * 10,
        "response_logprobs": [-0.5] * 20,
        "versions": list(range(20)),
    }
    batch = runner(echo).run(rows(["a"], agent_name=[register_loop("BadLoop")], output=[long]))
    assert batch.batch["responses"].tolist() == [list(range(3, 15))]
    assert batch.batch["response_mask"].tolist() == [[1, 0] * 6]
    assert batch.batch["rollout_log_probs"].tolist() == [[-0.5, 0.0] * 6]
    assert batch.non_tensor_batch["versions"][0] == list(range(12))


def test_a_loop_that_raises_names_its_row_and_cancels_the_others(
    runner: Runner, rows: Rows, echo: ScriptedRollout
) -> None:
    from hone.plugins import load_object

    loop = load_object(register_loop("SlowOrRaising"))
    loop.ended.clear()
    data = rows(["a", "b", "c"], agent_name=[register_loop("SlowOrRaising")] * 3)
    with pytest.raises(AgentLoopFailed, match=r"uid=u1 sample 0: KeyError: 'no such tool'"):
        runner(echo).run(data)
    assert sorted(loop.ended) == ["u0", "u2"]


class CannotBeCreated(AgentLoopBase):
    """Its tools do not load, which may take a minute each time."""

    attempts: ClassVar[list[str]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.attempts.append("attempt")
        raise ConnectionError("the server does not answer")

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        raise NotImplementedError


def test_a_loop_that_cannot_be_created_is_created_once_for_all_rows(
    runner: Runner, rows: Rows, echo: ScriptedRollout
) -> None:
    from hone.plugins import load_object

    loop = load_object(register_loop("CannotBeCreated"))
    loop.attempts.clear()
    data = rows(["a", "b", "c", "d"], agent_name=[register_loop("CannotBeCreated")] * 4)
    with pytest.raises(AgentLoopFailed, match=r"uid=u0 sample 0: ConnectionError: the server"):
        runner(echo).run(data)
    assert loop.attempts == ["attempt"]


def test_an_engines_refusal_reaches_the_row_that_caused_it(
    runner: Runner, rows: Rows, tokenizer: Any
) -> None:
    engine = ScriptedRollout(["one answer"], tokenizer=tokenizer)
    with pytest.raises(AgentLoopFailed, match=r"uid=u1 .* the script has no answer"):
        runner(engine).run(rows(["a", "b"]))


def test_what_loops_measured_is_summarised(
    runner: Runner, rows: Rows, echo: ScriptedRollout
) -> None:
    metrics = [{"tool_calls": 2}, {"tool_calls": 4}]
    outputs = [{"response_ids": [7], "response_mask": [1], "metrics": m} for m in metrics]
    batch = runner(echo).run(
        rows(["a", "b"], agent_name=[register_loop("BadLoop")] * 2, output=outputs)
    )
    summary = batch.meta_info["metrics"]
    names = [f"timing_s/agent_loop/tool_calls/{s}" for s in ("min", "max", "mean")]
    assert [summary[n] for n in names] == [2.0, 4.0, 3.0]


class CancelsItself(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        raise asyncio.CancelledError


def test_a_loop_that_cancels_itself_is_named(
    runner: Runner, rows: Rows, echo: ScriptedRollout
) -> None:
    data = rows(["a", "b"], agent_name=[None, register_loop("CancelsItself")])
    with pytest.raises(AgentLoopFailed, match=r"CancelsItself' failed on row uid=u1 .*cancelled"):
        runner(echo).run(data)


class Stubborn(AgentLoopBase):
    """On u0, awaits a call that ignores cancellation; on u1, fails meanwhile."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        if row["uid"] == "u1":
            await asyncio.sleep(0.05)
            raise KeyError("no such tool")
        await run_with_deadline(self.retries(), 0.01, grace_s=3600.0)
        raise AssertionError("it does not end")

    async def retries(self) -> None:
        while True:
            with contextlib.suppress(BaseException):
                await asyncio.sleep(3600)


def test_a_loop_that_fails_ends_a_run_whose_tool_swallows_its_cancellation(
    runner: Runner, rows: Rows, echo: ScriptedRollout
) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            data = rows(["a", "b"], agent_name=[register_loop("Stubborn")] * 2)
            runner(echo, "actor_rollout_ref.rollout.multi_turn.tool_timeout_s=0.1").run(data)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert [type(error) for error in errors] == [AgentLoopFailed]
    assert "uid=u1" in str(errors[0])


class Leaves(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        raise SystemExit(3)


def test_a_loop_that_exits_is_named(runner: Runner, rows: Rows, echo: ScriptedRollout) -> None:
    data = rows(["a", "b"], agent_name=[None, register_loop("Leaves")])
    with pytest.raises(AgentLoopFailed, match=r"Leaves' failed on row uid=u1 .*SystemExit: 3"):
        runner(echo).run(data)


def test_token_ids_beyond_the_models_vocabulary_name_the_loop(
    config: Callable[..., Any],
    rows: Rows,
    requests: Callable[..., Any],
    echo: ScriptedRollout,
    tokenizer: Any,
) -> None:
    output = {"response_ids": [5, 11], "response_mask": [1, 1]}
    data = rows(["a"], agent_name=[register_loop("BadLoop")], output=[output])
    runner_with_vocab = LoopRunner(config(), echo, tokenizer, run_seed=1, vocab_size=11)
    runner_with_vocab.submit(requests(data))
    with pytest.raises(AgentLoopFailed, match=r"BadLoop.* from 5 to 11; the model knows 0 to 10"):
        runner_with_vocab.run_until(lambda: False)


def test_a_column_of_the_row_that_a_loop_hands_through_is_not_written_again(
    runner: Runner, rows: Rows, echo: ScriptedRollout
) -> None:
    output = {"response_ids": [7], "response_mask": [1], "extra_fields": {"uid": "u0", "n": 3}}
    batch = runner(echo).run(rows(["a"], agent_name=[register_loop("BadLoop")], output=[output]))
    assert batch.non_tensor_batch["n"].tolist() == [3]
    assert "uid" not in batch.non_tensor_batch
