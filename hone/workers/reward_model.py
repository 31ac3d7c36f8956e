"""The outcome reward model: a frozen Hugging Face classifier with one label that scores each response.

A batch is right-padded. A classifier whose head scores every token gives the score at the last token of the
row; an encoder pools in its own way. Encoders read prompt and response as a pair of texts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hone.agents.collate import input_ids
from hone.config import PPOTrainerConfig
from hone.controller import Dispatch, Worker, register
from hone.data.messages import as_messages
from hone.engine.offload import Offload, build_offload
from hone.models.facts import UnsupportedModel, classifier_kind
from hone.models.from_config import import_external
from hone.models.load import copy_from_files, load_tokenizer, translate_load_errors
from hone.models.paths import resolve_model_path
from hone.ops.rows import MicroBatchRule, split_at_response
from hone.protocol import DataProto
from hone.rewards.conversation import (
    Prompt,
    conversation_text,
    escape_special_tokens,
    has_template,
    prompt_text,
)
from hone.rewards.managers.rule import place_on_last_policy_token
from hone.types import Fields
from hone.workers.device import pick_device, pick_dtype, prepare_process

if TYPE_CHECKING:
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

logger = logging.getLogger(__name__)


class RewardModelWorker(Worker):
    """A classifier replicated on every rank; `param_offload` keeps it on the host between batches."""

    def __init__(self, config: PPOTrainerConfig) -> None:
        super().__init__()
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        import transformers

        run_config, config = self.config, self.config.reward_model
        model = config.model
        trust_remote_code = model.trust_remote_code
        self._classifier_kind = classifier_kind(
            str(model.path), trust_remote_code=trust_remote_code
        )
        auto_class: type[_BaseAutoModelClass] = transformers.AutoModelForTokenClassification
        if self._classifier_kind == "sequence":
            auto_class = transformers.AutoModelForSequenceClassification
        self.device = pick_device(run_config.trainer.device, self.local_rank)
        timeout_s = run_config.actor_rollout_ref.nccl_timeout
        prepare_process(self.device, self.world_size, timeout_s, [model.fsdp_config])
        import_external(model.external_lib)
        self._load_model(auto_class)
        self._offload = build_offload(self.model, None, model.fsdp_config) or Offload()
        self._offload.start()
        self._micro_batch_rule = MicroBatchRule(
            config.sequences_per_micro_batch(self.world_size), config.forward_max_token_len_per_gpu
        )
        tokenizer = load_tokenizer(str(model.path), trust_remote_code=trust_remote_code)
        self.tokenizer = self.policy_tokenizer = tokenizer
        if name := model.input_tokenizer:
            self.policy_tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
        self.reads_pairs = tokenizer.cls_token_id is not None and not tokenizer.chat_template
        self._reads_policy_ids = not self.reads_pairs and self._policy_ids_match()
        text_config = self.model.config.get_text_config()
        max_positions = getattr(text_config, "max_position_embeddings", None)
        limits = (config.max_length, max_positions, tokenizer.model_max_length)
        self._max_length = min((limit for limit in limits if limit and limit > 0), default=None)
        self._has_warned = False

    def _load_model(self, auto_class: type[_BaseAutoModelClass]) -> None:
        """Loads the model on this rank's device; raises UnsupportedModel for a model that cannot score."""
        model = self.config.reward_model.model
        folder = resolve_model_path(str(model.path))
        config_overrides: Fields = {**model.override_config, "num_labels": 1}
        with translate_load_errors(str(model.path), folder):
            self.model, loading_info = auto_class.from_pretrained(
                folder,
                dtype=pick_dtype(model.fsdp_config.dtype, self.device),
                trust_remote_code=model.trust_remote_code,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **config_overrides,
            )
        # transformers initializes mismatched and missing weights at random.
        key = f"reward_model.model.path={model.path}"
        for name, stored_shape, _ in loading_info["mismatched_keys"]:
            raise UnsupportedModel(
                f"{key} has {stored_shape[0]} labels ({name}), and this reward model needs 1; name a "
                "classifier with one label"
            )
        if names := sorted(loading_info["missing_keys"]):
            raise UnsupportedModel(
                f"{key} has no trained weights for {names[0]} of {type(self.model).__name__}; name a "
                "trained reward model, or use reward_model.type=judge for a model that generates text"
            )
        copy_from_files(self.model, self.device)
        self.model.to(self.device).eval()
        if self._classifier_kind == "sequence" and hasattr(self.model, "sequence_summary"):
            raise UnsupportedModel(
                f"reward_model.model.path={model.path} is a {type(self.model).__name__}, whose pooling "
                "reads padding; use a decoder or a BERT-like encoder with a classification head"
            )

    def _policy_ids_match(self) -> bool:
        """Whether the policy's tokenizer and chat template give the same ids as the reward model's."""
        if self.policy_tokenizer is self.tokenizer:
            return True
        if self.policy_tokenizer.get_vocab() != self.tokenizer.get_vocab():
            return False
        custom_template = self.config.actor_rollout_ref.model.custom_chat_template
        policy_template = custom_template or self.policy_tokenizer.chat_template
        template_matches = self.tokenizer.chat_template in (None, policy_template)
        return self.config.data.prompt_format != "chat" or template_matches

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Returns `rm_scores` [B, T]: the score at the last policy token, 0 elsewhere."""
        scores = self.score_rows(self._encode_rows(data))
        return DataProto.from_dict({"rm_scores": place_on_last_policy_token(data, scores)})

    def score_rows(self, rows: Sequence[list[int]]) -> list[float]:
        """Returns the score of each row, which is a list of the reward model's token ids."""
        rows = [self._truncate(ids) for ids in rows]
        scores = [0.0] * len(rows)
        with self._offload.on_device():
            for indices in self._micro_batch_rule.split([len(ids) for ids in rows]):
                batch_scores = self._score([rows[i] for i in indices])
                for i, score in zip(indices, batch_scores.tolist(), strict=True):
                    scores[i] = score
        if not all(map(math.isfinite, scores)):
            raise ValueError(
                f"reward_model.model.path={self.config.reward_model.model.path} gave a score that is not "
                "finite; check its weights, or use reward_model.model.fsdp_config.dtype=fp32"
            )
        return scores

    def _truncate(self, ids: list[int]) -> list[int]:
        """Truncates a row from the left to the maximum length; warns the first time."""
        if self._max_length is None or len(ids) <= self._max_length:
            return ids
        if not self._has_warned:
            self._has_warned = True
            message = (
                "rows of more than %d tokens (reward_model.max_length) are truncated from the left; the "
                "first of them has %d tokens"
            )
            logger.warning(message, self._max_length, len(ids))
        return ids[-self._max_length :]

    def _encode_rows(self, data: DataProto) -> list[list[int]]:
        """Returns each row's prompt and response as tokens of the reward model, without padding."""
        columns = data.batch
        if self._reads_policy_ids:
            ids, mask = input_ids(data), columns["attention_mask"].bool()
            return [row[is_token].tolist() for row, is_token in zip(ids, mask, strict=True)]
        _, mask = split_at_response(columns["attention_mask"].bool(), columns["responses"])
        rows = [ids[is_token] for ids, is_token in zip(columns["responses"], mask, strict=True)]
        texts = [self.policy_tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]
        responses = [escape_special_tokens(text, self.tokenizer) for text in texts]
        prompts = list(data.non_tensor_batch["raw_prompt"])
        if self.config.data.prompt_format == "chat":
            prompts = [as_messages(prompt) for prompt in prompts]
        return [self.encode(*pair) for pair in zip(prompts, responses, strict=True)]

    def encode(self, prompt: Prompt, response: str) -> list[int]:
        """Returns the tokens of a prompt and its response."""
        if self.reads_pairs:
            pair, max_length = (prompt_text(prompt), response), self._max_length
            options = {"truncation": bool(max_length), "max_length": max_length or None}
            return list(self.tokenizer(*pair, **options)["input_ids"])
        text = conversation_text(prompt, response, self.tokenizer)
        is_rendered = not isinstance(prompt, str) and has_template(self.tokenizer)
        return list(self.tokenizer.encode(text, add_special_tokens=not is_rendered))

    @torch.no_grad()
    def _score(self, rows: list[list[int]]) -> Tensor:  # [len(rows)]
        """Returns the score of each row.

        The last token is found by the length of a row, because the padding id may be a real token.
        """
        max_length, pad_id = max(map(len, rows)), self.tokenizer.pad_token_id
        padded_rows = [row + [pad_id] * (max_length - len(row)) for row in rows]
        ids = torch.tensor(padded_rows, device=self.device)
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        mask = (torch.arange(max_length, device=self.device)[None] < lengths[:, None]).long()
        last_token_indices = torch.arange(len(rows), device=self.device), lengths - 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.reads_pairs and "token_type_ids" in self.tokenizer.model_input_names:
            is_separator = (ids == self.tokenizer.sep_token_id).long()
            is_second_text = (is_separator.cumsum(1) - is_separator) > 0
            inputs["token_type_ids"] = is_second_text.long() * mask
        if self._classifier_kind == "token":
            scores: Tensor = self.model(**inputs).logits[last_token_indices]
        elif hasattr(self.model, "score"):
            base = getattr(self.model, self.model.base_model_prefix)
            scores = self.model.score(base(**inputs).last_hidden_state[last_token_indices])
        else:
            scores = self.model(**inputs).logits
        return scores.float().squeeze(-1).cpu()
