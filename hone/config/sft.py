"""The trees of supervised training: `sft_trainer`, and `prm_trainer` and `rm_trainer` for reward models.

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
from hone.config.ranges import Count, CountOrZero, Fraction, NotNegative
from hone.config.trainer import RunTree, TrainingRunConfig
from hone.types import Settings

_COSINE_SCHEDULE: Settings = {"lr_warmup_steps_ratio": 0.1, "lr_scheduler_type": "cosine"}


class MultiTurnDataConfig(SchemaBlock):
    """Rows that hold whole conversations."""

    enable: bool | None = None
    """Train on conversations; null is true if the file has the messages column."""
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
    """Continue if the chat template renders the turns one by one differently from the whole conversation."""


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
    optim: OptimConfig = block(OptimConfig, lr=1e-5, betas=(0.9, 0.95), **_COSINE_SCHEDULE)
    engine: SFTEngineConfig = block(SFTEngineConfig)
    checkpoint: CheckpointConfig = block(CheckpointConfig)
    trainer: SFTTrainerSection = block(SFTTrainerSection)
    ulysses_sequence_parallel_size: Count = follows("engine.ulysses_sequence_parallel_size")
    """Ranks that split each sequence; their number multiplies the token budget."""

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


StepFormat = Literal["auto", "steps", "prm800k", "math_shepherd", "processbench"]


class StepDataConfig(PackedDataConfig):
    """Solutions with a label per step."""

    train_batch_size: Count = 128
    """Solutions in one update, over all ranks."""
    format: StepFormat = "auto"
    """Layout of a row: steps has prompt, completions and labels; auto reads the layout from the columns."""
    completions_key: str = "completions"
    """steps format: column of the list of steps."""
    labels_key: str = "labels"
    """steps format: column of the labels: true or false, a probability, or null for no label."""
    step_separator: str = "\n"
    """Text of the token after each step, at which the step is scored; `reward_model.step_separator` in RL."""
    step_labels: tuple[str, str] | None = None
    """hone eval-prm: `reward_model.step_labels` of a causal process reward model; null is a classifier."""
    neutral_label: Fraction | None = 1.0
    """prm800k format: label of steps rated 0 (neither good nor bad); null leaves them unlabelled."""
    truncation: Literal["error", "left", "right"] = "left"
    """How a longer row is handled; left keeps its end, as `reward_model.max_length` does in RL."""


class HeadStageConfig(SchemaBlock):
    """PURE's first stage, which trains the new head on a frozen decoder."""

    total_epochs: CountOrZero = 3
    """Passes over the training data; 0 skips the stage."""
    total_training_steps: Count | None = None
    """Number of updates; null is epochs times batches per epoch."""
    lr: NotNegative = 1e-4
    """Learning rate of the head; `optim` has the other settings."""


class PRMTrainerSection(SFTTrainerSection):
    """The training run."""

    total_epochs: CountOrZero = 1
    """Passes over the training data in the second stage, which trains all parameters; 0 skips the stage."""


class PRMConfig(SupervisedConfig):
    """The config of a run that trains a process reward model."""

    data: StepDataConfig = block(
        StepDataConfig, train_files=("~/data/prm800k/train.parquet",), max_length=2048
    )
    head_stage: HeadStageConfig = block(HeadStageConfig)
    optim: OptimConfig = block(OptimConfig, betas=(0.9, 0.95), weight_decay=0.1)
    trainer: PRMTrainerSection = block(
        PRMTrainerSection, project_name="reward-models", experiment_name="prm"
    )


class PairDataConfig(PackedDataConfig):
    """Pairs of a preferred and a rejected response."""

    train_batch_size: Count = 64
    """Pairs in one update, over all ranks."""
    max_token_len_per_gpu: Count = 16384
    """Token budget of one forward and backward on one rank; at least both responses of a pair."""
    chosen_key: str = "chosen"
    """Column of the preferred response: text, messages, or a whole dialogue if there is no prompt."""
    rejected_key: str = "rejected"
    """Column of the rejected response."""
    margin_key: str = "margin"
    """Column of the margin by which the preferred response must win; optional."""
    drop_duplicates: bool = False
    """Treat a repeated pair, also one with swapped responses, as invalid (`on_bad_row`)."""
    truncation: Literal["error", "left"] = "left"
    """How a longer row is handled; left drops the start of the prompt."""


class RMConfig(SupervisedConfig):
    """The config of a run that trains an outcome reward model on preferences."""

    data: PairDataConfig = block(PairDataConfig, train_files=("~/data/preferences/train.parquet",))
    optim: OptimConfig = block(OptimConfig, lr=1e-5, betas=(0.9, 0.95), lr_warmup_steps_ratio=0.03)
    trainer: SFTTrainerSection = block(
        SFTTrainerSection, project_name="reward-models", experiment_name="rm", total_epochs=1
    )
