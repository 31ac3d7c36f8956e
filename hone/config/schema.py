"""The root of the `ppo_trainer` tree.

Each block has its own file; this one only puts them together and derives what needs more than one block.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hone.config.actor import ActorConfig, RefConfig
from hone.config.algorithm import AlgorithmConfig, CurriculumFilterConfig
from hone.config.block import Block
from hone.config.critic import CriticConfig
from hone.config.data import DataConfig
from hone.config.model import ModelConfig
from hone.config.profiler import GlobalProfilerConfig
from hone.config.reward import CustomRewardFunctionConfig, RewardManagerConfig, RewardModelConfig
from hone.config.rollout import RolloutConfig
from hone.config.trainer import RayKwargs, RetrieverConfig, TrainerConfig, TransferQueueConfig


@dataclass(frozen=True)
class ActorRolloutRefConfig(Block):
    """Policy: its model, its update, its rollout, its reference."""

    hybrid_engine: bool = True
    """Training and rollout share their devices; false gives the rollout a pool of its own
    (rollout.nnodes × rollout.n_gpus_per_node processes)."""
    nccl_timeout: int = 600
    """Seconds a collective operation may take."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy's model."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """The policy update."""
    ref: RefConfig = field(default_factory=RefConfig)
    """The reference policy."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Producing trajectories."""


@dataclass(frozen=True)
class PPOTrainerConfig(Block):
    """Everything one RL run reads."""

    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    """Policy: its model, its update, its rollout, its reference."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model and its update."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """Reward models and the settings of the managers."""
    reward_manager: RewardManagerConfig = field(default_factory=RewardManagerConfig)
    """Which manager turns scores into token rewards."""
    custom_reward_function: CustomRewardFunctionConfig = field(
        default_factory=CustomRewardFunctionConfig
    )
    """A user's own score function."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Advantages, KL in the reward, correction, filters."""
    curriculum_learning: CurriculumFilterConfig = field(default_factory=CurriculumFilterConfig)
    """PURE's filter of groups that are too easy or too hard."""
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """The retrieval service of search loops."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The run."""
    global_profiler: GlobalProfilerConfig = field(default_factory=GlobalProfilerConfig)
    """Which steps are profiled, with what."""
    transfer_queue: TransferQueueConfig = field(default_factory=TransferQueueConfig)
    """The family's external data plane."""
    ray_kwargs: RayKwargs = field(default_factory=RayKwargs)
    """Ray."""

    @property
    def world_size(self) -> int:
        """Ranks of the run, all nodes together."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def sequences_per_step(self) -> int:
        """Responses in one step."""
        return self.data.train_batch_size * self.actor_rollout_ref.rollout.n

    @property
    def sampling_seed(self) -> int:
        """The run seed of every trajectory."""
        seed = self.actor_rollout_ref.rollout.seed
        return self.trainer.seed if seed is None else seed

    @property
    def rollout_pool(self) -> tuple[int, ...]:
        """Processes per node of the rollout's own pool; empty where it shares the trainer's."""
        policy = self.actor_rollout_ref
        if policy.hybrid_engine and not policy.rollout.nnodes:
            return ()
        return (policy.rollout.n_gpus_per_node,) * max(policy.rollout.nnodes, 1)

    @property
    def uses_controller(self) -> str:
        """local or ray: what `trainer.controller=auto` comes to."""
        if self.trainer.controller != "auto":
            return self.trainer.controller
        return "local" if self.world_size == 1 and not self.rollout_pool else "ray"
