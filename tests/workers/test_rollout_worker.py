"""The rollout worker: when its engine wakes up."""

from __future__ import annotations

import time

import pytest

from hone.agents.groups import GroupRequest
from hone.protocol.rows import row_dicts
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


def test_an_engine_with_its_own_thread_decodes_with_the_actors_parameters_only_in_a_lease(
    tmp_path,
) -> None:
    model = write_model(tmp_path / "model", max_positions=512)
    overrides = ("actor_rollout_ref.rollout.name=hf", "data.max_response_length=400")
    worker = ActorRolloutRefWorker(config_of(model, *overrides), "actor_rollout")
    worker.init_model()
    rollout = worker.rollout
    try:
        row = row_dicts(prompts().non_tensor_batch)[0]
        for number, max_tokens in enumerate((1, 400)):
            sampling = {"temperature": 1.0, "max_tokens": max_tokens, "ignore_eos": True}
            own_row = {**row, "uid": str(number), "trajectory_id": str(number)}
            rollout.submit([GroupRequest(number, (own_row,), (sampling,))])
        (first,) = rollout.pop_finished_groups(1, 0.0).groups
        assert first.number == 0
        (running,) = rollout.engine._running
        num_tokens = len(running.request.token_ids)
        for change in (lambda: None, lambda: rollout.switch_to_actor_weights(5)):
            change()
            time.sleep(0.3)
            assert len(running.request.token_ids) == num_tokens < 400
        (second,) = rollout.pop_finished_groups(1, 0.0).groups
        (output,) = second.outputs
        assert output.versions == [0] * num_tokens + [5] * (400 - num_tokens)
    finally:
        worker.close()
