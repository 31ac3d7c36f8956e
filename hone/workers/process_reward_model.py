"""The process reward model (PURE): scores every reasoning step with a two-label classifier.

A step ends at a token whose text ends in `split_step_char`, and at the end of the response. The model reads
`step_separator` in place of this token and scores the step there. It must have the policy's vocabulary,
because token ids are reused and never re-encoded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.credit import assign_credit, step_ends, step_rewards
from hone.config import ConfigError
from hone.controller import Dispatch, register
from hone.protocol import DataProto
from hone.tokenizer import Tokenizer
from hone.workers.reward_model import FrozenClassifier


class ProcessRewardModelWorker(FrozenClassifier):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        from transformers import AutoModelForTokenClassification

        self.load(AutoModelForTokenClassification, labels=2)
        self._check_tokens()
        self._separator = self._separator_id()
        self._ends = separator_ids(self.tokenizer, self.config.reward_model.split_step_char)

    def _check_tokens(self) -> None:
        model = self.config.reward_model.model
        if not model.input_tokenizer:
            return
        if self.load_tokenizer(model.input_tokenizer).get_vocab() != self.tokenizer.get_vocab():
            raise ConfigError(
                f"reward_model.model.path={model.path} has another vocabulary than the policy "
                f"({model.input_tokenizer}); a process reward model reads the policy's tokens: use "
                "one of the same family, or reward_model.type=orm"
            )

    def _separator_id(self) -> int:
        text = self.config.reward_model.step_separator
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(
                f"reward_model.step_separator={text!r} is {len(ids)} tokens of the reward model; use "
                "the one token it was trained with"
            )
        return int(ids[0])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Returns `process_scores` [B, T] after credit assignment, and `step_mask` [B, T] of step ends."""
        columns = data.batch
        responses, width = columns["responses"], columns["responses"].shape[1]
        steps = step_ends(responses, columns["response_mask"], self._ends)
        separated = torch.where(steps, self._separator, responses)
        ids = torch.cat([columns["prompts"], separated], 1)
        mask = columns["attention_mask"].bool()
        start = -(self.config.reward_model.max_length or ids.shape[1])
        rows = [row[keep].tolist()[start:] for row, keep in zip(ids, mask, strict=True)]
        response_tokens = mask[:, -width:].sum(1).tolist()
        scores = torch.zeros(responses.shape, dtype=torch.float32)
        with self.present():
            for part in self.rule.split([len(row) for row in rows]):
                for row, rewards in zip(part, self._judge([rows[i] for i in part]), strict=True):
                    tokens = response_tokens[row]
                    visible = rewards[-tokens:]  # truncated tokens at the start have no score
                    scores[row, tokens - len(visible) : tokens] = visible
        credit = self.config.reward_model.credit_assignment
        return DataProto.from_dict(
            {"process_scores": assign_credit(scores, steps, credit), "step_mask": steps}
        )

    @torch.no_grad()
    def _judge(self, rows: list[list[int]]) -> list[Tensor]:
        """Returns p(good) − p(bad) at every token of each row."""
        ids, mask, _ = self.padded(rows)
        logits = self.model(input_ids=ids, attention_mask=mask).logits
        rewards = step_rewards(logits.float()).cpu()
        return [rewards[i, : len(row)] for i, row in enumerate(rows)]


def separator_ids(tokenizer: Tokenizer, text: str) -> Tensor:
    """Returns every token whose text ends in `text`, including tokens with other characters before it."""
    ids = range(len(tokenizer))
    return torch.tensor([i for i in ids if tokenizer.decode([i]).endswith(text)], dtype=torch.int64)
