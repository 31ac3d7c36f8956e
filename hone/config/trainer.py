"""The run: length, devices, trackers, validation, checkpoints, seed.

Nothing here changes what is learned, apart from the length, the seed and `critic_warmup`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hone.config.block import Block


@dataclass(frozen=True)
class TrainerConfig(Block):
    """The run."""

    seed: int = 1
    """Run seed: data order, sampling, new weights."""
    balance_batch: bool = True
    """Give every rank about the same number of tokens."""
    total_epochs: int = 30
    """Passes over the training data."""
    total_training_steps: int | None = None
    """Steps in the run; null is epochs times batches."""
    project_name: str = "hone_examples"
    """Project in the trackers and the checkpoint folder."""
    experiment_name: str = "gsm8k"
    """Run name in the trackers and the checkpoint folder."""
    logger: tuple[str, ...] = ("console", "jsonl")
    """Trackers: console, jsonl (file), tensorboard, wandb, mlflow, swanlab; one or a list."""
    console: Literal["short", "full"] = "short"
    """What the console prints per step: the few metrics read first, or all of them."""
    log_val_generations: int = 0
    """Validation samples sent to the trackers each time."""
    log_train_generations: int = 0
    """Training samples sent to the trackers each step."""
    rollout_data_dir: str | None = None
    """Folder for every step's trajectories; null keeps the last steps' in the run folder."""
    rollout_steps_to_keep: int = 3
    """Steps whose trajectories stay in the run folder where rollout_data_dir is null; 0 writes none."""
    validation_data_dir: str | None = None
    """Folder for validation samples."""
    nnodes: int = 1
    """Machines."""
    n_gpus_per_node: int = 1
    """Processes a machine, one a device (on CPU: one a rank)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU when there is one."""
    num_threads: int | None = None
    """CPU threads of each process; null: the resumed run's, OMP_NUM_THREADS, or its share of the cores."""
    controller: Literal["auto", "local", "ray"] = "auto"
    """local runs in this process, ray on a cluster; auto is local for one rank, else ray."""
    save_freq: int = -1
    """Steps between checkpoints; -1 saves none before the last step."""
    esi_redundant_time: float = 0.0
    """Seconds to keep in hand before an elastic instance expires."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto continues from the newest checkpoint, if any."""
    resume_from_path: str | None = None
    """Checkpoint folder of `resume_mode=resume_path`."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate and stop."""
    test_freq: int = -1
    """Steps between validations; -1 validates only before and after."""
    critic_warmup: int = 0
    """Steps that update only the critic."""
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """Folder of the run: config, metrics, rollouts, checkpoints."""
    default_hdfs_dir: str | None = None
    """A second copy on HDFS."""
    del_local_ckpt_after_load: bool = False
    """Delete the checkpoint once it is loaded."""
    max_actor_ckpt_to_keep: int | None = None
    """Checkpoints kept; null keeps all."""
    max_critic_ckpt_to_keep: int | None = None
    """Checkpoints kept; a checkpoint holds actor and critic, so the smaller limit rules."""
    ray_wait_register_center_timeout: int = 300
    """Seconds a worker group may take to come up."""
    liveness_deadline_s: float = 20.0
    """Seconds after which a stopped worker process, or a silent Ray node or control plane, ends the run."""
    phase_deadline_floor_s: float = 7200.0
    """Seconds that any phase (a worker's call, the agent loops of a batch) may take; then the run stops."""
    phase_deadline_factor: float = 10.0
    """A phase may take longer than the floor: this factor times the longest that it took before."""
    use_legacy_worker_impl: str = "auto"
    """There is one family of workers here."""


@dataclass(frozen=True)
class RayInitConfig(Block):
    """Arguments of ray.init."""

    num_cpus: int | None = None
    """CPUs Ray may use; null is all."""
    num_gpus: int | None = None
    """GPUs Ray may use; null is all."""
    address: str | None = None
    """Address of a running cluster; null joins RAY_ADDRESS or this machine's, or starts one."""
    runtime_env: dict[str, Any] = field(default_factory=dict)
    """Environment of the workers."""
    local_mode: bool = False
    """Ray's debug mode; use trainer.controller=local."""


@dataclass(frozen=True)
class RayKwargs(Block):
    """Ray."""

    ray_init: RayInitConfig = field(default_factory=RayInitConfig)
    """Arguments of ray.init."""
    timeline_json_file: str | None = None
    """File for Ray's timeline, written at the end."""


@dataclass(frozen=True)
class TransferQueueConfig(Block):
    """The family's external data plane."""

    enable: bool = False
    """Use it."""


@dataclass(frozen=True)
class RetrieverConfig(Block):
    """The retrieval service of search loops."""

    url: str | None = None
    """Address of the service; null asks for a local index."""
    topk: int = 3
    """Passages a query."""
    timeout_s: float = 30.0
    """Seconds one request may take."""
    retries: int = 3
    """Attempts before a query counts as failed and returns nothing."""
    corpus_path: str | None = None
    """Passages of a local index, when there is no url."""
