"""The model state of a rank: parameters (full or sharded, on the device or offloaded) and optimizer.

Parameters leave the engine only through this file: lease, streamed weights, checkpoint and export.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hone.engine.checkpoint import load_checkpoint, save_checkpoint
from hone.engine.contract import Lease, Mesh, ModelFacts
from hone.engine.offload import Offload
from hone.engine.optimizer import Optimizer
from hone.models.families import config_field, key_shape
from hone.models.load import EXPORT_FOLDER, eos_ids
from hone.models.lora import (
    ADAPTER_FOLDER,
    adapter_weights,
    full_tensor,
    is_lora,
    merged_weights,
    save_adapter,
)
from hone.models.policy import PolicyModel
from hone.models.writing import without_progress_bar
from hone.tokenizer import Tokenizer

if TYPE_CHECKING:  # these imports take seconds, and a single rank does not need sharding.py
    from transformers import PreTrainedModel

    from hone.engine.sharding import ShardedModule


class ModelState:
    """Parameters and optimizer of one rank; several ranks shard the module (sharding.py)."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        sharded_module: ShardedModule | None,
        offload: Offload | None,
    ) -> None:
        self.module = module
        # Offloaded shards are on another device than the one that computes.
        self.device: torch.device = (
            next(module.parameters()).device if sharded_module is None else sharded_module.device
        )
        self.optimizer = optimizer
        self.offload = offload
        self.mesh = Mesh() if sharded_module is None else sharded_module.groups.mesh
        self._sharded_module = sharded_module
        self._data_group = None if sharded_module is None else sharded_module.groups.data
        self._gather_count = self._load_count = 0

    @functools.cached_property
    def facts(self) -> ModelFacts:
        return model_facts(self._lm)

    @property
    def updates(self) -> int:
        return 0 if self.optimizer is None else self.optimizer.updates

    @property
    def _lm(self) -> PreTrainedModel:
        return self.module.lm

    def on_device(self, *, optimizer: bool = False) -> AbstractContextManager[None]:
        """Keeps offloaded tensors on the device inside the block; nested blocks do not move them."""
        if self.offload is None:
            return nullcontext()
        return self.offload.on_device(optimizer=optimizer)

    def _adapters_disabled(self) -> AbstractContextManager[None]:
        if not self.facts.has_adapters:
            raise ValueError(
                "infer(adapters=False) runs the base model of LoRA adapters, but this model has no adapters"
            )
        context: AbstractContextManager[None] = self._lm.disable_adapter()
        return context

    def advance_schedule(self) -> None:
        assert self.optimizer is not None, "this engine only runs forward"
        self.optimizer.advance_schedule()

    def named_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.facts.has_adapters:
            with self._gathered():
                yield from merged_weights(self._lm)
            return
        with self.on_device():
            for name, parameter in self.module.named_parameters():
                yield name.removeprefix("lm."), full_tensor(parameter)

    def named_adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        if not self.facts.has_adapters:
            raise ValueError("this model has no adapters; use named_hf_weights")
        with self.on_device():
            yield from adapter_weights(self._lm)

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        if not isinstance(self.module, PolicyModel):
            raise TypeError(
                f"a {type(self.module).__name__} does not decode; lease the actor's engine"
            )
        with self._gathered():
            self.module.eval()
            reload_count = 0 if self.offload is None else self.offload.reload_count
            yield Lease(self.module, self._gather_count + self._load_count + reload_count)

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Gathers the full parameters on every rank inside the block."""
        if self._sharded_module is None:
            with self.on_device():
                yield
            return
        self._gather_count += 1
        with self.on_device(), self._sharded_module.gathered():
            yield

    def save(self, folder: Path, contents: Collection[str]) -> None:
        with self.on_device(optimizer=True):
            save_checkpoint(folder, self.module, self.optimizer, contents)

    def load(self, folder: Path, contents: Collection[str] | None = None) -> None:
        with self.on_device(optimizer=True):
            load_checkpoint(folder, self.module, self.optimizer, contents)
        self._load_count += 1

    def export(self, folder: Path, tokenizer: Tokenizer) -> None:
        adapter_copies = {}
        with self.on_device():
            weights = self._host_copies(self.named_hf_weights())
            if self.facts.has_adapters:
                adapter_copies = self._host_copies(self.named_adapter_weights())
        if not self.mesh.writes:
            return
        base = self._lm.get_base_model() if self.facts.has_adapters else self._lm
        # transformers' classifiers need a padding token for batches.
        if hasattr(base, "score") and base.config.pad_token_id is None:
            base.config.pad_token_id = tokenizer.pad_token_id
        with without_progress_bar():
            base.save_pretrained(folder / EXPORT_FOLDER, state_dict=weights)
        tokenizer.save_pretrained(folder / EXPORT_FOLDER)
        if adapter_copies:
            save_adapter(self._lm, adapter_copies, folder / ADAPTER_FOLDER)

    def _host_copies(self, weights: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Returns host copies on the rank that writes files, {} on others; all ranks must call this."""
        copies = {}
        for name, tensor in weights:
            if self.mesh.writes:
                copies[name] = tensor.cpu().contiguous().clone()
        return copies

    def _reduce_over_slots(
        self, values: dict[str, float], operation: dist.ReduceOp.RedOpType
    ) -> dict[str, float]:
        """Reduces each value over the data-parallel slots."""
        if self._data_group is None or not values:
            return values
        names = sorted(values)
        reduced_values = torch.tensor([values[name] for name in names], dtype=torch.float64)
        dist.all_reduce(reduced_values, operation, group=self._data_group)
        return dict(zip(names, reduced_values.tolist(), strict=True))


def model_facts(lm: PreTrainedModel) -> ModelFacts:
    """Returns the properties of the whole model, even if it is sharded or offloaded."""
    config = lm.config.get_text_config()
    kv_heads, head_dim = key_shape(config)
    weights = list(lm.parameters())
    return ModelFacts(
        vocabulary=lm.get_input_embeddings().weight.shape[0],
        max_position_embeddings=config_field(config, "max_position_embeddings"),
        eos_ids=eos_ids(lm.config, getattr(lm, "generation_config", None), None),
        dtype=weights[0].dtype,
        parameters=sum(p.numel() for p in weights),
        parameter_bytes=sum(p.nbytes for p in weights),
        layers=config.num_hidden_layers,
        attention_width=config.num_attention_heads * head_dim,
        kv_bytes_per_token=config.num_hidden_layers * 2 * kv_heads * head_dim * weights[0].itemsize,
        has_adapters=is_lora(lm),
    )
