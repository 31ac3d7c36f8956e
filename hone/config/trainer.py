"""Config of the run: length, devices, trackers, validation, checkpoints, seed."""

from __future__ import annotations

from typing import Literal

from hone.config.block import SchemaBlock, block, follows
from hone.config.ranges import AboveOne, Count, CountOrZero, OneOrMore, Positive, PositiveFraction
from hone.types import Settings


class RunConfig(SchemaBlock):
    """Devices and seed of a run."""

    seed: int = 1
    """Run seed for data order, sampling and new weights."""
    nnodes: Count = 1
    """Number of nodes."""
    n_gpus_per_node: Count = 1
    """Processes per node, one per GPU (on CPU: one per rank)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one."""
    num_threads: Count | None = None
    """CPU threads per process; null uses the resumed run's value, OMP_NUM_THREADS, or an equal share."""
    controller: Literal["auto", "local", "ray"] = "auto"
    """RL: local (this process), ray, or auto (local for one rank); other trees use plain processes."""


class RunTree(SchemaBlock):
    """A tree with a `trainer` block."""

    trainer: RunConfig = block(RunConfig)

    @property
    def world_size(self) -> int:
        """Number of ranks over all nodes."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node


class TrainingRunConfig(RunConfig):
    """Length, trackers and checkpoints of a training run."""

    project_name: str = "hone_examples"
    """Project name in the trackers and in the path of the run folder."""
    experiment_name: str = "gsm8k"
    """Run name in the trackers and in the path of the run folder."""
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """Run folder for config, metrics, rollouts and checkpoints."""
    default_hdfs_dir: str | None = None
    """Remote folder (`s3://…`, `hdfs://…`) for copies of checkpoints, config, metrics; resuming reads it."""
    total_epochs: Count = 30
    """Passes over the training data."""
    total_training_steps: Count | None = None
    """Number of training steps; null is epochs times batches per epoch."""
    logger: tuple[str, ...] = ("console", "jsonl")
    """One or more trackers: console, jsonl (file), tensorboard, wandb, mlflow, swanlab."""
    console: Literal["short", "full"] = "short"
    """Metrics that the console prints per step: the most important ones, or all."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """How to resume; auto continues from the newest checkpoint, if any."""
    resume_from_path: str | None = None
    """Checkpoint folder for `resume_mode=resume_path`."""


class AlarmsConfig(SchemaBlock):
    """Alarms at signs of reward hacking; the keys after `deviations` are the changes that raise an alarm."""

    enable: bool = follows("reward_model.enable")
    """Watch the metrics; default: only if the run has a reward model."""
    action: Literal["warn", "keep", "stop"] = "warn"
    """warn logs a warning; keep also keeps the checkpoint before the jump; stop also ends the run."""
    window: Count = 50
    """Number of earlier steps with which the last steps are compared."""
    min_history: Count = 10
    """Minimum number of earlier steps; with fewer, no alarm is raised."""
    patience: Count = 3
    """Consecutive steps beyond the limit that raise an alarm."""
    deviations: Positive = 4.0
    """Minimum distance of a value from the median, in scaled median absolute deviations."""
    repetition: Positive | None = 0.1
    """Rise of high_level_scores/repeat_score/mean."""
    reflection: Positive | None = 2.0
    """Rise of high_level_scores/reflection_pattern_score/mean, in patterns per response."""
    few_steps: OneOrMore | None = 1.2
    """Fall of num_of_steps/mean to this number of steps per response."""
    many_steps: AboveOne | None = 2.0
    """Rise of num_of_steps/mean by this factor."""
    long_steps: AboveOne | None = 3.0
    """Rise of num_of_steps/tokens_per_step by this factor."""
    disagreement: PositiveFraction | None = 0.2
    """Fall of instant_rewards/orm_match_vr, the agreement of reward model and rule."""
    kl: AboveOne | None = 10.0
    """Rise of instant_rewards/kl/mean (or actor/kl_loss) by this factor."""
    outcome: Positive | None = 0.25
    """Rise of instant_rewards/outcome_reward/mean while a known true score does not rise."""
    short_responses: AboveOne | None = 3.0
    """Fall of response_length/mean by this factor."""
    long_responses: AboveOne | None = 2.0
    """Rise of response_length/mean by this factor."""


class TrainerConfig(TrainingRunConfig):
    """The training run."""

    balance_batch: bool = True
    """Balance the number of tokens over the ranks."""
    log_val_generations: CountOrZero = 0
    """Samples sent to the trackers per validation."""
    log_train_generations: CountOrZero = 0
    """Training samples sent to the trackers per step."""
    response_metrics: bool | None = None
    """Log PURE's metrics (docs/metrics.md); null logs them with a reward model, a curriculum, alarms or the
    reward manager prime."""
    alarms: AlarmsConfig = block(AlarmsConfig)
    rollout_data_dir: str | None = None
    """Folder for the trajectories of every step; null keeps only the last steps, in the run folder."""
    rollout_steps_to_keep: CountOrZero = 3
    """Number of last steps whose trajectories are kept if rollout_data_dir is null; 0 writes none."""
    validation_data_dir: str | None = None
    """Folder for validation samples."""
    save_freq: int = -1
    """Steps between checkpoints; -1 saves only at the last step."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate once and stop."""
    test_freq: int = -1
    """Steps between validations; -1 validates only before and after training."""
    critic_warmup: CountOrZero = 0
    """Steps at the start that update only the critic."""
    max_actor_ckpt_to_keep: Count | None = None
    """Number of checkpoints to keep; null keeps all."""
    max_critic_ckpt_to_keep: Count | None = None
    """Checkpoints to keep; a checkpoint holds actor and critic, so the smaller limit applies."""
    ray_wait_register_center_timeout: Count = 300
    """Seconds that a worker group may take to start."""
    liveness_deadline_s: Positive = 20.0
    """Seconds until a stopped worker process, or an unresponsive Ray node or control plane, ends the run."""
    max_restarts: CountOrZero = 0
    """Restarts from the last checkpoint, on the nodes that are left, when a worker, a node or Ray is lost."""
    phase_deadline_floor_s: Positive = 7200.0
    """Seconds that any phase (a worker call, an agent loop) may take before the run stops."""
    phase_deadline_factor: OneOrMore = 10.0
    """A phase may take longer than the floor, up to this factor times its longest earlier duration."""

    @property
    def checkpoints_to_keep(self) -> int | None:
        """The smaller of the two limits, since a checkpoint holds actor and critic; None keeps all."""
        limits = (self.max_actor_ckpt_to_keep, self.max_critic_ckpt_to_keep)
        return min((limit for limit in limits if limit), default=None)


