"""What a training engine promises its workers, narrow enough for another strategy to keep.

The engine calls the objective (so that pipeline stages could), divides by counts of the whole
mini-batch, and owns everything about devices and ranks. Workers hold nothing but this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from hone.config.engine import FSDPConfig, OptimConfig
from hone.engine.microbatch import MicroBatchRule
from hone.models.lora import Adapters
from hone.models.policy import PolicyModel
from hone.protocol import DataProto
from hone.tokenizer import Tokenizer
from hone.types import Settings


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands. Rows are dispatched over the data-parallel dimension only.

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

    @property
    def ranks_per_slot(self) -> int:
        """Ranks that share the rows of one data-parallel slot."""
        return self.sequence_size * self.tensor_size * self.pipeline_size

    @property
    def collects(self) -> bool:
        """Whether this rank's results are its slot's: true for one rank per slot."""
        return self.sequence_rank == self.tensor_rank == self.pipeline_rank == 0

    @property
    def writes(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.collects and self.data_parallel_rank == 0


@dataclass(frozen=True)
class ModelFacts:
    """What workers ask about the whole model, whatever part of it a rank holds."""

    vocabulary: int
    """Token ids that the input embedding knows."""
    positions: int | None
    """Longest sequence the model was made for, where its config says."""
    eos_ids: tuple[int, ...]
    """Token ids that the model's own configs say end a response."""
    dtype: torch.dtype
    parameters: int
    parameter_bytes: int
    layers: int
    attention_width: int
    """Width of all attention heads of a layer together."""
    kv_bytes_per_token: int
    """Keys and values that one token adds to a cache."""
    has_adapters: bool = False
    """Whether LoRA adapters are trained over a frozen base."""


@dataclass(frozen=True)
class Lease:
    """The training module for decoding: inside the block it is whole, present and in eval mode."""

    policy: PolicyModel
    """One object for the engine's life. It may be held, and computed with inside the block only."""
    generation: int
    """Another number than at the last lease where parameters may lie at other addresses."""


@dataclass(frozen=True)
class Terms:
    """What an objective gives back for one micro-batch."""

    loss: Tensor
    """This micro-batch's share of the mini-batch loss; the shares sum to it."""
    shares: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics that sum over micro-batches and ranks (parts of the loss)."""
    means: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Metrics that are means over this micro-batch's loss tokens."""
    maxima: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Metrics whose largest value counts."""


RowsPerRank = Callable[[int], MicroBatchRule]
"""How a mini-batch is cut on one rank, from the number of data-parallel slots."""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is built from. What `strategy` names is called with it alone: `Engine(spec)`.

    The process has joined its peers (torch.distributed) where `world_size` is above 1.
    """

    head: Literal["policy", "value"]
    """policy: `infer` gives log_probs (and entropy, sum_pi_squared); value: values."""
    model_path: str
    device: torch.device
    dtype: torch.dtype
    """In which parameters are held and computed with; masters are float32."""
    fsdp: FSDPConfig
    """The `fsdp_config` block of the role: sharding, offload, seed of dropout."""
    train_rule: RowsPerRank
    infer_rule: RowsPerRank
    response_width: int
    """Longest response: the divisor of `seq-mean-token-sum-norm`."""
    optim: OptimConfig | None = None
    """None: the model is only run forward."""
    grad_clip: float = 0.0
    override_config: Settings = field(default_factory=dict)
    """Changes to the model's own config."""
    gradient_checkpointing: bool = False
    adapters: Adapters | None = None
    seed: int = 0
    """Of new weights."""
    compile_blocks: bool = False
    rank: int = 0
    world_size: int = 1


class Options(TypedDict, total=False):
    """Arguments of the model's forward."""

    temperature: float
    with_entropy: bool
    with_sum_pi_squared: bool


class Objective(Protocol):
    """A loss over the model's outputs on one micro-batch."""

    options: Options
    needs_batch_statistics: bool
    """Whether `prepare` is called, with the outputs of a pass over the whole mini-batch."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that `mask`, `prepare` and `__call__` read: a micro-batch carries no others, and of
        these the ones that the batch has."""

    def mask(self, batch: DataProto) -> Tensor:
        """[B, T] the tokens that the loss counts; rows that only even out the ranks are not among them
        (`hone.protocol.real_rows`)."""

    def prepare(self, outputs: Mapping[str, Tensor], batch: DataProto) -> dict[str, Tensor]:
        """Columns that need the whole mini-batch, computed once without gradient."""

    def __call__(self, outputs: Mapping[str, Tensor], batch: DataProto) -> Terms: ...


class TrainEngine(Protocol):
    """One model under training (or only run forward) on this rank."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def updates(self) -> int:
        """Optimizer steps so far: the version of the weights. 0 for a model that is not trained."""

    def present(self, *, optimizer: bool = False) -> AbstractContextManager[None]:
        """Inside, what rests on the host between phases is on the device. Every other verb enters
        it by itself; a caller enters it to keep parameters there between verbs."""

    def train_minibatch(self, batch: DataProto, objective: Objective) -> dict[str, float]:
        """One update. `batch` holds this data-parallel slot's rows of the mini-batch.

        Returns the objective's metrics over all ranks, and `grad_norm`, `lr`, `skipped_updates`.
        """

    def infer(
        self, batch: DataProto, *, adapters: bool = True, **options: Unpack[Options]
    ) -> dict[str, Tensor]:
        """Outputs [B, T] for every row, without gradient; `adapters=False` is the frozen base."""

    def advance_schedule(self) -> None:
        """One training step is over: the learning-rate schedule moves on."""

    def named_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by their Hugging Face names, adapters merged. Every rank iterates it."""

    def named_adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters' whole tensors alone, by PEFT's names. Every rank iterates it."""

    def lease(self) -> AbstractContextManager[Lease]:
        """The module for decoding with it; every rank enters and leaves together."""

    def save(self, folder: Path, contents: Collection[str]) -> None:
        """Write the named parts: model, optimizer, extra (how far the schedule is)."""

    def load(self, folder: Path, contents: Collection[str] | None = None) -> None:
        """Read the named parts; None reads all that was written."""

    def export(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Write what `from_pretrained` opens. Every rank calls it, one writes."""
