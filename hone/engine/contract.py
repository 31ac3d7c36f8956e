"""The interface between training engines and workers; other strategies can implement it.

An engine calls the objective on each micro-batch, sets the mini-batch counts that `agg_loss` divides by, and
manages devices and ranks. Under pipeline parallel, only the last stage calls the objective. Workers use only
this interface.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from hone.config.engine import FSDPConfig, MegatronConfig, OptimConfig
from hone.models.families import config_field, key_shape
from hone.models.load import eos_ids
from hone.models.lora import AdapterSettings, is_lora
from hone.models.policy import PolicyModel
from hone.ops.rows import MicroBatchRule
from hone.protocol import DataProto
from hone.tokenizer import Tokenizer
from hone.types import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Mesh:
    """The coordinates of this rank. Rows are dispatched over the data-parallel dimension only.

    The ranks of one data-parallel slot get the same rows and share the work on them.
    """

    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    sequence_rank: int = 0
    sequence_size: int = 1
    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1

    @functools.cached_property
    def ranks_per_slot(self) -> int:
        """The number of ranks per data-parallel slot."""
        return self.sequence_size * self.tensor_size * self.pipeline_size

    @property
    def is_collector(self) -> bool:
        """Whether this rank returns the results of its slot; true for one rank per slot."""
        return self.sequence_rank == self.tensor_rank == self.pipeline_rank == 0

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes files that only one rank may write."""
        return self.is_collector and self.data_parallel_rank == 0


@dataclass(frozen=True)
class ModelFacts:
    """Properties of the whole model, even on a rank that holds only one shard."""

    vocab_size: int
    """Number of rows of the input embedding."""
    max_position_embeddings: int | None
    """Maximum sequence length of the model's config, if it has one."""
    eos_ids: tuple[int, ...]
    """End-of-sequence token ids from the model's configs."""
    dtype: torch.dtype
    parameters: int
    parameter_bytes: int
    layers: int
    attention_width: int
    """Total width of a layer's attention heads."""
    kv_bytes_per_token: int
    """Size of one token's keys and values in the KV cache."""
    has_adapters: bool = False
    """Whether LoRA adapters are trained on a frozen base model."""

    @classmethod
    def of(cls, lm: PreTrainedModel) -> ModelFacts:
        """Returns the properties of a model, even if it is sharded or offloaded."""
        config = lm.config.get_text_config()
        kv_heads, head_dim = key_shape(config)
        weights = list(lm.parameters())
        cached_elements_per_token = 2 * config.num_hidden_layers * kv_heads * head_dim
        return cls(
            vocab_size=lm.get_input_embeddings().weight.shape[0],
            max_position_embeddings=config_field(config, "max_position_embeddings"),
            eos_ids=eos_ids(lm.config, getattr(lm, "generation_config", None), None),
            dtype=weights[0].dtype,
            parameters=sum(p.numel() for p in weights),
            parameter_bytes=sum(p.nbytes for p in weights),
            layers=config.num_hidden_layers,
            attention_width=config.num_attention_heads * head_dim,
            kv_bytes_per_token=cached_elements_per_token * weights[0].itemsize,
            has_adapters=is_lora(lm),
        )


@dataclass(frozen=True)
class Lease:
    """The training module, unsharded, on the device and in eval mode while the lease is held."""

    policy: PolicyModel
    """The same object at every lease; use it for computation only while the lease is held."""
    address_version: int
    """Changes whenever the parameters may have moved to other addresses."""


