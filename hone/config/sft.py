"""The `sft_trainer` tree: supervised fine-tuning on prompts and responses or on conversations.

Batch sizes are in sequences here; there is no rollout and no reward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hone.config.block import Block
from hone.config.data import CustomClassConfig
from hone.config.engine import CheckpointConfig, FSDPConfig, OptimConfig, sequences_per_rank
from hone.config.keys import follows
from hone.config.model import ModelConfig
from hone.config.profiler import GlobalProfilerConfig
from hone.config.trainer import RayKwargs


@dataclass(frozen=True)
class MultiTurnDataConfig(Block):
    """Rows that hold whole conversations."""

    enable: bool | None = None
    """Train on conversations; null does so where the file has the messages column."""
    messages_key: str = "messages"
    """Column of the messages."""
    tools_key: str = "tools"
    """Column of the tool schemas."""
    enable_thinking_key: str = "enable_thinking"
    """Column that switches the template's thinking mode."""


@dataclass(frozen=True)
class SFTDataConfig(Block):
    """Examples."""

    train_batch_size: int = 256
    """Sequences in one update, over all ranks."""
    micro_batch_size: int | None = None
    """Sequences in one forward over all ranks; give `micro_batch_size_per_gpu`."""
    micro_batch_size_per_gpu: int | None = None
    """Sequences in one forward on one rank; used when `use_dynamic_bsz` is false."""
    max_token_len_per_gpu: int = 8192
    """Token budget of one forward and backward on one rank."""
    use_dynamic_bsz: bool = True
    """Form micro-batches by token budget."""
    train_files: tuple[str, ...] = ("~/data/gsm8k/train.parquet",)
    """Parquet or jsonl files to train on; one path or a list."""
    val_files: tuple[str, ...] | None = None
    """Files for the validation loss; null has none."""
    train_max_samples: int = -1
    """Rows kept for training; -1 keeps all."""
    val_max_samples: int = -1
    """Rows kept for validation; -1 keeps all."""
    prompt_key: str = "question"
    """Column of the prompt."""
    response_key: str = "answer"
    """Column of the response."""
    prompt_dict_keys: tuple[str, ...] | None = None
    """Keys to follow inside the prompt column."""
    response_dict_keys: tuple[str, ...] | None = None
    """Keys to follow inside the response column."""
    prompt_format: Literal["chat", "raw"] = "chat"
    """chat renders the prompt with the chat template; raw takes it as it is."""
    multiturn: MultiTurnDataConfig = field(default_factory=MultiTurnDataConfig)
    """Rows that hold whole conversations."""
    max_length: int = 1024
    """Longest prompt plus response in tokens."""
    truncation: Literal["error", "left", "right"] = "error"
    """What happens to a longer row; error makes it a bad one (`on_bad_row`)."""
    shuffle: bool = True
    """Shuffle rows each epoch."""
    seed: int | None = None
    """Seed of the order; null takes the run seed."""
    balance_dp_token: bool = True
    """Give every rank about the same number of tokens."""
    chat_template: str | None = None
    """Chat template text that replaces the tokenizer's own."""
    pad_mode: Literal["no_padding", "right"] = "no_padding"
    """Rows are packed; padding changes nothing that is learned."""
    ignore_input_ids_mismatch: bool = False
    """Go on where turn-by-turn and whole-conversation rendering differ."""
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)
    """A user's own dataset class."""
    use_shm: bool = False
    """Copy the files into shared memory first."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """More arguments of the chat template."""
    on_bad_row: Literal["raise", "skip"] = "raise"
    """A row that cannot be learnt from stops the run before its first step, or is skipped and counted."""

    def sequences_per_micro_batch(self, ranks: int) -> int | None:
        """Sequences in one forward on one rank; None where the token budget decides."""
        if self.use_dynamic_bsz:
            return None
        return sequences_per_rank(self.micro_batch_size_per_gpu, self.micro_batch_size, ranks)


@dataclass(frozen=True)
class SFTTrainerSection(Block):
    """The run."""

    seed: int = 1
    """Run seed: data order, new weights."""
    project_name: str = "gsm8k-sft"
    """Project in the trackers and the checkpoint folder."""
    experiment_name: str = "test"
    """Run name in the trackers and the checkpoint folder."""
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """Folder of the run: config, metrics, checkpoints."""
    default_hdfs_dir: str | None = None
    """A second copy on HDFS."""
    total_epochs: int = 4
    """Passes over the training data."""
    total_training_steps: int | None = None
    """Updates in the run; null is epochs times batches."""
    logger: tuple[str, ...] = ("console", "jsonl")
    """Trackers: console, jsonl (file), tensorboard, wandb, mlflow, swanlab; one or a list."""
    console: Literal["short", "full"] = "short"
    """What the console prints per step: the few metrics read first, or all of them."""
    save_freq: int = -1
    """Updates between checkpoints; -1 saves only at the end."""
    test_freq: int = -1
    """Updates between validations; -1 validates only at the end."""
    nnodes: int = 1
    """Machines."""
    n_gpus_per_node: int = 1
    """Processes a machine, one a device."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU when there is one."""
    num_threads: int | None = None
    """CPU threads of each process; null: the resumed run's, OMP_NUM_THREADS, or its share of the cores."""
    controller: Literal["auto", "local", "ray"] = "auto"
    """auto and local: this process, or one plain process a rank; ray is refused, torchrun spans machines."""
    max_ckpt_to_keep: int | None = None
    """Checkpoints kept; null keeps all."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto continues from the newest checkpoint, if any."""
    resume_from_path: str | None = None
    """Checkpoint folder of `resume_mode=resume_path`."""
    profile_interval: tuple[int, ...] = (-1, -1)
    """First and last update to profile."""


def _optimizer() -> OptimConfig:
    return OptimConfig(
        lr=1e-5, betas=(0.9, 0.95), lr_warmup_steps_ratio=0.1, lr_scheduler_type="cosine"
    )


@dataclass(frozen=True)
class SFTConfig(Block):
    """Everything one supervised run reads."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    """Examples."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    optim: OptimConfig = field(default_factory=_optimizer)
    """Optimizer and schedule."""
    engine: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding, dtype, offload."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What a checkpoint holds."""
    trainer: SFTTrainerSection = field(default_factory=SFTTrainerSection)
    """The run."""
    ulysses_sequence_parallel_size: int = field(
        default=follows("engine.ulysses_sequence_parallel_size")
    )
    """Ranks that share one sequence; follows the engine block."""
    use_remove_padding: bool = field(default=follows("model.use_remove_padding"))
    """Rows are packed without padding; follows the model."""
    global_profiler: GlobalProfilerConfig = field(default_factory=GlobalProfilerConfig)
    """Which steps are profiled, with what."""
    ray_kwargs: RayKwargs = field(default_factory=RayKwargs)
    """Ray."""

    @property
    def world_size(self) -> int:
        """Ranks of the run, all nodes together."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node
