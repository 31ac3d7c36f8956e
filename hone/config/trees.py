"""The config trees by name, and the root class of `ppo_trainer`; a new tree is an entry of `TREES`."""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.actor import ActorConfig, CriticConfig, RefConfig
from hone.config.algorithm import AlgorithmConfig, CurriculumFilterConfig
from hone.config.block import SchemaBlock, block, follows
from hone.config.data import DataConfig
from hone.config.generation import EvaluationConfig, GenerationConfig
from hone.config.model import ModelConfig
from hone.config.preference import DPOConfig
from hone.config.ranges import Count
from hone.config.reward import CustomRewardFunctionConfig, RewardManagerConfig, RewardModelConfig
from hone.config.rollout import RetrieverConfig, RolloutConfig
from hone.config.sft import PRMConfig, RMConfig, SFTConfig
from hone.config.trainer import GlobalProfilerConfig, RayKwargs, RunTree, TrainerConfig

_KEYS_FOLLOWING_ACTOR = (
    "ppo_mini_batch_size use_dynamic_bsz ppo_epochs shuffle loss_agg_mode loss_scale_factor"
)
_FOLLOW_ACTOR = {
    key: follows(f"actor_rollout_ref.actor.{key}") for key in _KEYS_FOLLOWING_ACTOR.split()
}
_FOLLOW_DATA_LENGTHS = {
    f"{part}_length": follows(f"data.max_{part}_length") for part in ("prompt", "response")
}


class ActorRolloutRefConfig(SchemaBlock):
    """The policy: model, update, rollout and reference."""

    hybrid_engine: bool = True
    """Training and rollout share devices; false uses a separate pool of `rollout.nnodes` nodes."""
    nccl_timeout: Count = 600
    """Timeout of a collective operation in seconds."""
    model: ModelConfig = block(ModelConfig)
    actor: ActorConfig = block(ActorConfig)
    ref: RefConfig = block(RefConfig)
    rollout: RolloutConfig = block(RolloutConfig, **_FOLLOW_DATA_LENGTHS)


class PPOTrainerConfig(RunTree):
    """The config of an RL run."""

    actor_rollout_ref: ActorRolloutRefConfig = block(ActorRolloutRefConfig)
    data: DataConfig = block(DataConfig)
    critic: CriticConfig = block(CriticConfig, ppo_max_token_len_per_gpu=32768, **_FOLLOW_ACTOR)
    reward_model: RewardModelConfig = block(RewardModelConfig)
    reward_manager: RewardManagerConfig = block(RewardManagerConfig)
    custom_reward_function: CustomRewardFunctionConfig = block(CustomRewardFunctionConfig)
    algorithm: AlgorithmConfig = block(AlgorithmConfig)
    curriculum_learning: CurriculumFilterConfig = block(CurriculumFilterConfig)
    trainer: TrainerConfig = block(TrainerConfig)
    global_profiler: GlobalProfilerConfig = block(GlobalProfilerConfig)
    ray_kwargs: RayKwargs = block(RayKwargs)
    retriever: RetrieverConfig = block(RetrieverConfig)

    @property
    def sampling_seed(self) -> int:
        """The seed from which the seeds of trajectories are derived."""
        seed = self.actor_rollout_ref.rollout.seed
        return self.trainer.seed if seed is None else seed

    @property
    def logs_response_metrics(self) -> bool:
        """Whether response metrics are logged: `trainer.response_metrics`, or its default if null."""
        if self.trainer.response_metrics is not None:
            return self.trainer.response_metrics
        uses_prime = self.reward_manager.name == "prime"
        switches = (self.reward_model, self.curriculum_learning, self.trainer.alarms)
        return uses_prime or any(switch.enable for switch in switches)

    @property
    def rollout_pool(self) -> tuple[int, ...]:
        """Processes on each node of a separate rollout pool; empty if the rollout has no own pool."""
        policy = self.actor_rollout_ref
        if policy.hybrid_engine and not policy.rollout.nnodes:
            return ()
        return (policy.rollout.n_gpus_per_node,) * max(policy.rollout.nnodes, 1)

    @property
    def rollout_ranks(self) -> int:
        """The number of processes that generate."""
        return sum(self.rollout_pool) or self.world_size

    @property
    def reward_pool(self) -> tuple[int, ...]:
        """Processes on each node of the reward model's own pool; empty if it has none."""
        model = self.reward_model
        if not (model.enable and model.enable_resource_pool) or model.server.url:
            return ()
        return (model.n_gpus_per_node,) * model.nnodes

    @property
    def resolved_controller(self) -> str:
        """The controller of the run: `local` or `ray`, also if `trainer.controller` is auto."""
        if self.trainer.controller != "auto":
            return self.trainer.controller
        has_own_pools = self.rollout_pool or self.reward_pool
        return "local" if self.world_size == 1 and not has_own_pools else "ray"


@dataclass(frozen=True)
class Tree:
    """A config tree with its root class and purpose."""

    name: str
    root: type
    purpose: str = ""


_TREES: dict[str, tuple[type, str, str, str]] = {
    # name: (root class, purpose, command of `hone`, program `hone.trainer.main_…`)
    "ppo_trainer": (PPOTrainerConfig, "reinforcement learning", "train", "ppo"),
    "sft_trainer": (SFTConfig, "supervised fine-tuning", "sft", "sft"),
    "prm_trainer": (PRMConfig, "process reward models", "train-prm", "prm"),
    "rm_trainer": (RMConfig, "outcome reward models", "train-rm", "rm"),
    "dpo_trainer": (DPOConfig, "preferences", "dpo", "dpo"),
    "generation": (GenerationConfig, "responses", "generate", "generation"),
    "evaluation": (EvaluationConfig, "scores of responses", "eval", "eval"),
}
TREES: dict[str, Tree] = {
    name: Tree(name, root, f"{purpose}: `hone {command}`, `python -m hone.trainer.main_{program}`")
    for name, (root, purpose, command, program) in _TREES.items()
}
