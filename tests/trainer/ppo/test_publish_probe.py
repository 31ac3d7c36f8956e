"""A run whose rollout does not get the trainer's weights stops, whichever part of the way is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hone.rollout.native.decoder import PrepackedDecoder
from hone.rollout.native.paged_cache import BlockPool
from hone.trainer.ppo import publish_probe
from hone.trainer.ppo.publish_probe import PublishProbeError
from hone.workers.actor import ActorWorker
from tests.rollout.outside_engine import OwnWeightsEngine

from ..runs import Run

ROLLOUT = "actor_rollout_ref.rollout"
COPIED = f"{ROLLOUT}.name=tests.rollout.outside_engine:OwnWeightsEngine"
EVERY = f"{ROLLOUT}.checkpoint_engine.probe_every"
LORA = "actor_rollout_ref.model.lora_rank=4"
MOVING = ("actor_rollout_ref.actor.optim.lr=0.03", "trainer.total_training_steps=4", f"{EVERY}=1")
PAGED = (f"{ROLLOUT}.exact=true", f"{ROLLOUT}.free_cache_engine=false", "data.max_prompt_length=40")
TrainRun = Callable[..., Run]


@pytest.mark.parametrize(
    "settings",
    [(), PAGED, (LORA,), (f"{ROLLOUT}.name=hf",), (COPIED,), (COPIED, LORA)],
    ids=" ".join,
)
def test_each_engine_agrees_with_the_trainer_after_every_publish(
    train: TrainRun, settings: tuple[str, ...]
) -> None:
    diffs = train(*MOVING, *settings).series("rollout_corr/probe_abs_diff")
    assert len(diffs) == 4
    assert max(diffs) < 1e-5


def stops(train: TrainRun, *settings: str) -> str:
    with pytest.raises(PublishProbeError) as raised:
        train(*MOVING, *settings)
    return str(raised.value)


def test_a_prepacked_decoder_with_old_weights_stops_the_run(
    train: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh, invalidate = PrepackedDecoder.refresh, PrepackedDecoder.invalidate

    def refresh_once(decoder: PrepackedDecoder) -> None:
        if not decoder._layers:
            refresh(decoder)

    def invalidate_once(decoder: PrepackedDecoder) -> None:
        if not hasattr(decoder, "_layers"):
            invalidate(decoder)

    monkeypatch.setattr(PrepackedDecoder, "refresh", refresh_once)
    monkeypatch.setattr(PrepackedDecoder, "invalidate", invalidate_once)
    assert "the weights of version" in stops(train)


def test_a_prefix_cache_of_old_weights_stops_the_run(
    train: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockPool, "clear_prefix_cache", lambda pool: None)
    stops(train, *PAGED)


def test_one_tensor_that_is_left_out_stops_the_run(
    train: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = OwnWeightsEngine.load

    async def load_most(engine: Any, weights: Any) -> None:
        await load(engine, [(n, w) for n, w in weights if "layers.1.mlp.down_proj" not in n])

    monkeypatch.setattr(OwnWeightsEngine, "load", load_most)
    assert "differ by" in stops(train, COPIED)


def test_a_base_that_is_sent_instead_of_the_adapters_stops_the_run(
    train: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    named_weights = ActorWorker.named_weights

    def base_weights(worker: Any, loads_adapters: bool) -> Iterator[tuple[str, Tensor]]:
        before = {
            n: p.detach().clone()
            for n, p in worker.engine.module.named_parameters()
            if "lora_B" in n
        }
        for name, parameter in worker.engine.module.named_parameters():
            if name in before:
                parameter.data.zero_()
        yield from [(n, w.clone()) for n, w in named_weights(worker, loads_adapters)]
        for name, parameter in worker.engine.module.named_parameters():
            if name in before:
                parameter.data.copy_(before[name])

    monkeypatch.setattr(ActorWorker, "named_weights", base_weights)
    assert "LoRA adapters of version" in stops(train, COPIED, LORA)


def test_a_rollout_that_answers_as_before_while_the_trainer_moves_stops_the_run(
    train: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with adapters, whose first updates differ from the base by less than rounding explains."""

    async def load_nothing(engine: Any, weights: Any) -> None:
        list(weights)

    monkeypatch.setattr(OwnWeightsEngine, "load", load_nothing)
    monkeypatch.setattr(publish_probe, "_MAX_DIFF", {torch.float32: 100.0})
    monkeypatch.setattr(publish_probe, "_MAX_MOVE", 1e-5)
    assert "log-probs of an earlier publish" in stops(train, COPIED)


def test_the_probe_changes_no_other_number_and_can_be_disabled(train: TrainRun) -> None:
    with_probe = train(*MOVING, folder="a").numbers
    without = train(*MOVING, f"{EVERY}=0", folder="b").numbers
    for line in with_probe:
        assert line.pop("rollout_corr/probe_abs_diff") < 1e-5
    assert with_probe == without


def test_a_resumed_run_probes_the_publishes_of_the_uninterrupted_run(train: TrainRun) -> None:
    every = (*MOVING, f"{EVERY}=3", "trainer.save_freq=2", "trainer.total_training_steps=6")
    whole = train(*every, folder="a").numbers
    train(*every, "trainer.total_training_steps=2", folder="b")
    assert train(*every, folder="b").numbers == whole
    assert 1 <= sum("rollout_corr/probe_abs_diff" in line for line in whole) < 6


def test_an_engine_that_invents_its_log_probs_is_not_probed(train: TrainRun) -> None:
    engine = f"{ROLLOUT}.name=tests.trainer.recorded:Recorded"
    run = train(*MOVING, engine, f"{ROLLOUT}.free_cache_engine=false")
    assert not any("probe_abs_diff" in name for line in run.steps for name in line)
