"""The outcome reward model: one number a response, from a sequence classifier of one label.

An ordinary padded forward of the Hugging Face model. Leaves out process rewards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hone.agents.collate import input_ids
from hone.controller import Dispatch, register
from hone.data.chat_template import apply_template
from hone.protocol import DataProto
from hone.rewards.managers.reading import on_last_policy_token
from hone.types import Settings
from hone.workers.frozen_classifier import FrozenClassifier


class RewardModelWorker(FrozenClassifier):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        from transformers import AutoModelForSequenceClassification

        self.load(AutoModelForSequenceClassification, labels=1)
        model = self.config.reward_model.model
        if not hasattr(self.model, "score"):
            raise ValueError(
                f"reward_model.model.path={model.path} is a {type(self.model).__name__} without "
                "a `score` head over every token; use a decoder with a sequence-classification head"
            )
        written_with = model.input_tokenizer
        self.writer = self.load_tokenizer(written_with) if written_with else None
        self._same_tokens = (
            self.writer is None or self.writer.get_vocab() == self.tokenizer.get_vocab()
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores` [B, T]: the score on the last token the policy wrote, 0 elsewhere."""
        limit = self.config.reward_model.max_length
        rows = [ids if limit is None else ids[-limit:] for ids in self._rows(data)]
        scores = [0.0] * len(rows)
        with self.present():
            for part in self.rule.split([len(ids) for ids in rows]):
                found = self._score([rows[i] for i in part])
                for row, score in zip(part, found.tolist(), strict=True):
                    scores[row] = score
        return DataProto.from_dict({"rm_scores": on_last_policy_token(data, scores)})

    def _rows(self, data: DataProto) -> list[list[int]]:
        """Prompt and response as the reward model's own tokens, without padding."""
        columns = data.batch
        if self._same_tokens:
            ids, kept = input_ids(data), columns["attention_mask"].bool()
            return [row[keep].tolist() for row, keep in zip(ids, kept, strict=True)]
        assert self.writer is not None
        width = columns["responses"].shape[1]
        kept = columns["attention_mask"][:, -width:].bool()
        answers = [
            self.writer.decode(ids[keep], skip_special_tokens=True)
            for ids, keep in zip(columns["responses"], kept, strict=True)
        ]
        prompts = data.non_tensor_batch["raw_prompt"]
        return [self._rendered(p, a) for p, a in zip(prompts, answers, strict=True)]

    def _rendered(self, prompt: str | Sequence[Settings], answer: str) -> list[int]:
        """The conversation in the reward model's own template; a plain prompt is plain text."""
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt + answer))
        turns = [*prompt, {"role": "assistant", "content": answer}]
        text = apply_template(turns, self.tokenizer, tokenize=False)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @torch.no_grad()
    def _score(self, rows: list[list[int]]) -> Tensor:  # [len(rows)]
        """The head's output at each row's last token, found by length: padding may be a real token."""
        ids, mask, lengths = self.padded(rows)
        base = getattr(self.model, self.model.base_model_prefix)
        hidden = base(input_ids=ids, attention_mask=mask).last_hidden_state
        last = hidden[torch.arange(len(rows), device=self.device), lengths - 1]
        scores: Tensor = self.model.score(last).float()
        return scores.squeeze(-1).cpu()
