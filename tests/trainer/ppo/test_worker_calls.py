"""The loop calls workers by the verb that gives what the method's registration gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hone.trainer.ppo
from hone.controller import Dispatch, Execute, Worker
from hone.controller.decorator import MethodSpec, registered_methods
from hone.workers.actor import ActorWorker, ReferenceWorker
from hone.workers.critic import CriticWorker
from hone.workers.process_reward_model import ImplicitRewardModelWorker
from hone.workers.reward_model import RewardModelWorker
from hone.workers.rollout_worker import RolloutWorker
from hone.workers.train_worker import TrainWorker

WORKERS: dict[str, type[Worker]] = {
    cls.__name__: cls
    for cls in (
        ActorWorker,
        CriticWorker,
        ImplicitRewardModelWorker,
        ReferenceWorker,
        RewardModelWorker,
        RolloutWorker,
        TrainWorker,
    )
}
CALL = re.compile(r"\.(call|call_all|call_each|begin)\(\s*(\w+Worker)\.(\w+)")


def verb_of(spec: MethodSpec) -> str:
    mode = spec.dispatch_mode
    if not spec.blocking:
        return "begin"
    if mode.rank_zero_only or spec.execute_mode is Execute.RANK_ZERO:
        return "call"
    by_name = {Dispatch.DP_COMPUTE_PROTO: "call", Dispatch.DP_COMPUTE: "call_each"}
    return by_name.get(mode, "call_all")


def calls() -> list[tuple[str, str, str]]:
    folder = Path(hone.trainer.ppo.__file__).parent
    return sorted({call for file in folder.glob("*.py") for call in CALL.findall(file.read_text())})


@pytest.mark.parametrize(("verb", "worker", "method"), calls())
def test_the_verb_fits_the_method(verb: str, worker: str, method: str) -> None:
    assert verb == verb_of(registered_methods(WORKERS[worker])[method])


def test_the_loop_calls_every_role() -> None:
    assert {worker for _, worker, _ in calls()} == set(WORKERS)
