"""The rollout's worker: what it tells its engine about the module it borrows."""

from __future__ import annotations

import pytest

from hone.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.workers.tasks import config_of, prompts, write_model


@pytest.mark.parametrize(("frees", "again"), [(False, 0), (True, 1)])
def test_the_engine_wakes_up_when_parameters_moved_or_it_slept(
    tmp_path, monkeypatch, frees, again
) -> None:
    model = write_model(tmp_path / "model")
    overrides = f"actor_rollout_ref.rollout.free_cache_engine={str(frees).lower()}"
    one = ActorRolloutRefWorker(config_of(model, overrides), "actor_rollout")
    one.init_model()
    calls = []
    wake_up = one.rollout.engine.wake_up

    async def counted():
        calls.append(1)
        await wake_up()

    monkeypatch.setattr(one.rollout.engine, "wake_up", counted)
    try:
        one.generate_sequences(prompts())
        assert len(calls) == 1
        one.generate_sequences(prompts())
        assert len(calls) == 1 + again
        one.save_checkpoint(str(tmp_path / "saved"))
        one.load_checkpoint(str(tmp_path / "saved"))
        one.generate_sequences(prompts())
        assert len(calls) == 2 + again
    finally:
        one.close()
