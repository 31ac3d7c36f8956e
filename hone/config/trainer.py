"""The run: length, devices, trackers, validation, checkpoints, seed."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from hone.config.block import Count, CountOrZero, OneOrMore, Positive, SchemaBlock, block
from hone.types import Settings


class RunConfig(SchemaBlock):
    """Devices and seed of a run."""

    seed: int = 1
    """Run seed: data order, sampling, new weights."""
    nnodes: Count = 1
    """Machines."""
    n_gpus_per_node: Count = 1
    """Processes per machine, one per device (on CPU: one per rank)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU when there is one."""
    num_threads: Count | None = None
    """CPU threads of each process; null: the resumed run's, OMP_NUM_THREADS, or its share of the cores."""
    controller: Literal["auto", "local", "ray"] = "auto"
    """RL: local (this process), ray, auto (local for one rank); elsewhere ranks are plain processes."""


class RunTree(SchemaBlock):
    """A tree with a run."""

    trainer: RunConfig = block(RunConfig)

    @property
    def world_size(self) -> int:
        """Ranks of the run, all nodes together."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node


class TrainingRunConfig(RunConfig):
    """A run that trains: length, trackers, checkpoints."""

    project_name: str = "hone_examples"
    """Project in the trackers and the checkpoint folder."""
    experiment_name: str = "gsm8k"
    """Run name in the trackers and the checkpoint folder."""
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """Folder of the run: config, metrics, rollouts, checkpoints."""
    total_epochs: Count = 30
    """Passes over the training data."""
    total_training_steps: Count | None = None
    """Steps in the run; null is epochs times batches."""
    logger: tuple[str, ...] = ("console", "jsonl")
    """Trackers: console, jsonl (file), tensorboard, wandb, mlflow, swanlab; one or a list."""
    console: Literal["short", "full"] = "short"
    """What the console prints per step: the few metrics read first, or all of them."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto continues from the newest checkpoint, if any."""
    resume_from_path: str | None = None
    """Checkpoint folder of `resume_mode=resume_path`."""


class TrainerConfig(TrainingRunConfig):
    """The run."""

    balance_batch: bool = True
    """Give every rank about the same number of tokens."""
    log_val_generations: CountOrZero = 0
    """Validation samples sent to the trackers each time."""
    log_train_generations: CountOrZero = 0
    """Training samples sent to the trackers each step."""
    rollout_data_dir: str | None = None
    """Folder for every step's trajectories; null keeps the last steps' in the run folder."""
    rollout_steps_to_keep: CountOrZero = 3
    """Steps whose trajectories stay in the run folder where rollout_data_dir is null; 0 writes none."""
    validation_data_dir: str | None = None
    """Folder for validation samples."""
    save_freq: int = -1
    """Steps between checkpoints; -1 saves none before the last step."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate and stop."""
    test_freq: int = -1
    """Steps between validations; -1 validates only before and after."""
    critic_warmup: CountOrZero = 0
    """Steps that update only the critic."""
    max_actor_ckpt_to_keep: Count | None = None
    """Checkpoints kept; null keeps all."""
    max_critic_ckpt_to_keep: Count | None = None
    """Checkpoints kept; a checkpoint holds actor and critic, so the smaller limit rules."""
    ray_wait_register_center_timeout: int = 300
    """Seconds a worker group may take to come up."""
    liveness_deadline_s: Positive = 20.0
    """Seconds after which a stopped worker process, or a silent Ray node or control plane, ends the run."""
    phase_deadline_floor_s: Positive = 7200.0
    """Seconds that any phase (a worker's call, the agent loops of a batch) may take; then the run stops."""
    phase_deadline_factor: OneOrMore = 10.0
    """A phase may take longer than the floor: this factor times the longest that it took before."""


class GlobalProfilerConfig(SchemaBlock):
    """Which steps are recorded, with what, on every rank."""

    tool: Literal["torch", "nsys"] | None = "torch"
    """torch writes a Chrome trace per step and process; nsys needs Nsight Systems; null records nothing."""
    steps: tuple[int, ...] | None = None
    """Steps to record; null is none."""
    save_path: str = "${trainer.default_local_dir}/profile"
    """Folder of the traces."""
    nsys_options: dict[str, str] = field(default_factory=dict)
    """nsys: options of its command line, as in {trace: "cuda,nvtx"}."""


class RayInitConfig(SchemaBlock):
    """Arguments of ray.init."""

    num_cpus: int | None = None
    """CPUs Ray may use; null is all."""
    num_gpus: int | None = None
    """GPUs Ray may use; null is all."""
    address: str | None = None
    """Address of a running cluster; null joins RAY_ADDRESS or this machine's, or starts one."""
    runtime_env: Settings = field(default_factory=dict)
    """Environment of the workers."""


class RayKwargs(SchemaBlock):
    """Ray."""

    ray_init: RayInitConfig = block(RayInitConfig)
    timeline_json_file: str | None = None
    """File for Ray's timeline, written at the end."""
