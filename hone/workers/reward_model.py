"""The outcome reward model: scores each response with a one-label sequence classifier.

Both reward models are Hugging Face classifiers that run on padded batches and are never trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hone.agents.collate import input_ids
from hone.config import PPOTrainerConfig
from hone.controller import Dispatch, Worker, register
from hone.data.chat_template import apply_template
from hone.engine.microbatch import MicroBatchRule
from hone.engine.offload import HostRest
from hone.models.from_config import import_external
from hone.models.load import load_tokenizer, resolve_model_path
from hone.ops.masked import split_at_response
from hone.protocol import DataProto
from hone.rewards.managers.reading import on_last_policy_token
from hone.types import Settings
from hone.workers.device import pick_device, pick_dtype, prepare_process

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.models.auto.auto_factory import _BaseAutoModelClass


class FrozenClassifier(Worker):
    """A classifier replicated on every rank; `param_offload` keeps it on the host between batches."""

    def __init__(self, config: PPOTrainerConfig) -> None:
        super().__init__()
        self.config = config

    def load(self, auto_class: type[_BaseAutoModelClass], *, labels: int) -> None:
        """Loads `model`, `tokenizer` and the micro-batch rule on this rank's device."""
        config = self.config.reward_model
        self.device = pick_device(self.config.trainer.device, self.local_rank)
        sharding, timeout_s = config.model.fsdp_config, self.config.actor_rollout_ref.nccl_timeout
        prepare_process(self.device, self.world_size, timeout_s, [sharding])
        import_external(config.model.external_lib)
        folder = resolve_model_path(str(config.model.path))
        self.model: PreTrainedModel = auto_class.from_pretrained(
            folder,
            num_labels=labels,
            dtype=pick_dtype(sharding.dtype, self.device),
            trust_remote_code=config.model.trust_remote_code,
            **config.model.override_config,
        )
        self.model.to(self.device).eval()
        self._rest = HostRest(self.model.parameters) if sharding.param_offload else None
        if self._rest is not None:
            self._rest.away()
        self.tokenizer = self.load_tokenizer(folder)
        self.rule = MicroBatchRule(
            config.sequences_per_micro_batch(self.world_size), config.forward_max_token_len_per_gpu
        )

    def load_tokenizer(self, folder: str) -> PreTrainedTokenizerBase:
        return load_tokenizer(
            folder, trust_remote_code=self.config.reward_model.model.trust_remote_code
        )

    def present(self) -> AbstractContextManager[None]:
        """Keeps the parameters on the device inside the block."""
        return nullcontext() if self._rest is None else self._rest.present()

    def padded(self, rows: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns right-padded ids [B, W], their mask [B, W] and lengths [B]."""
        width, pad = max(len(ids) for ids in rows), self.tokenizer.pad_token_id
        ids = torch.tensor([r + [pad] * (width - len(r)) for r in rows], device=self.device)
        lengths = torch.tensor([len(r) for r in rows], device=self.device)
        mask = torch.arange(width, device=self.device)[None] < lengths[:, None]
        return ids, mask.long(), lengths


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
        name = model.input_tokenizer
        self.writer = self.load_tokenizer(name) if name else None
        self._same_tokens = (
            self.writer is None or self.writer.get_vocab() == self.tokenizer.get_vocab()
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Returns `rm_scores` [B, T]: the score at the last policy token, 0 elsewhere."""
        limit = self.config.reward_model.max_length
        rows = [ids if limit is None else ids[-limit:] for ids in self._rows(data)]
        scores = [0.0] * len(rows)
        with self.present():
            for part in self.rule.split([len(ids) for ids in rows]):
                batch_scores = self._score([rows[i] for i in part])
                for row, score in zip(part, batch_scores.tolist(), strict=True):
                    scores[row] = score
        return DataProto.from_dict({"rm_scores": on_last_policy_token(data, scores)})

    def _rows(self, data: DataProto) -> list[list[int]]:
        """Returns prompt and response as tokens of the reward model, without padding."""
        columns = data.batch
        if self._same_tokens:
            ids, mask = input_ids(data), columns["attention_mask"].bool()
            return [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
        assert self.writer is not None
        _, mask = split_at_response(columns["attention_mask"].bool(), columns["responses"])
        answers = [
            self.writer.decode(ids[keep], skip_special_tokens=True)
            for ids, keep in zip(columns["responses"], mask, strict=True)
        ]
        prompts = data.non_tensor_batch["raw_prompt"]
        return [self._rendered(p, a) for p, a in zip(prompts, answers, strict=True)]

    def _rendered(self, prompt: str | Sequence[Settings], answer: str) -> list[int]:
        """Renders the conversation with the reward model's chat template; a plain prompt stays plain text."""
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt + answer))
        turns = [*prompt, {"role": "assistant", "content": answer}]
        text = apply_template(turns, self.tokenizer, tokenize=False)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @torch.no_grad()
    def _score(self, rows: list[list[int]]) -> Tensor:  # [len(rows)]
        """Returns the head's output at the last token, found by length: the pad id may be a real token."""
        ids, mask, lengths = self.padded(rows)
        base = getattr(self.model, self.model.base_model_prefix)
        hidden = base(input_ids=ids, attention_mask=mask).last_hidden_state
        last = hidden[torch.arange(len(rows), device=self.device), lengths - 1]
        scores: Tensor = self.model.score(last).float()
        return scores.squeeze(-1).cpu()
