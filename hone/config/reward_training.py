"""The trees that train reward models, `prm_trainer` and `rm_trainer`, on the trainer of `sft_trainer`."""

from __future__ import annotations

from typing import Literal

from hone.config.block import SchemaBlock, block
from hone.config.engine import OptimConfig
from hone.config.ranges import Count, CountOrZero, NotNegative, Share
from hone.config.sft import PackedDataConfig, SFTTrainerSection, SupervisedConfig

StepFormat = Literal["auto", "steps", "prm800k", "math_shepherd", "processbench"]


class StepDataConfig(PackedDataConfig):
    """Solutions with a label per step."""

    train_batch_size: Count = 128
    """Solutions in one update, over all ranks."""
    format: StepFormat = "auto"
    """Layout of a row: steps (prompt, completions, labels), prm800k, math_shepherd or processbench; auto
    reads it from the columns."""
    completions_key: str = "completions"
    """steps format: column of the list of steps."""
    labels_key: str = "labels"
    """steps format: column of the labels: true or false, a probability, or null for no label."""
    step_separator: str = "\n"
    """Text of the token after each step, which is scored; `reward_model.step_separator` in RL."""
    step_labels: tuple[str, str] | None = None
    """hone eval-prm: `reward_model.step_labels` of a causal process reward model; null is a classifier."""
    neutral_label: Share | None = 1.0
    """prm800k format: label of steps rated 0 (neither good nor bad); null leaves them unlabelled."""
    truncation: Literal["error", "left", "right"] = "left"
    """How a longer row is handled; left keeps its end, as `reward_model.max_length` does in RL."""


class HeadStageConfig(SchemaBlock):
    """PURE's first stage: the new head is trained over a frozen decoder."""

    total_epochs: CountOrZero = 3
    """Passes over the training data; 0 leaves the stage out."""
    total_training_steps: Count | None = None
    """Number of updates; null is epochs times batches per epoch."""
    lr: NotNegative = 1e-4
    """Learning rate of the head; the other settings are those of `optim`."""


class PRMTrainerSection(SFTTrainerSection):
    """The training run."""

    total_epochs: CountOrZero = 1
    """Passes over the training data in the second stage, which trains all parameters; 0 leaves it out."""


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
    """Treat a pair that occurs again, or in the opposite order, as invalid (`on_bad_row`)."""
    truncation: Literal["error", "left"] = "left"
    """How a longer row is handled; left drops the start of the prompt."""


class RMConfig(SupervisedConfig):
    """The config of a run that trains an outcome reward model on preferences."""

    data: PairDataConfig = block(PairDataConfig, train_files=("~/data/preferences/train.parquet",))
    optim: OptimConfig = block(OptimConfig, lr=1e-5, betas=(0.9, 0.95), lr_warmup_steps_ratio=0.03)
    trainer: SFTTrainerSection = block(
        SFTTrainerSection, project_name="reward-models", experiment_name="rm", total_epochs=1
    )
