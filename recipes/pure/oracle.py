"""A process reward model that knows the truth, or errs on a fixed share of all steps.

It is a worker for the role of the reward model: `cells.py` passes it to the trainer in place of the model.
"""

from __future__ import annotations

import random

import torch
from world import SEPARATOR, step_labels

from hone.algorithms.credit import assign_credit, step_ends
from hone.config import PPOTrainerConfig
from hone.controller import Dispatch, Worker, register
from hone.models.load import load_tokenizer
from hone.protocol import DataProto
from hone.workers.process_reward_model import separator_ids


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
        self.separators = separator_ids(self.tokenizer, SEPARATOR)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        responses, mask = data.batch["responses"], data.batch["response_mask"]
        ends = step_ends(responses, mask, self.separators)
        scores = torch.zeros(responses.shape)
        for row, info in enumerate(data.non_tensor_batch["extra_info"]):
            places = ends[row].nonzero().flatten().tolist()
            starts = [0, *(place + 1 for place in places)]
            ids = [responses[row, a : b + 1] for a, b in zip(starts, places, strict=False)]
            texts = [self.tokenizer.decode(i, skip_special_tokens=True) for i in ids]
            steps = [text.removesuffix(SEPARATOR) for text in texts]
            for i, right in enumerate(step_labels(info["prompt"], steps)):
                drawn = random.Random(f"{info['prompt']} {i} {steps[i]}").random()
                scores[row, places[i]] = 1.0 if right != (drawn < self.noise) else -1.0
        credit = self.config.reward_model.credit_assignment
        return DataProto.from_dict(
            {"process_scores": assign_credit(scores, ends, credit), "step_mask": ends}
        )


class NoisyPRM(OraclePRM):
    noise = 0.2
