"""Checks after a publish that the rollout has the trainer's weights.

The rollout generates a few greedy tokens after a fixed prompt, as for any request: with its prefix cache, its
CUDA graphs and its adapters. The trainer computes the log-probs of these tokens.
"""

from __future__ import annotations

import logging
import time

import torch

from hone.config.trees import ActorRolloutRefConfig
from hone.controller import WorkerGroup
from hone.rollout.contract import Sampling, TokenOutput
from hone.tokenizer import Tokenizer
from hone.workers.actor import ActorWorker
from hone.workers.rollout_worker import RolloutWorker

log = logging.getLogger(__name__)

_TEXT = "Seven hens laid 12 eggs each in June, so the farmer sold them all by the dozen: "
_PROMPT_TOKENS = 32
_TOKENS = 4
"""The number of generated tokens; the last ones come from decode steps, the first from the prefill."""
_PROBE_EVERY_SHARED, _PROBE_EVERY = 4, 10
"""Defaults of `probe_every` if no tensor is sent, and otherwise. One took 32 to 63 ms (0.5B, H200)."""
_MAX_DIFF = {torch.float32: 5e-3}
"""The largest mean difference of log-probs that rounding explains, by dtype of the trainer."""
_MAX_DIFF_16_BIT = 0.2
_MAX_MOVE = 0.1
"""If the bits of the rollout are unchanged, the trainer may move by this share of the largest difference."""


class PublishProbeError(RuntimeError):
    """The rollout does not have the weights that were published."""


class PublishProbe:
    """Compares rollout and trainer on one row; raises if they differ.

    The version decides which publishes are probed, so that a resumed run probes those that the uninterrupted
    run would have probed.
    """

    def __init__(
        self,
        actor: WorkerGroup[ActorWorker],
        rollout: WorkerGroup[RolloutWorker],
        config: ActorRolloutRefConfig,
        tokenizer: Tokenizer,
    ) -> None:
        self._actor, self._rollout = actor, rollout
        self._transfer = rollout.call(RolloutWorker.weight_transfer)
        every, limit = config.rollout.checkpoint_engine.probe_every, config.rollout.max_total_tokens
        if every is None:
            every = _PROBE_EVERY_SHARED if self._transfer == "shared" else _PROBE_EVERY
        self._every = every
        self._published_version: int | None = None
        ids = list(tokenizer.encode(_TEXT, add_special_tokens=False))
        self._prompt_ids = ids[: max(1, min(_PROMPT_TOKENS, limit - _TOKENS))]
        tokens = max(1, min(_TOKENS, limit - len(self._prompt_ids)))
        self._sampling = Sampling(tokens, temperature=0.0, seed=0, ignore_eos=True)
        dtype = actor.call(ActorWorker.dtype)
        self._max_diff = _MAX_DIFF.get(dtype, _MAX_DIFF_16_BIT)
        self._sent = "the weights or LoRA adapters" if config.model.uses_lora else "the weights"
        self._engine_name = config.rollout.name
        self._last_move: dict[int, tuple[TokenOutput, list[float]]] = {}
        """The rollout's and the trainer's answer when the bits of a rollout worker last changed."""

    def after_publish(self, version: int) -> dict[str, float]:
        """Probes the publish of this version, if it is due, and returns the metrics."""
        last, self._published_version = self._published_version, version
        if not self._prompt_ids or not self._is_due(last, version):
            return {}
        start_time = time.perf_counter()
        answers = self._rollout.call_all(RolloutWorker.probe, self._prompt_ids, self._sampling)
        trainer_rows: dict[tuple[int, ...], list[float]] = {}
        diffs = []
        for worker, answer in enumerate(answers):
            if answer is None:  # the rank follows the leader of its group
                continue
            if not answer.log_probs:
                log.warning("rollout.name=%s returns no log-probs: not probed", self._engine_name)
                self._every = 0
                return {}
            key = tuple(answer.token_ids)
            if key not in trainer_rows:
                trainer_rows[key] = self._actor.call_all(
                    ActorWorker.token_log_probs, self._prompt_ids, answer.token_ids
                )[0]
            diffs.append(self._compare(worker, answer, trainer_rows[key], version))
        if not diffs:
            return {}
        seconds = time.perf_counter() - start_time
        return {"rollout_corr/probe_abs_diff": max(diffs), "timing_s/publish_probe": seconds}

    def _is_due(self, last: int | None, version: int) -> bool:
        """Whether this is the first or a k-th publish of trained weights; the start does not count."""
        if not self._every or last is None or last == version:
            return False
        number = version // abs(version - last)  # of this publish, if each has as many updates
        return number == 1 or number % self._every == 0

    def _compare(
        self, worker: int, answer: TokenOutput, trainer: list[float], version: int
    ) -> float:
        """Returns the mean difference of the log-probs; raises if the weights are not the trainer's."""
        diff, move = _mean_abs_diff(answer.log_probs, trainer), 0.0
        before, trainer_before = self._last_move.get(worker, (None, trainer))
        if before is not None and before.log_probs == answer.log_probs:
            move = _mean_abs_diff(trainer, trainer_before)
        else:
            self._last_move[worker] = answer, trainer
        problem = ""
        if move > _MAX_MOVE * self._max_diff:
            problem = (
                f"has the log-probs of an earlier publish, but the trainer's moved by {move:.3g}"
            )
        elif not diff <= self._max_diff:  # or NaN
            problem = (
                f"and trainer differ by {diff:.3g} in the log-probs of a fixed row, where rounding explains "
                f"{self._max_diff:.3g}"
            )
        if problem:
            raise PublishProbeError(
                f"publish probe: rollout worker {worker} (rollout.name={self._engine_name}, weights "
                f"{self._transfer}) {problem}. So it decodes without {self._sent} of version {version}, or "
                "without some of them: a tensor, an adapter, the prefix cache or a CUDA graph is old. Report "
                "this and train with another rollout.name; checkpoint_engine.probe_every=0 disables the probe"
            )
        return diff


def _mean_abs_diff(a: list[float], b: list[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)
