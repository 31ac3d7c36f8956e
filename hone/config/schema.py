"""The root of the `ppo_trainer` tree.

Each block has its own file; this one only puts them together and derives what needs more than one block.
"""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.actor import ActorConfig, RefConfig
from hone.config.algorithm import AlgorithmConfig, CurriculumFilterConfig
from hone.config.block import Block, block
from hone.config.critic import CriticConfig
from hone.config.data import DataConfig
from hone.config.model import ModelConfig
from hone.config.ranges import Count, CountOrZero, Positive
from hone.config.reward import CustomRewardFunctionConfig, RewardManagerConfig, RewardModelConfig
from hone.config.rollout import RolloutConfig
from hone.config.trainer import GlobalProfilerConfig, RayKwargs, RunTree, TrainerConfig


@dataclass(frozen=True)
class ActorRolloutRefConfig(Block):
    """Policy: its model, its update, its rollout, its reference."""

    hybrid_engine: bool = True
    """Training and rollout share their devices; false gives the rollout a pool of its own
    (rollout.nnodes × rollout.n_gpus_per_node processes)."""
    nccl_timeout: Count = 600
    """Seconds a collective operation may take."""
    model: ModelConfig = block(ModelConfig)
    actor: ActorConfig = block(ActorConfig)
    ref: RefConfig = block(RefConfig)
    rollout: RolloutConfig = block(RolloutConfig)


@dataclass(frozen=True)
class RetrieverConfig(Block):
    """The retrieval service of the search loop; `hone serve-retriever` is one."""

    url: str = "http://127.0.0.1:8000/retrieve"
    """Where queries are posted."""
    topk: Count = 3
    """Passages per query."""
    timeout_s: Positive = 30.0
    """Seconds one request may take."""
    retries: CountOrZero = 3
    """Further attempts, with growing pauses; then the search finds nothing and is counted as failed."""


@dataclass(frozen=True)
class PPOTrainerConfig(RunTree):
    """Everything one RL run reads."""

    actor_rollout_ref: ActorRolloutRefConfig = block(ActorRolloutRefConfig)
    data: DataConfig = block(DataConfig)
    critic: CriticConfig = block(CriticConfig)
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
