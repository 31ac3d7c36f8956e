"""A process reward model that knows the truth, or errs on a fixed share of all steps.

It is a worker for the role of the reward model: `cells.py` passes it to the trainer in place of the model.
"""

from __future__ import annotations

import random

import torch
from world import SEPARATOR, step_labels

from hone.algorithms.credit import step_ends
from hone.config import PPOTrainerConfig
from hone.controller import Dispatch, Worker, register
from hone.data.response_steps import TokenTextSplitter, separator_ids
from hone.models.load import load_tokenizer
from hone.protocol import DataProto


class OraclePRM(Worker):
    """Scores each step 1 (right) or −1."""

    noise = 0.0
    """Share of the steps that are judged wrongly; the same step of the same prompt always is."""

    def __init__(self, config: PPOTrainerConfig) -> None:
        super().__init__()
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.tokenizer = load_tokenizer(self.config.actor_rollout_ref.model.path)
        self.texts = TokenTextSplitter(self.tokenizer)
        self.separators = separator_ids(self.tokenizer, SEPARATOR)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        responses, mask = data.batch["responses"], data.batch["response_mask"]
        ends = step_ends(responses, mask, self.separators)
        scores = torch.zeros(responses.shape)
        for row, info in enumerate(data.non_tensor_batch["extra_info"]):
            places, prompt = ends[row].nonzero().flatten().tolist(), info["prompt"]
            texts = self.texts(responses[row].tolist())
            starts = [0, *(place + 1 for place in places)]
            spans = zip(starts, places, strict=False)
            steps = ["".join(texts[a : b + 1]).removesuffix(SEPARATOR) for a, b in spans]
            judged = [
                right != (self._drawn(f"{prompt} {i} {step}") < self.noise)
                for i, (step, right) in enumerate(
                    zip(steps, step_labels(prompt, steps), strict=True)
                )
            ]
            scores[row, places] = torch.tensor([1.0 if good else -1.0 for good in judged])
        return DataProto.from_dict({"step_rewards": scores, "step_mask": ends})

    def _drawn(self, step: str) -> float:
        return random.Random(step).random() if self.noise else 0.0


class NoisyPRM(OraclePRM):
    noise = 0.2
