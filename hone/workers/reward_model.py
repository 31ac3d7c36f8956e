"""The outcome reward model: scores each response with a classifier that has one label.

Both reward models are Hugging Face classifiers that run on right-padded batches and are never trained.
A sequence or token classifier with a head over every token scores at the last token of the row, an encoder
by its own pooling. Encoders read prompt and response as a pair of texts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hone.agents.collate import input_ids
from hone.config import PPOTrainerConfig
from hone.controller import Dispatch, Worker, register
from hone.data.prompts import as_messages
from hone.engine.microbatch import MicroBatchRule
from hone.engine.offload import OffloadedTensors
from hone.models.facts import UnsupportedModel, classifier_kind
from hone.models.from_config import import_external
from hone.models.load import load_tokenizer, resolve_model_path, translate_load_errors
from hone.ops.masked import split_at_response
from hone.protocol import DataProto
from hone.rewards.conversation import Prompt, conversation_text, defused, has_template, prompt_text
from hone.rewards.managers.reading import on_last_policy_token
from hone.types import Row
from hone.workers.device import pick_device, pick_dtype, prepare_process

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

logger = logging.getLogger(__name__)


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
        settings: Row = {**config.model.override_config, "num_labels": labels}
        with translate_load_errors(str(config.model.path), folder):
            self.model, report = auto_class.from_pretrained(
                folder,
                dtype=pick_dtype(sharding.dtype, self.device),
                trust_remote_code=config.model.trust_remote_code,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **settings,
            )
        self._refuse_untrained(report["missing_keys"], report["mismatched_keys"], labels)
        self.model.to(self.device).eval()
        self._offloaded = (
            OffloadedTensors(self.model.parameters) if sharding.param_offload else None
        )
        if self._offloaded is not None:
            self._offloaded.to_host()
        self.tokenizer = self.load_tokenizer(folder)
        self.rule = MicroBatchRule(
            config.sequences_per_micro_batch(self.world_size), config.forward_max_token_len_per_gpu
        )

    def _refuse_untrained(
        self,
        missing: Iterable[str],
        mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]],
        labels: int,
    ) -> None:
        """Raises if transformers would fill weights that the checkpoint lacks with random numbers."""
        what = f"reward_model.model.path={self.config.reward_model.model.path}"
        for name, stored, _ in mismatched:
            raise UnsupportedModel(
                f"{what} has {stored[0]} labels ({name}), and this reward model needs {labels}; name a "
                "classifier with that many"
            )
        if names := sorted(missing):
            raise UnsupportedModel(
                f"{what} has no trained weights for {names[0]} of {type(self.model).__name__}; name a "
                "model that was trained as a reward model, or reward_model.type=judge for one that writes"
            )

    def load_tokenizer(self, folder: str) -> PreTrainedTokenizerBase:
        return load_tokenizer(
            folder, trust_remote_code=self.config.reward_model.model.trust_remote_code
        )

    def present(self) -> AbstractContextManager[None]:
        """Keeps the parameters on the device inside the block."""
        return nullcontext() if self._offloaded is None else self._offloaded.present()

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
        import transformers

        model = self.config.reward_model.model
        self._kind = classifier_kind(str(model.path), trust_remote_code=model.trust_remote_code)
        classes: dict[str, type[_BaseAutoModelClass]] = {
            "sequence": transformers.AutoModelForSequenceClassification,
            "token": transformers.AutoModelForTokenClassification,
        }
        self.load(classes[self._kind], labels=1)
        if self._kind == "sequence" and hasattr(self.model, "sequence_summary"):
            raise UnsupportedModel(
                f"reward_model.model.path={model.path} is a {type(self.model).__name__}, whose pooling "
                "reads padding; use a decoder or a BERT-like encoder with a classification head"
            )
        name = model.input_tokenizer
        self.writer = self.load_tokenizer(name) if name else None
        self.reads_pairs = (
            self.tokenizer.cls_token_id is not None and not self.tokenizer.chat_template
        )
        self._same_tokens = not self.reads_pairs and self._has_policy_tokens()
        self._limit = self._longest_row()
        self._truncates = False

    def _has_policy_tokens(self) -> bool:
        """Whether the rollout's ids are what the reward model's own tokenizer and template would give."""
        if self.writer is None:
            return True
        if self.writer.get_vocab() != self.tokenizer.get_vocab():
            return False
        policy = self.config.actor_rollout_ref.model.custom_chat_template
        templates = (None, policy or self.writer.chat_template)
        return self.config.data.prompt_format != "chat" or self.tokenizer.chat_template in templates

    def _longest_row(self) -> int | None:
        """Returns `max_length`, or the number of positions that the model has."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        limits = (self.config.reward_model.max_length, positions, self.tokenizer.model_max_length)
        return min((limit for limit in limits if limit and limit > 0), default=None)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Returns `rm_scores` [B, T]: the score at the last policy token, 0 elsewhere."""
        scores = self.score_rows(self._rows(data))
        return DataProto.from_dict({"rm_scores": on_last_policy_token(data, scores)})

    def score_rows(self, rows: Sequence[list[int]]) -> list[float]:
        """Returns the score of each row of the reward model's tokens."""
        rows = [self._truncated(ids) for ids in rows]
        scores = [0.0] * len(rows)
        with self.present():
            for part in self.rule.split([len(ids) for ids in rows]):
                batch_scores = self._score([rows[i] for i in part])
                for row, score in zip(part, batch_scores.tolist(), strict=True):
                    scores[row] = score
        if not all(map(math.isfinite, scores)):
            raise ValueError(
                f"reward_model.model.path={self.config.reward_model.model.path} gave a score that is not "
                "finite; check its weights, or use reward_model.model.fsdp_config.dtype=fp32"
            )
        return scores

    def _truncated(self, ids: list[int]) -> list[int]:
        if self._limit is None or len(ids) <= self._limit:
            return ids
        if not self._truncates:
            self._truncates = True
            logger.warning(
                "a row of %d tokens is longer than the reward model reads (%d); such rows lose their "
                "first tokens (reward_model.max_length)",
                len(ids),
                self._limit,
            )
        return ids[-self._limit :]

    def _rows(self, data: DataProto) -> list[list[int]]:
        """Returns prompt and response as tokens of the reward model, without padding."""
        columns = data.batch
        if self._same_tokens:
            ids, mask = input_ids(data), columns["attention_mask"].bool()
            return [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
        writer = self.writer or self.tokenizer
        _, mask = split_at_response(columns["attention_mask"].bool(), columns["responses"])
        answers = [
            defused(writer.decode(ids[keep], skip_special_tokens=True), self.tokenizer)
            for ids, keep in zip(columns["responses"], mask, strict=True)
        ]
        prompts = list(data.non_tensor_batch["raw_prompt"])
        if self.config.data.prompt_format == "chat":
            prompts = [as_messages(prompt) for prompt in prompts]
        return [self.encoded(p, a) for p, a in zip(prompts, answers, strict=True)]

    def encoded(self, prompt: Prompt, answer: str) -> list[int]:
        """Returns the tokens of a prompt and its response."""
        if self.reads_pairs:
            length: Row = {"truncation": True, "max_length": self._limit}
            pair = prompt_text(prompt), answer
            return list(self.tokenizer(*pair, **length if self._limit else {})["input_ids"])
        text = conversation_text(prompt, answer, self.tokenizer)
        is_rendered = not isinstance(prompt, str) and has_template(self.tokenizer)
        return list(self.tokenizer.encode(text, add_special_tokens=not is_rendered))

    @torch.no_grad()
    def _score(self, rows: list[list[int]]) -> Tensor:  # [len(rows)]
        """Returns the score of each row; the last token is found by length: the pad id may be a token."""
        ids, mask, lengths = self.padded(rows)
        last = torch.arange(len(rows), device=self.device), lengths - 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.reads_pairs and "token_type_ids" in self.tokenizer.model_input_names:
            ends = (ids == self.tokenizer.sep_token_id).long()
            inputs["token_type_ids"] = ((ends.cumsum(1) - ends) > 0).long() * mask
        if self._kind == "token":
            scores: Tensor = self.model(**inputs).logits[last]
        elif hasattr(self.model, "score"):
            base = getattr(self.model, self.model.base_model_prefix)
            scores = self.model.score(base(**inputs).last_hidden_state[last])
        else:
            scores = self.model(**inputs).logits
        return scores.float().squeeze(-1).cpu()