@dataclass(frozen=True)
class ObjectiveOutput:
    """The result of an objective for one micro-batch."""

    loss: Tensor
    """This micro-batch's share of the mini-batch loss; the shares add up to the loss."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics that the engine sums over micro-batches and ranks, such as parts of the loss."""
    means: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Means over this micro-batch's loss tokens; the engine weights them by the number of tokens."""
    maxima: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Metrics whose maximum is reported."""


MicroBatchRuleFactory = Callable[[int], MicroBatchRule]
"""Maps the number of data-parallel slots to the rule that splits a mini-batch on one rank."""


@dataclass(frozen=True)
class EngineSpec:
    """The only argument of the engine that `strategy` names: `Engine(spec)`.

    If `world_size` is above 1, torch.distributed is already initialized.
    """

    head: Literal["policy", "value", "step_scores", "score"]
    """Decides what `infer` returns. policy: log_probs, on request entropy and sum_pi_squared; value: values;
    step_scores: scores of a token classifier with two labels; score: scores of a sequence classifier."""
    model_path: str
    device: torch.device
    dtype: torch.dtype
    """The dtype of parameters and computation; master weights are float32."""
    fsdp: FSDPConfig
    """The `fsdp_config` block of the role: sharding, offload, dropout seed."""
    train_micro_batch_rule: MicroBatchRuleFactory
    """Returns the rule that splits the mini-batch of an update on one rank."""
    infer_micro_batch_rule: MicroBatchRuleFactory
    """Returns the rule that splits the batch of `infer` on one rank."""
    response_width: int
    """Maximum response length; the divisor of `seq-mean-token-sum-norm`."""
    optim: OptimConfig | None = None
    """None for a model that is not trained."""
    grad_clip: float = 0.0
    """The maximum gradient norm; 0 disables clipping."""
    override_config: Settings = field(default_factory=dict)
    """Overrides of the model's config.json."""
    gradient_checkpointing: bool = False
    adapters: AdapterSettings | None = None
    seed: int = 0
    """The seed of newly initialized weights."""
    compile_blocks: bool = False
    """Whether torch.compile compiles the decoder layers."""
    label_tokens: tuple[int, int] | None = None
    """The token ids of a bad and a good step; their LM-head weights become the weights of the classifier."""
    trained_part: Literal["all", "head"] = "all"
    """all: the whole model; head: only the head of a classifier, on a frozen decoder."""
    replays_routing: bool = False
    """Whether the engine replays the column `routed_experts`, and returns it if `with_routing` is set."""
    rank: int = 0
    world_size: int = 1
    sequence_parallel: int = 1
    """Number of ranks that split each packed row of a slot (Ulysses). Token budgets are per rank."""
    tensor_parallel: int = 1
    """Number of ranks that split the matrices of each layer."""
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    """The `megatron` block of the role, which only strategy=megatron reads."""


class Options(TypedDict, total=False):
    """Arguments of the model's forward pass."""

    temperature: float
    with_entropy: bool
    with_sum_pi_squared: bool
    with_routing: bool
    """Whether to return `routed_experts`; needs `EngineSpec.replays_routing`."""


class Objective(Protocol):
    """A loss over the model's outputs on one micro-batch."""

    options: Options
    needs_batch_statistics: bool
    """Whether `prepare` is called, with the outputs of a pass over the whole mini-batch."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that `mask`, `prepare` and `__call__` read; the engine removes all others.

        A batch may lack some of these columns.
        """

    def mask(self, batch: DataProto) -> Tensor:
        """Returns a mask [B, T]: 1 for tokens in the loss, 0 for others.

        Padded rows, which only fill the batch, are 0 (`hone.protocol.real_row_mask`).
        """

    def prepare(self, outputs: Mapping[str, Tensor], batch: DataProto) -> dict[str, Tensor]:
        """Computes columns that need the whole mini-batch, once and without gradient."""

    def __call__(self, outputs: Mapping[str, Tensor], batch: DataProto) -> ObjectiveOutput: ...


class TrainEngine(Protocol):
    """One model on this rank, which is trained or only runs forward."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def model_facts(self) -> ModelFacts: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def updates(self) -> int:
        """The number of optimizer steps, which is the weight version; 0 for a model that is not trained."""

    def on_device(self, *, optimizer: bool = False) -> AbstractContextManager[None]:
        """Keeps offloaded tensors on the device inside the block.

        Every other method enters such a block itself; a block around two calls saves the moves between them.
        """

    def train_minibatch(self, batch: DataProto, objective: Objective) -> dict[str, float]:
        """Runs one update; `batch` holds this data-parallel slot's rows of the mini-batch.

        Returns the objective's metrics over all ranks, and `grad_norm`, `lr`, `skipped_updates`.
        """

    def infer(
        self, batch: DataProto, *, adapters: bool = True, **options: Unpack[Options]
    ) -> dict[str, Tensor]:
        """Returns outputs [B, T], without gradient; `adapters=False` runs the frozen base model."""

    def advance_schedule(self) -> None:
        """Advances the learning-rate schedule by one training step."""

    def named_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields full tensors by Hugging Face name, with adapters merged; every rank must iterate."""

    def named_adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the adapters' full tensors by PEFT name; every rank must iterate."""

    def lease(self) -> AbstractContextManager[Lease]:
        """Lends the module for decoding; all ranks enter and leave together."""

    def save(self, folder: Path, contents: Collection[str]) -> None:
        """Writes the named parts: model, optimizer, extra (the schedule's progress)."""

    def load(self, folder: Path, contents: Collection[str] | None = None) -> None:
        """Reads the named parts; None reads all saved parts."""

    def export(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Writes a folder for `from_pretrained`; every rank calls it, one rank writes."""