class GlobalProfilerConfig(SchemaBlock):
    """Profiler and steps to profile; each role's `profiler` chooses its ranks."""

    tool: Literal["torch", "nsys"] | None = "torch"
    """torch writes a Chrome trace per step and process; nsys needs Nsight Systems; null is off."""
    steps: tuple[int, ...] | None = None
    """Steps to profile; null is none."""
    save_path: str = "${trainer.default_local_dir}/profile"
    """Folder of the traces."""
    nsys_options: dict[str, str] = block(dict)
    """nsys: command-line options, for example {trace: "cuda,nvtx"}."""


class RayInitConfig(SchemaBlock):
    """Arguments of ray.init."""

    num_cpus: CountOrZero | None = None
    """CPUs Ray may use; null is all."""
    num_gpus: CountOrZero | None = None
    """GPUs Ray may use; null is all."""
    address: str | None = None
    """Address of a Ray cluster; null joins RAY_ADDRESS or a local cluster, or starts one."""
    runtime_env: Settings = block(dict)
    """Ray's runtime environment of the workers."""


class RayKwargs(SchemaBlock):
    """Ray settings."""

    ray_init: RayInitConfig = block(RayInitConfig)
    timeline_json_file: str | None = None
    """File for Ray's timeline, written at the end of the run."""
