"""The process reward model (PURE): a score for every reasoning step, from a classifier of two labels.

A step ends with a token whose text ends in `split_step_char`, and with the response. The model reads
`step_separator` in such a token's place and judges the step there. Run once a batch, never trained;
every rank holds all of it. It must share the policy's tokens: ids are reused, never re-encoded.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.credit import assign_credit, step_ends, step_rewards
from hone.config import ConfigError, PPOTrainerConfig
from hone.controller import Dispatch, Worker, register
from hone.engine.microbatch import MicroBatchRule
from hone.engine.offload import HostRest
from hone.models.load import load_tokenizer, resolve_model_path
from hone.protocol import DataProto
from hone.workers.device import pick_device, pick_dtype, prepare_process
from hone.workers.external import import_external


class ProcessRewardModelWorker(Worker):
    def __init__(self, config: PPOTrainerConfig) -> None:
        super().__init__()
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        from transformers import AutoModelForTokenClassification

        config = self.config.reward_model
        self.device = pick_device(self.config.trainer.device, self.local_rank)
        sharding, timeout_s = config.model.fsdp_config, self.config.actor_rollout_ref.nccl_timeout
        prepare_process(self.device, self.world_size, timeout_s, [sharding])
        import_external(config.model.external_lib)
        folder = resolve_model_path(str(config.model.path))
        self.model: Any = AutoModelForTokenClassification.from_pretrained(
            folder,
            num_labels=2,
            dtype=pick_dtype(sharding.dtype, self.device),
            trust_remote_code=config.model.trust_remote_code,
            **config.model.override_config,
        )
        self.model.to(self.device).eval()
        self._rest = HostRest(self.model.parameters) if sharding.param_offload else None
        if self._rest is not None:
            self._rest.away()
        self.tokenizer = self._shared_tokenizer(folder)
        self._separator = self._separator_id()
        self._ends = separator_ids(self.tokenizer, config.split_step_char)
        self._rule = MicroBatchRule(
            config.sequences_per_micro_batch(self.world_size), config.forward_max_token_len_per_gpu
        )

    def _shared_tokenizer(self, folder: str) -> Any:
        model = self.config.reward_model.model
        trust = model.trust_remote_code
        own = load_tokenizer(folder, trust_remote_code=trust)
        if model.input_tokenizer:
            writer = load_tokenizer(model.input_tokenizer, trust_remote_code=trust)
            if writer.get_vocab() != own.get_vocab():
                raise ConfigError(
                    f"reward_model.model.path={model.path} has another vocabulary than the policy "
                    f"({model.input_tokenizer}); a process reward model reads the policy's tokens: use "
                    "one of the same family, or reward_model.type=orm"
                )
        return own

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
        """`rm_scores` [B, T] after credit assignment, and `step_mask` [B, T] where steps end."""
        columns = data.batch
        responses, width = columns["responses"], columns["responses"].shape[1]
        steps = step_ends(responses, columns["response_mask"], self._ends)
        ids = columns["input_ids"].clone()
        ids[:, -width:] = torch.where(steps, self._separator, responses)
        kept = columns["attention_mask"].bool()
        start = -(self.config.reward_model.max_length or ids.shape[1])
        rows = [row[keep].tolist()[start:] for row, keep in zip(ids, kept, strict=True)]
        answered = kept[:, -width:].sum(1).tolist()
        scores = torch.zeros(responses.shape, dtype=torch.float32)
        with nullcontext() if self._rest is None else self._rest.present():
            for part in self._rule.split([len(row) for row in rows]):
                judged = self._judge([rows[i] for i in part])
                for row, rewards in zip(part, judged, strict=True):
                    tokens = answered[row]
                    shown = rewards[-tokens:]  # a head that was cut off has no score
                    scores[row, tokens - len(shown) : tokens] = shown
        credit = self.config.reward_model.credit_assignment
        return DataProto.from_dict(
            {"rm_scores": assign_credit(scores, steps, credit), "step_mask": steps}
        )

    @torch.no_grad()
    def _judge(self, rows: list[list[int]]) -> list[Tensor]:
        """p(good) − p(bad) at every token of each row."""
        width = max(len(ids) for ids in rows)
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([r + [pad] * (width - len(r)) for r in rows], device=self.device)
        lengths = torch.tensor([len(r) for r in rows], device=self.device)
        mask = torch.arange(width, device=self.device)[None] < lengths[:, None]
        logits = self.model(input_ids=ids, attention_mask=mask.long()).logits
        rewards = step_rewards(logits.float()).cpu()
        return [rewards[i, : len(row)] for i, row in enumerate(rows)]


def separator_ids(tokenizer: Any, text: str) -> Tensor:
    """Every token whose text ends so: also those that merge it with what stands before."""
    ids = range(len(tokenizer))
    return torch.tensor([i for i in ids if tokenizer.decode([i]).endswith(text)], dtype=torch.int64)
