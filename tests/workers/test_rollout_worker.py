"""The rollout worker: when its engine wakes up."""

from __future__ import annotations

import pytest

from hone.verl.actor_rollout_ref import ActorRolloutRefWorker
from tests.workers.tasks import config_of, prompts, write_model


@pytest.mark.parametrize(("frees", "again"), [(False, 0), (True, 1)])
def test_the_engine_wakes_up_after_parameters_moved_or_after_sleep(
    tmp_path, monkeypatch, frees, again
) -> None:
    model = write_model(tmp_path / "model")
    overrides = f"actor_rollout_ref.rollout.free_cache_engine={str(frees).lower()}"
    worker = ActorRolloutRefWorker(config_of(model, overrides), "actor_rollout")
    worker.init_model()
    calls = []
    wake_up = worker.rollout.engine.wake_up

    async def counting_wake_up():
        calls.append(1)
        await wake_up()

    monkeypatch.setattr(worker.rollout.engine, "wake_up", counting_wake_up)
    try:
        worker.generate_sequences(prompts())
        assert len(calls) == 1
        worker.generate_sequences(prompts())
        assert len(calls) == 1 + again
        worker.save_checkpoint(str(tmp_path / "saved"))
        worker.load_checkpoint(str(tmp_path / "saved"))
        worker.generate_sequences(prompts())
        assert len(calls) == 2 + again
    finally:
        worker.close()
