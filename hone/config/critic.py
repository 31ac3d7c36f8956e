"""Config of the critic: the value model and its update.

The critic is built if the estimator reads values (gae) or `critic.enable` is true.
"""

from __future__ import annotations

from hone.config.block import block, follows
from hone.config.engine import ACTORS_LAYOUT, FSDPConfig, MegatronConfig, OptimConfig, UpdateConfig
from hone.config.model import TrainedModelConfig
from hone.config.ranges import Count, Positive


class CriticModelConfig(TrainedModelConfig):
    """The value model."""

    path: str | None = None
    """Folder or hub name; null starts from the actor's model."""
    external_lib: str | tuple[str, ...] | None = follows("actor_rollout_ref.model.external_lib")
    """Python modules to import first; follows the actor."""
    fsdp_config: FSDPConfig = block(FSDPConfig)


class CriticConfig(UpdateConfig):
    """The value update."""

    enable: bool | None = None
    """Build the critic; null builds it when the estimator reads values."""
    forward_micro_batch_size: int | None = None
    """Sequences in one value pass over all ranks; prefer `forward_micro_batch_size_per_gpu`."""
    forward_micro_batch_size_per_gpu: Count | None = follows("critic.ppo_micro_batch_size_per_gpu")
    """Sequences in one value pass on one rank; follows the update."""
    forward_max_token_len_per_gpu: Count = follows("critic.ppo_max_token_len_per_gpu")
    """Token budget of one value pass on one rank; follows the update."""
    cliprange_value: Positive = 0.5
    """In the loss, new values are clipped to this distance from the old ones."""
    grad_clip: Positive = follows("critic.optim.clip_grad")
    """Maximum gradient norm; follows the optimizer block."""
    optim: OptimConfig = block(OptimConfig, lr=1e-5)
    model: CriticModelConfig = block(CriticModelConfig)
    megatron: MegatronConfig = block(MegatronConfig, **ACTORS_LAYOUT)
    ulysses_sequence_parallel_size: Count = follows(
        "critic.model.fsdp_config.ulysses_sequence_parallel_size"
    )
    """Ranks that split each sequence; token budgets grow by this factor."""
