"""The `sft_trainer` tree: supervised fine-tuning on prompts and responses or on conversations.

Batch sizes are in sequences here; there is no rollout and no reward.
"""

from __future__ import annotations

from typing import Literal

from hone.config.block import SchemaBlock, block, follows
from hone.config.data import RowsConfig
from hone.config.engine import (
    CheckpointConfig,
    MicroBatches,
    OptimConfig,
    SFTEngineConfig,
    sequence_parallel,
)
from hone.config.model import ModelConfig
from hone.config.ranges import Count
from hone.config.trainer import RunTree, TrainingRunConfig


class MultiTurnDataConfig(SchemaBlock):
    """Rows that hold whole conversations."""

    enable: bool | None = None
    """Train on conversations; null does so if the file has the messages column."""
    messages_key: str = "messages"
    """Column of the messages."""
    tools_key: str = "tools"
    """Column of the tool schemas."""
    enable_thinking_key: str = "enable_thinking"
    """Column that sets the template's thinking mode."""


class PackedDataConfig(MicroBatches, RowsConfig):
    """Rows that are encoded before the first update."""

    train_batch_size: Count = 256
    """Sequences in one update, over all ranks."""
    micro_batch_size: Count | None = None
    """Sequences in one forward over all ranks; prefer `micro_batch_size_per_gpu`."""
    micro_batch_size_per_gpu: Count | None = None
    """Sequences in one forward on one rank; used if `use_dynamic_bsz` is false."""
    max_token_len_per_gpu: Count = 8192
    """Token budget of one forward and backward on one rank; at least the longest row."""
    use_dynamic_bsz: bool = True
    """Form micro-batches by token budget."""
    train_files: tuple[str, ...] = ("~/data/gsm8k/train.parquet",)
    val_files: tuple[str, ...] | None = None
    """Files for the validation loss; null disables it."""
    max_length: Count = 1024
    """Maximum prompt plus response in tokens."""
    truncation: Literal["error", "left", "right"] = "error"
    """How a longer row is handled; error treats it as invalid (`on_bad_row`)."""
    balance_dp_token: bool = True
    """Balance the number of tokens over the ranks."""
    chat_template: str | None = None
    """Chat template text that replaces the tokenizer's."""


class SFTDataConfig(PackedDataConfig):
    """Training and validation examples."""

    prompt_key: str = "question"
    """Column of the prompt."""
    response_key: str = "answer"
    """Column of the response."""
    prompt_dict_keys: tuple[str, ...] | None = None
    """Keys to follow inside the prompt column."""
    response_dict_keys: tuple[str, ...] | None = None
    """Keys to follow inside the response column."""
    multiturn: MultiTurnDataConfig = block(MultiTurnDataConfig)
    ignore_input_ids_mismatch: bool = False
    """Continue if turn-by-turn and whole-conversation rendering differ."""


class SFTTrainerSection(TrainingRunConfig):
    """The training run."""

    save_freq: int | Literal["after_each_epoch"] = -1
    """Updates between checkpoints; -1 saves only at the end."""
    test_freq: int | Literal["after_each_epoch"] = -1
    """Updates between validations; -1 validates only at the end."""
    max_ckpt_to_keep: int | None = None
    """Number of checkpoints to keep; null keeps all."""


class SupervisedConfig(RunTree):
    """The config of a training run over encoded rows."""

    data: PackedDataConfig = block(PackedDataConfig)
    model: ModelConfig = block(ModelConfig)
    optim: OptimConfig = block(
        OptimConfig,
        lr=1e-5,
        betas=(0.9, 0.95),
        lr_warmup_steps_ratio=0.1,
        lr_scheduler_type="cosine",
    )
    engine: SFTEngineConfig = block(SFTEngineConfig)
    checkpoint: CheckpointConfig = block(CheckpointConfig)
    trainer: SFTTrainerSection = block(SFTTrainerSection)
    ulysses_sequence_parallel_size: Count = follows("engine.ulysses_sequence_parallel_size")
    """Ranks that split each sequence; the token budget grows by this factor."""

    @property
    def ranks_per_slot(self) -> int:
        """The number of ranks that get the same rows."""
        return sequence_parallel(self, self.engine) * self.engine.tensor_parallel_size


class SFTConfig(SupervisedConfig):
    """The config of a supervised fine-tuning run."""

    data: SFTDataConfig = block(SFTDataConfig)
    trainer: SFTTrainerSection = block(
        SFTTrainerSection, project_name="gsm8k-sft", experiment_name="test", total_epochs=4
    )
