"""A rollout engine that answers from a recording: tokens and log-probs depend on the trajectory alone."""

from __future__ import annotations

import random

from hone.rollout.contract import RolloutSpec
from hone.rollout.requests import Request
from hone.rollout.scripted import ScriptedAnswer, ScriptedRollout


class Recorded(ScriptedRollout):
    """`rollout.name=tests.trainer.recorded:Recorded`: every layout trains on the same rows."""

    def __init__(self, spec: RolloutSpec) -> None:
        super().__init__([], tokenizer=spec.tokenizer, eos_ids=spec.eos_ids)
        self._vocabulary = len(spec.tokenizer.get_vocab())

    def _next_answer(self, request: Request) -> ScriptedAnswer:
        draw = random.Random(f"{request.sampling.seed} {request.prompt_ids}")
        length = draw.randint(2, request.sampling.max_tokens)
        tokens = [draw.randrange(3, self._vocabulary) for _ in range(length)]
        return ScriptedAnswer(tokens, [-3.6 - draw.random() / 10 for _ in tokens])
