"""The critic: the value model and its update.

It exists when the estimator reads values (gae) or `critic.enable` asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hone.config.actor import LossAggMode
from hone.config.block import Block, block
from hone.config.engine import CheckpointConfig, FSDPConfig, OptimConfig, sequences_per_rank
from hone.config.keys import follows
from hone.config.ranges import Count, CountOrZero, Positive
from hone.types import Settings


@dataclass(frozen=True)
class CriticModelConfig(Block):
    """The value model."""

    path: str | None = None
    """Folder or hub name; null starts from the actor's."""
    override_config: Settings = field(default_factory=dict)
    """Changes to the model's own config."""
    external_lib: str | tuple[str, ...] | None = follows("actor_rollout_ref.model.external_lib")
    """Python modules to import first; follows the actor."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    lora_rank: CountOrZero = 0
    """LoRA rank; 0 trains all parameters."""
    lora_alpha: float = 16
    """LoRA scale."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Modules that get LoRA matrices."""
    fsdp_config: FSDPConfig = block(FSDPConfig)


@dataclass(frozen=True)
class CriticConfig(Block):
    """The value update."""

    enable: bool | None = None
    """Build the critic; null builds it when the estimator reads values."""
    strategy: str = "fsdp2"
    """Training engine: fsdp and fsdp2 (both FSDP2 beyond one rank), or your own as pkg.mod:Class."""
    rollout_n: int = follows("actor_rollout_ref.rollout.n")
    """Responses a prompt; follows the rollout."""
    ppo_mini_batch_size: Count = follows("actor_rollout_ref.actor.ppo_mini_batch_size")
    """Prompts in one update; follows the actor."""
    ppo_micro_batch_size: Count | None = None
    """Sequences in one forward over all ranks; give `ppo_micro_batch_size_per_gpu`."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """Sequences in one forward on one rank; null forms micro-batches by token budget."""
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
    data_loader_seed: int = 42
    """Seed of that shuffle."""
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
    checkpoint: CheckpointConfig = block(CheckpointConfig)

    @property
    def forms_micro_batches_by_tokens(self) -> bool:
        """True when the token budget, not a sequence count, cuts a mini-batch."""
        sizes = (self.ppo_micro_batch_size_per_gpu, self.ppo_micro_batch_size)
        return self.use_dynamic_bsz or sizes == (None, None)

    def sequences_per_micro_batch(self, ranks: int) -> int | None:
        """Update: sequences in one forward on one rank; None where the token budget decides."""
        if self.forms_micro_batches_by_tokens:
            return None
        return sequences_per_rank(
            self.ppo_micro_batch_size_per_gpu, self.ppo_micro_batch_size, ranks
        )

    def value_sequences_per_micro_batch(self, ranks: int) -> int | None:
        """Value pass: sequences in one forward on one rank; None: the token budget decides."""
        if self.use_dynamic_bsz:
            return None
        return sequences_per_rank(
            self.forward_micro_batch_size_per_gpu, self.forward_micro_batch_size, ranks
        )

    def sequences_per_update(self, responses_per_prompt: int | None = None) -> int:
        """Sequences in one update over all ranks."""
        n = self.rollout_n if responses_per_prompt is None else responses_per_prompt
        return self.ppo_mini_batch_size * n
