"""vLLM passes the contract tests, and no token or weight is lost if its process dies.

The contract runs over vLLM itself (`make test-vllm`); deaths, routes and updates over a fake of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from hone.agents.loop_thread import run_with_engine
from hone.event_loop import run_coroutine
from hone.rollout.contract import (
    RolloutEngine,
    RolloutError,
    Sampling,
    StopReason,
    TokenDelta,
    TokenOutput,
)
from hone.rollout.requests import Request, RequestRules
from hone.rollout.vllm import VLLMRollout
from hone.rollout.vllm_process import EngineProcess, LaunchArguments

from . import (  # noqa: F401
    clauses_control,
    clauses_failure,
    clauses_kept,
    clauses_lifecycle,
    clauses_model,
    clauses_sampling,
    models,
)
from .engine_contract import CLAUSES, Violation, play, verify
from .engine_contract import update as contract_update
from .factories import NativeFactory
from .test_vllm_process import fake_python
from .vllm_factory import SharedVLLM, VLLMFactory, vllm

APPLY = [name for name, clause in CLAUSES.items() if clause.applies(VLLMFactory())]


@vllm
@pytest.mark.usefixtures("heads_of_32_numbers")
@pytest.mark.parametrize("name", APPLY)
def test_contract(name: str) -> None:
    verify(name, VLLMFactory())


@vllm
@pytest.mark.usefixtures("heads_of_32_numbers")
def test_a_prefill_over_several_steps_gets_the_draws_of_its_seed() -> None:
    """The process takes 64 tokens per step; native draws the same tokens."""
    model = models.policy()
    prompts = models.prompts(3, 150, 200)
    sampling = [Sampling(12, 1.0, seed, ignore_eos=True) for seed in (-1, 7, 2**63 - 1)]

    async def sampled(engine: RolloutEngine) -> list[list[int]]:
        jobs = [
            engine.generate(prompt, one, str(one.seed))
            for prompt, one in zip(prompts, sampling, strict=True)
        ]
        return [out.token_ids for out in await asyncio.gather(*jobs)]

    outputs = []
    for factory in (VLLMFactory(), NativeFactory()):
        engine = factory.build(model)
        outputs.append(run_with_engine(engine, sampled(engine)))
        run_coroutine(engine.close())
    assert outputs[0] == outputs[1]


def test_only_clauses_that_look_into_the_engine_are_left_out() -> None:
    probes = {"memory", "prefill"}  # vLLM does not have these probes
    assert not [n for n, c in CLAUSES.items() if n not in APPLY and not c.needs & probes]


# -- broken engines over vLLM ------------------------------------------------------------------


class _Altered(SharedVLLM):
    """Sends vLLM other settings than the request has."""

    changes: ClassVar[Mapping[str, float]]

    def _backend_stream(self, request: Request, sampling: Sampling) -> Any:
        return super()._backend_stream(request, replace(sampling, **self.changes))


class SeedIgnored(_Altered):
    changes: ClassVar = {"seed": 0}


class TopKIgnored(_Altered):
    changes: ClassVar = {"top_k": -1}


class MinPIgnored(_Altered):
    changes: ClassVar = {"min_p": 0.0}


class TemperatureIgnored(_Altered):
    changes: ClassVar = {"temperature": 1.0}


class PauseOfThisSideOnly(SharedVLLM):
    """vLLM continues to sample while the weights change."""

    async def _backend_pause(self) -> None: ...


class PauseForgetsWhatItKeeps(SharedVLLM):
    async def pause(self, keep: bool = False) -> None:
        await super().pause()


class VersionStaysBehind(SharedVLLM):
    def _append(self, request: Any, chunk: Any) -> None:
        before = len(request.versions)
        super()._append(request, chunk)
        request.versions[before:] = [max(v - 1, 0) for v in request.versions[before:]]


class LastTensorIsDropped(SharedVLLM):
    async def _load(self, weights: Any) -> None:
        await super()._load(list(weights)[:-1])
        self._loaded_names = set(self._parameters)


class OldWeightsStay(SharedVLLM):
    async def _load(self, weights: Any) -> None:
        if self._must_restore:
            self._loaded_names = {name for name, _ in weights} | self._loaded_names
        else:
            await super()._load(weights)


class UnknownTensorsAreSkipped(SharedVLLM):
    async def load(self, weights: Any) -> None:
        known = [(n, t) for n, t in weights if n in self._parameters]
        await super().load([(n, t) for n, t in known if t.shape == self._parameters[n].shape])
        self._loaded_names = set(self._parameters)


class EndTokensAreNotSent(SharedVLLM):
    def __init__(self, model: Any, max_num_seqs: int) -> None:
        super().__init__(model, max_num_seqs)
        self._rules = RequestRules.of(model.lm.config, (), models.TOKENIZER)


class KeepsStaleKeys(SharedVLLM):
    def __init__(self, model: Any, max_num_seqs: int) -> None:
        super().__init__(model, max_num_seqs)
        self._keep_stale_kv = True


class PriorityIgnored(SharedVLLM):
    async def _decode_request(self, request: Request) -> TokenOutput:
        return await super()._decode_request(replace(request, priority=0))


class AbortEndsEveryRequest(SharedVLLM):
    async def abort(self, request_ids: Any = None) -> None:
        await super().abort(None)


MUTANTS = [
    (SeedIgnored, "different seeds differ and the same seed repeats"),
    (TopKIgnored, "top k keeps the k likeliest"),
    (MinPIgnored, "min p keeps what is likely beside the likeliest"),
    (TemperatureIgnored, "log probs are the trainers"),
    (PauseOfThisSideOnly, "pause with keep goes on where it stood"),
    (PauseForgetsWhatItKeeps, "pause with keep goes on where it stood"),
    (VersionStaysBehind, "a kept request takes new weights from its next token"),
    (LastTensorIsDropped, "new weights are used from the next token"),
    (OldWeightsStay, "new weights are used from the next token"),
    (UnknownTensorsAreSkipped, "weights with unknown names are refused"),
    (EndTokensAreNotSent, "the end token ends a response unless ignored"),
    (KeepsStaleKeys, "after a commit kept requests attend only to keys of the new weights"),
    (PriorityIgnored, "the lowest priority starts first and ties by arrival"),
    (AbortEndsEveryRequest, "abort ends the named requests alone"),
]


def test_every_mutant_overrides_a_method_of_the_engine() -> None:
    """A mutant whose method nobody calls would break nothing."""
    for mutant, _ in MUTANTS:
        classes = mutant.__mro__[: mutant.__mro__.index(SharedVLLM)]
        methods = [n for c in classes for n, value in vars(c).items() if callable(value)]
        assert methods
        assert all(hasattr(SharedVLLM, name) for name in methods), mutant


@vllm
@pytest.mark.usefixtures("heads_of_32_numbers")
@pytest.mark.parametrize(("mutant", "name"), MUTANTS, ids=[m.__name__ for m, _ in MUTANTS])
def test_the_contract_names_the_clause_a_mutant_breaks(mutant: type[SharedVLLM], name: str) -> None:
    class Factory(VLLMFactory):
        engine_class = mutant

    with pytest.raises(Violation, match=f"^{name}: "):
        verify(name, Factory())


@vllm
@pytest.mark.usefixtures("heads_of_32_numbers")
def test_no_later_request_shares_stale_keys_that_are_kept() -> None:
    class Factory(VLLMFactory):
        engine_class = KeepsStaleKeys

    new = models.policy(seed=1)
    prompt = models.prompts(1, 300, 300)[0]  # two blocks of vLLM's cache on a CPU
    with Factory().engine(models.policy()) as engine:

        async def outputs() -> list[TokenOutput]:
            with Factory().slow_motion():
                running = clauses_control.Watched(engine, prompt, LONG, "kept")
                await running.in_progress()
                await engine.pause(keep=True)
            await contract_update(engine, new.lm.named_parameters(), 1)
            await engine.resume()
            sampling = replace(LONG, max_tokens=8)
            first = await engine.generate(prompt, sampling, "first")
            second = await engine.generate(prompt, sampling, "second")
            return [await running.job, first, second]

        kept, first, second = play(outputs())
    assert set(kept.versions) == {0, 1}
    expected = models.trainer_log_probs(new, prompt, first.token_ids, 1.0)
    assert first.cached_tokens == 0 < (second.cached_tokens or 0)
    for out in (first, second):
        assert out.log_probs == pytest.approx(expected, abs=1e-4)


# -- deaths, updates and routes, over the fake -------------------------------------------------

LONG = Sampling(max_tokens=80, temperature=1.0, seed=7, ignore_eos=True)
SHAPES = {"shift": torch.zeros(1), "other": torch.zeros(300)}


def weights(shift: int) -> list[tuple[str, Tensor]]:
    return [("other", torch.zeros(300)), ("shift", torch.full((1,), float(shift)))]


def expected_tokens(prompt: list[int], shift: int = 0, count: int = 80) -> list[int]:
    return [(len(prompt) + i + shift) % 90 for i in range(count)]


def with_engine(
    folder: Path,
    work: Callable[[VLLMRollout], Awaitable[None]],
    *,
    processes: int = 1,
    environment: dict[str, str] | None = None,
    **options: Any,
) -> None:
    launch = LaunchArguments(fake_python(folder), {"model": "m"}, environment or {})
    engine = VLLMRollout(
        [EngineProcess(launch) for _ in range(processes)],
        RequestRules(frozenset({89}), vocab_size=90),
        SHAPES,
        bucket_bytes=512,
        device=torch.device("cpu"),
        **options,
    )

    async def run() -> None:
        try:
            await engine.start()
            await asyncio.wait_for(work(engine), 200)
        finally:
            await engine.close()

    asyncio.run(run())


def gated(folder: Path, after: int = 40) -> dict[str, str]:
    """The environment in which requests wait for `open_gate` after so many tokens of a process."""
    return {"FAKE_VLLM_GATE": str(folder / "gate"), "FAKE_VLLM_TOKENS": str(after)}


def open_gate(folder: Path) -> None:
    (folder / "gate").touch()


async def sampling(engine: VLLMRollout, count: int) -> None:
    """Waits until so many requests have tokens."""
    while sum(bool(r.request.token_ids) for r in list(engine._running)) < count:
        await asyncio.sleep(0.001)


async def update(engine: VLLMRollout, shift: int, version: int) -> None:
    await engine.begin_update()
    await engine.load(weights(shift))
    await engine.commit(version)


def test_ten_deaths_in_one_request_lose_no_token(tmp_path: Path) -> None:
    async def work(engine: VLLMRollout) -> None:
        await update(engine, 5, 3)
        (process,) = engine._processes
        deaths = 0

        def kill(delta: TokenDelta) -> None:
            nonlocal deaths
            count = sum(len(d.token_ids) for d in [*deltas, delta])
            deltas.append(delta)
            if deaths < 10 and count > 6 * deaths:
                deaths += 1
                process.kill()
                if deaths == 10:
                    open_gate(tmp_path)

        deltas: list[TokenDelta] = []
        jobs = [engine.generate([1, 2], LONG, "killed", on_tokens=kill)]
        jobs += [engine.generate([3] * i, LONG, f"beside {i}") for i in (1, 2, 3)]
        first, *others = await asyncio.gather(*jobs)
        assert deaths == 10
        assert first.token_ids == expected_tokens([1, 2], 5)
        assert first.token_ids == [t for delta in deltas for t in delta.token_ids]
        assert first.versions == [3] * 80
        for i, out in enumerate(others, 1):
            assert out.token_ids == expected_tokens([3] * i, 5)

    # A process samples few tokens, so that the request does not end before the last death.
    with_engine(tmp_path, work, environment=gated(tmp_path, after=7))


@pytest.mark.parametrize("source", ["host copy", "trainer"])
def test_a_new_process_gets_the_current_weights(tmp_path: Path, source: str) -> None:
    current = {"shift": 0}

    async def work(engine: VLLMRollout) -> None:
        for version, shift in enumerate((4, 9), 1):
            current["shift"] = shift
            await update(engine, shift, version)
            engine._processes[0].kill()
            out = await engine.generate([1], LONG, f"after {version}")
            assert out.token_ids == expected_tokens([1], shift)
            assert out.versions == [version] * 80
        assert bool(engine._host_copy) == (source == "host copy")

    options = {"current_weights": lambda: weights(current["shift"])} if source == "trainer" else {}
    with_engine(tmp_path, work, **options)


@pytest.mark.parametrize("when", ["before", "while loading", "before commit"])
def test_a_death_in_an_update_does_not_end_it(tmp_path: Path, when: str) -> None:
    async def work(engine: VLLMRollout) -> None:
        (process,) = engine._processes
        running = asyncio.ensure_future(engine.generate([1, 2], LONG, "kept"))
        await sampling(engine, 1)
        await engine.pause(keep=True)
        open_gate(tmp_path)

        async def kill() -> None:
            child = process._child
            process.kill()
            while process.serving and process._child is child:
                await asyncio.sleep(0.001)

        if when == "before":
            await kill()
        await engine.begin_update()
        first, second = weights(6)
        await engine.load([first])
        if when == "while loading":
            await kill()
        await engine.load([second])
        if when == "before commit":
            await kill()
        await engine.commit(1)
        await engine.resume()
        out: TokenOutput = await running
        old = out.versions.count(0)
        assert 0 < old < 80
        assert out.versions == [0] * old + [1] * (80 - old)
        assert out.token_ids == expected_tokens([1, 2], 0, old) + expected_tokens([1, 2], 6)[old:]

    with_engine(tmp_path, work, environment=gated(tmp_path))


def test_an_update_that_begins_again_and_one_that_lacks_tensors(tmp_path: Path) -> None:
    async def work(engine: VLLMRollout) -> None:
        await engine.begin_update()
        await engine.load(weights(3)[:1])
        with pytest.raises(RolloutError, match="lacks 1, for example 'shift'"):
            await engine.commit(1)
        await update(engine, 8, 2)  # a new update
        assert (await engine.generate([1], LONG, "r")).token_ids == expected_tokens([1], 8)

    with_engine(tmp_path, work)


def test_a_process_that_dies_without_a_token_is_given_up(tmp_path: Path) -> None:
    async def work(engine: VLLMRollout) -> None:
        (process,) = engine._processes
        process._launch = LaunchArguments(
            process._launch.python, {"model": "m"}, {"PYTHONHOME": "/nowhere"}
        )
        process.kill()
        with pytest.raises(RolloutError, match="ended 3 times without a token"):
            await engine.generate([1], LONG, "r")

    with_engine(tmp_path, work)


def test_an_interpreter_that_cannot_run_vllm_says_so_at_the_start(tmp_path: Path) -> None:
    async def nothing(engine: VLLMRollout) -> None: ...

    with pytest.raises(RolloutError, match="vLLM did not start: vLLM has ended"):
        with_engine(tmp_path, nothing, environment={"PYTHONHOME": "/nowhere"})


def test_a_trajectory_and_a_prompt_stay_on_their_process(tmp_path: Path) -> None:
    async def work(engine: VLLMRollout) -> None:
        loads: list[tuple[int, int]] = []

        async def turn(prompt: list[int], name: str) -> None:
            await engine.generate(prompt, LONG, name)

        groups = [asyncio.ensure_future(turn([g], f"{g}-{i}")) for g in (1, 2) for i in range(4)]
        await sampling(engine, 8)
        loads.append(tuple(p.num_open_requests for p in engine._processes))  # type: ignore[arg-type]
        open_gate(tmp_path)
        await asyncio.gather(*groups)
        targets = engine._router.target_by_key
        where = {key: process.pid for key, process in targets.items() if isinstance(key, str)}
        await turn([1, 5, 5], "2-0")  # a later turn
        assert loads == [(4, 4)]
        for g in (1, 2):
            assert len({where[f"{g}-{i}"] for i in range(4)}) == 1
        assert targets["2-0"].pid == where["2-0"]
        (tmp_path / "gate").unlink()
        same = [asyncio.ensure_future(turn([9], f"9-{i}")) for i in range(24)]
        await sampling(engine, 24)
        open_gate(tmp_path)
        await asyncio.gather(*same)
        spread = Counter(targets[f"9-{i}"].pid for i in range(24))
        assert min(spread[process.pid] for process in engine._processes) >= 4, (
            "one prompt filled one process"
        )

    with_engine(tmp_path, work, processes=2, environment=gated(tmp_path))


def test_both_processes_get_new_weights_and_one_death_is_enough(tmp_path: Path) -> None:
    async def work(engine: VLLMRollout) -> None:
        await update(engine, 2, 1)
        engine._processes[1].kill()
        await update(engine, 7, 2)
        outs = await asyncio.gather(*(engine.generate([i], LONG, f"{i}") for i in range(4)))
        assert [out.token_ids for out in outs] == [expected_tokens([1], 7)] * 4

    with_engine(tmp_path, work, processes=2)


def test_a_process_that_dies_while_another_commits_gets_the_new_weights(tmp_path: Path) -> None:
    async def work(engine: VLLMRollout) -> None:
        first, second = engine._processes
        call = second.call
        jobs = [asyncio.ensure_future(engine.generate([g], LONG, f"{g}")) for g in (1, 2)]
        await sampling(engine, 2)
        assert (first.num_open_requests, second.num_open_requests) == (1, 1)
        await engine.pause(keep=True)
        open_gate(tmp_path)

        async def after_a_death(verb: str, **arguments: object) -> object:
            if verb == "finish":
                first.kill()
                for state in (False, True):  # the request of the dead process restarts it
                    while first.serving is not state:
                        await asyncio.sleep(0.005)
            return await call(verb, **arguments)

        second.call = after_a_death  # type: ignore[method-assign]
        await update(engine, 6, 1)
        await engine.resume()
        for out in await asyncio.gather(*jobs):
            old = out.versions.count(0)
            assert 0 < old < 80
            assert out.token_ids == expected_tokens([1], 0, old) + expected_tokens([1], 6)[old:]

    with_engine(tmp_path, work, processes=2, environment=gated(tmp_path))


def test_abort_and_close_do_not_wait_for_a_process_that_starts_again(tmp_path: Path) -> None:
    async def work(engine: VLLMRollout) -> None:
        (process,) = engine._processes
        jobs = [asyncio.ensure_future(engine.generate([1], LONG, name)) for name in ("a", "b")]
        await sampling(engine, 2)
        process._launch = LaunchArguments(process._launch.python, {"model": "slow"}, {})
        child = process._child
        process.kill()
        while not process.alive or process._child is child:
            await asyncio.sleep(0.005)
        await engine.abort(["a"])
        out = await asyncio.wait_for(jobs[0], 60)
        assert out.stop_reason is StopReason.ABORT
        assert 0 < len(out.token_ids) < 80
        await asyncio.wait_for(engine.close(), 60)
        assert (await jobs[1]).stop_reason is StopReason.ABORT
        assert not process.alive

    with_engine(tmp_path, work, environment=gated(tmp_path))


def test_requests_wait_for_no_sleeping_engine(tmp_path: Path) -> None:
    async def work(engine: VLLMRollout) -> None:
        running = asyncio.ensure_future(engine.generate([1], LONG, "r"))
        await sampling(engine, 1)
        with pytest.raises(RolloutError, match="while requests run"):
            await engine.sleep()
        open_gate(tmp_path)
        await running
        await engine.sleep()
        assert (await engine.generate([1], LONG, "s")).token_ids == expected_tokens([1])

    with_engine(tmp_path, work, environment=gated(tmp_path))


def test_kept_requests_outlive_a_sleep(tmp_path: Path) -> None:
    async def work(engine: VLLMRollout) -> None:
        engine._choose_sleep_level = lambda: 1  # type: ignore[method-assign]
        running = asyncio.ensure_future(engine.generate([1], LONG, "r"))
        await sampling(engine, 1)
        await engine.pause(keep=True)
        open_gate(tmp_path)
        await engine.sleep()
        await engine.wake_up()
        await engine.resume()
        assert (await asyncio.wait_for(running, 60)).token_ids == expected_tokens([1])

    with_engine(tmp_path, work, environment=gated(tmp_path))


@pytest.mark.parametrize("publish", [True, False])
def test_weights_given_back_in_sleep_come_once_on_waking(tmp_path: Path, publish: bool) -> None:
    """The next update restores them, or `wake_up` with the weights of the trainer."""

    async def work(engine: VLLMRollout) -> None:
        engine._choose_sleep_level = lambda: 2  # type: ignore[method-assign]
        buckets: list[Any] = []
        (process,) = engine._processes
        call = process.call

        async def counted(verb: str, **arguments: Any) -> object:
            if verb == "load":
                buckets.append(arguments["bucket"])
            return await call(verb, **arguments)

        await update(engine, 5, 1)
        await engine.sleep()
        process.call = counted  # type: ignore[method-assign]
        if publish:
            await update(engine, 6, 2)
        await engine.wake_up()
        assert (await engine.generate([1], LONG, "r")).token_ids == expected_tokens(
            [1], 6 if publish else 5
        )
        assert len(buckets) == 2

    with_engine(tmp_path, work, current_weights=lambda: weights(5))


def test_temperatures_that_vllm_would_raise_are_refused(tmp_path: Path) -> None:
    async def work(engine: VLLMRollout) -> None:
        with pytest.raises(RolloutError, match=r"request r: vLLM raises temperature=0.001 to 0.01"):
            await engine.generate([1], Sampling(4, 0.001, 0), "r")

    with_engine(tmp_path, work)
