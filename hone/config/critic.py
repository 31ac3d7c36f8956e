"""The critic: the value model and its update.

It exists when the estimator reads values (gae) or `critic.enable` asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.block import block
from hone.config.engine import (
    FSDPConfig,
    LossAggMode,
    OptimConfig,
    UpdateConfig,
    sequences_per_rank,
)
from hone.config.keys import follows
from hone.config.model import TrainedModelConfig
from hone.config.ranges import Count, Positive


@dataclass(frozen=True)
class CriticModelConfig(TrainedModelConfig):
    """The value model."""

    path: str | None = None
    """Folder or hub name; null starts from the actor's."""
    external_lib: str | tuple[str, ...] | None = follows("actor_rollout_ref.model.external_lib")
    """Python modules to import first; follows the actor."""
    fsdp_config: FSDPConfig = block(FSDPConfig)


@dataclass(frozen=True)
class CriticConfig(UpdateConfig):
    """The value update."""

    enable: bool | None = None
    """Build the critic; null builds it when the estimator reads values."""
    ppo_mini_batch_size: Count = follows("actor_rollout_ref.actor.ppo_mini_batch_size")
    """Prompts in one update; follows the actor."""
    use_dynamic_bsz: bool = follows("actor_rollout_ref.actor.use_dynamic_bsz")
    """Form micro-batches by token budget; follows the actor."""
    ppo_max_token_len_per_gpu: Count = 32768
    """Token budget of one forward and backward on one rank."""
    forward_micro_batch_size: int | None = None
    """Sequences in one value pass over all ranks; give `forward_micro_batch_size_per_gpu`."""
    forward_micro_batch_size_per_gpu: Count | None = follows("critic.ppo_micro_batch_size_per_gpu")
    """Sequences in one value pass on one rank; follows the update."""
    forward_max_token_len_per_gpu: Count = follows("critic.ppo_max_token_len_per_gpu")
    """Token budget of one value pass on one rank; follows the update."""
    ppo_epochs: Count = follows("actor_rollout_ref.actor.ppo_epochs")
    """Passes over each batch; follows the actor."""
    shuffle: bool = follows("actor_rollout_ref.actor.shuffle")
    """Shuffle rows before cutting mini-batches; follows the actor."""
    cliprange_value: Positive = 0.5
    """New values are clipped to this distance from the old ones in the loss."""
    loss_agg_mode: LossAggMode = follows("actor_rollout_ref.actor.loss_agg_mode")
    """How per-token losses become one number; follows the actor."""
    loss_scale_factor: float | None = follows("actor_rollout_ref.actor.loss_scale_factor")
    """Divisor of `seq-mean-token-sum-norm`; follows the actor."""
    grad_clip: Positive = follows("critic.optim.clip_grad")
    """Largest gradient norm; follows the optimizer block."""
    optim: OptimConfig = block(OptimConfig, lr=1e-5)
    model: CriticModelConfig = block(CriticModelConfig)

    def value_sequences_per_micro_batch(self, ranks: int) -> int | None:
        """Value pass: sequences in one forward on one rank; None: the token budget decides."""
        sizes = self.forward_micro_batch_size_per_gpu, self.forward_micro_batch_size
        return sequences_per_rank(self.use_dynamic_bsz, *sizes, ranks)
