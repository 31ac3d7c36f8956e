"""What both reward models are: a Hugging Face classifier that is run once a batch and never trained.

Every rank holds all of it; with `param_offload` it rests on the host between batches. Leaves out what
its outputs mean.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hone.config import PPOTrainerConfig
from hone.controller import Worker
from hone.engine.microbatch import MicroBatchRule
from hone.engine.offload import HostRest
from hone.models.external import import_external
from hone.models.load import load_tokenizer, resolve_model_path
from hone.workers.device import pick_device, pick_dtype, prepare_process

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.models.auto.auto_factory import _BaseAutoModelClass


class FrozenClassifier(Worker):
    def __init__(self, config: PPOTrainerConfig) -> None:
        super().__init__()
        self.config = config

    def load(self, auto_class: type[_BaseAutoModelClass], *, labels: int) -> None:
        """`model`, `tokenizer` and the micro-batch rule, on this rank's device."""
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
        """Inside, the parameters are on the device."""
        return nullcontext() if self._rest is None else self._rest.present()

    def padded(self, rows: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Rows as ids [B, W] padded on the right, their mask [B, W] and lengths [B]."""
        width, pad = max(len(ids) for ids in rows), self.tokenizer.pad_token_id
        ids = torch.tensor([r + [pad] * (width - len(r)) for r in rows], device=self.device)
        lengths = torch.tensor([len(r) for r in rows], device=self.device)
        mask = torch.arange(width, device=self.device)[None] < lengths[:, None]
        return ids, mask.long(), lengths
