"""The outcome reward model: one number a response, from a sequence classifier of one label.

An ordinary padded forward of the Hugging Face model: it is run once a batch and never trained. Every
rank holds all of it. Leaves out process rewards.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hone.config import PPOTrainerConfig
from hone.controller import Dispatch, Worker, register
from hone.engine.microbatch import MicroBatchRule
from hone.engine.offload import HostRest
from hone.models.load import load_tokenizer, resolve_model_path
from hone.protocol import DataProto
from hone.rewards.managers.reading import last_policy_tokens
from hone.workers.device import pick_device, pick_dtype, prepare_process
from hone.workers.external import import_external


class RewardModelWorker(Worker):
    def __init__(self, config: PPOTrainerConfig) -> None:
        super().__init__()
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        from transformers import AutoModelForSequenceClassification

        config = self.config.reward_model
        self.device = pick_device(self.config.trainer.device, self.local_rank)
        sharding, timeout_s = config.model.fsdp_config, self.config.actor_rollout_ref.nccl_timeout
        prepare_process(self.device, self.world_size, timeout_s, [sharding])
        import_external(config.model.external_lib)
        folder = resolve_model_path(str(config.model.path))
        self.model: Any = AutoModelForSequenceClassification.from_pretrained(
            folder,
            num_labels=1,
            dtype=pick_dtype(sharding.dtype, self.device),
            trust_remote_code=config.model.trust_remote_code,
            **config.model.override_config,
        )
        if not hasattr(self.model, "score"):
            raise ValueError(
                f"reward_model.model.path={config.model.path} is a {type(self.model).__name__} without "
                "a `score` head over every token; use a decoder with a sequence-classification head"
            )
        self.model.to(self.device).eval()
        self._rest = HostRest(self.model.parameters) if sharding.param_offload else None
        if self._rest is not None:
            self._rest.away()
        trust = config.model.trust_remote_code
        self.tokenizer = load_tokenizer(folder, trust_remote_code=trust)
        written_with = config.model.input_tokenizer
        self.writer = (
            load_tokenizer(written_with, trust_remote_code=trust) if written_with else None
        )
        self._same_tokens = (
            self.writer is None or self.writer.get_vocab() == self.tokenizer.get_vocab()
        )
        self._rule = MicroBatchRule(
            config.sequences_per_micro_batch(self.world_size), config.forward_max_token_len_per_gpu
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores` [B, T]: the score on the last token the policy wrote, 0 elsewhere."""
        limit = self.config.reward_model.max_length
        rows = [ids if limit is None else ids[-limit:] for ids in self._rows(data)]
        scores = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
        ends = last_policy_tokens(data)
        with nullcontext() if self._rest is None else self._rest.present():
            for part in self._rule.split([len(ids) for ids in rows]):
                found = self._score([rows[i] for i in part])
                for row, score in zip(part, found.tolist(), strict=True):
                    if (end := ends[row]) is not None:
                        scores[row, end] = score
        return DataProto.from_dict({"rm_scores": scores})

    def _rows(self, data: DataProto) -> list[list[int]]:
        """Prompt and response as the reward model's own tokens, without padding."""
        columns = data.batch
        if self._same_tokens:
            kept = columns["attention_mask"].bool()
            return [
                ids[keep].tolist() for ids, keep in zip(columns["input_ids"], kept, strict=True)
            ]
        assert self.writer is not None
        width = columns["responses"].shape[1]
        kept = columns["attention_mask"][:, -width:].bool()
        answers = [
            self.writer.decode(ids[keep], skip_special_tokens=True)
            for ids, keep in zip(columns["responses"], kept, strict=True)
        ]
        prompts = data.non_tensor_batch["raw_prompt"]
        return [self._rendered(p, a) for p, a in zip(prompts, answers, strict=True)]

    def _rendered(self, prompt: Any, answer: str) -> list[int]:
        """The conversation in the reward model's own template; a plain prompt is plain text."""
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt + answer))
        turns = [*prompt, {"role": "assistant", "content": answer}]
        text = self.tokenizer.apply_chat_template(turns, tokenize=False)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @torch.no_grad()
    def _score(self, rows: list[list[int]]) -> Tensor:  # [len(rows)]
        """The head's output at each row's last token, found by length: padding may be a real token."""
        width = max(len(ids) for ids in rows)
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([r + [pad] * (width - len(r)) for r in rows], device=self.device)
        lengths = torch.tensor([len(r) for r in rows], device=self.device)
        mask = torch.arange(width, device=self.device)[None] < lengths[:, None]
        base = getattr(self.model, self.model.base_model_prefix)
        hidden = base(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        last = hidden[torch.arange(len(rows), device=self.device), lengths - 1]
        return self.model.score(last).float().squeeze(-1).cpu()
