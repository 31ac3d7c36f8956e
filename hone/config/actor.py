"""The actor (what the policy update does) and the reference policy.

Batch sizes are in prompts, sequences or tokens, as each docstring says; the derived ones are properties.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hone.config.batch_info import announced
from hone.config.block import Block, block
from hone.config.engine import CheckpointConfig, FSDPConfig, OptimConfig, sequences_per_rank
from hone.config.keys import at_most, follows
from hone.config.ranges import AboveOne, Count, NotNegative, Positive
from hone.types import Settings

LossAggMode = Literal[
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "token-sum",
]


@dataclass(frozen=True)
class PolicyLossConfig(Block):
    """Which policy loss and its own constants."""

    loss_mode: str = "vanilla"
    """Name of the loss, or `pkg.mod:function` for your own."""
    clip_cov_ratio: float = 2e-4
    """clip_cov: share of tokens whose gradient is dropped."""
    clip_cov_lb: float = 1.0
    """clip_cov: lower covariance bound."""
    clip_cov_ub: float = 5.0
    """clip_cov: upper covariance bound."""
    kl_cov_ratio: float = 2e-4
    """kl_cov: share of tokens that get the KL term."""
    ppo_kl_coef: float = 0.1
    """kl_cov: weight of the KL term."""
    dro_beta: float | None = None
    """dro: weight of the squared log-ratio; must be given and positive for `dro`."""


@dataclass(frozen=True)
class ActorConfig(Block):
    """The policy update."""

    strategy: str = "fsdp2"
    """Training engine: fsdp and fsdp2 (both FSDP2 beyond one rank), or your own as pkg.mod:Class."""
    rollout_n: int = follows("actor_rollout_ref.rollout.n")
    """Responses a prompt; follows the rollout."""
    ppo_mini_batch_size: Count = at_most(256, "data.train_batch_size")
    """Prompts in one update (optimizer step); each brings its `rollout.n` responses."""
    ppo_micro_batch_size: Count | None = None
    """Sequences in one forward over all ranks; give `ppo_micro_batch_size_per_gpu`."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """Sequences in one forward on one rank; null forms micro-batches by token budget."""
    use_dynamic_bsz: bool = False
    """Form micro-batches by token budget even when a micro-batch size is given."""
    ppo_max_token_len_per_gpu: Count = 16384
    """Token budget of one forward and backward on one rank."""
    clip_ratio: NotNegative = 0.2
    """The probability ratio is clipped to 1 - clip_ratio … 1 + clip_ratio."""
    clip_ratio_low: NotNegative | None = None
    """Lower clip where it differs from `clip_ratio`."""
    clip_ratio_high: NotNegative | None = None
    """Upper clip where it differs from `clip_ratio`; DAPO uses 0.28."""
    clip_ratio_c: AboveOne = 3.0
    """Dual clip: largest ratio that counts where the advantage is negative; above 1."""
    tau_pos: float = 1.0
    """sapo: temperature for positive advantages."""
    tau_neg: float = 1.05
    """sapo: temperature for negative advantages."""
    policy_loss: PolicyLossConfig = block(PolicyLossConfig)
    loss_agg_mode: LossAggMode = "token-mean"
    """How per-token losses become one number."""
    loss_scale_factor: Positive | None = None
    """Divisor of `seq-mean-token-sum-norm`; null is the longest response allowed."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL to the reference policy to the loss."""
    kl_loss_coef: NotNegative = 0.001
    """Weight of the KL loss."""
    kl_loss_type: str = "low_var_kl"
    """KL estimator of the loss: kl|k1, abs, mse|k2, low_var_kl|k3; a trailing + takes k2's gradient."""
    use_torch_compile: bool = follows("actor_rollout_ref.actor.fsdp_config.use_torch_compile")
    """Compile each decoder block with torch.compile."""
    ppo_epochs: Count = 1
    """Passes over each batch."""
    shuffle: bool = False
    """Shuffle the rows of a batch before cutting it into mini-batches."""
    data_loader_seed: int = 42
    """Seed of that shuffle."""
    grad_clip: Positive = follows("actor_rollout_ref.actor.optim.clip_grad")
    """Largest gradient norm; follows the optimizer block."""
    calculate_sum_pi_squared: bool = False
    """Also compute the sum of squared probabilities; estimators that need it ask by themselves."""
    optim: OptimConfig = block(OptimConfig)
    fsdp_config: FSDPConfig = block(FSDPConfig)
    checkpoint: CheckpointConfig = block(CheckpointConfig)

    @property
    def global_batch_info(self) -> Settings:
        """What a custom policy loss hands to `agg_loss(..., **config.global_batch_info)`."""
        return {"dp_size": 1, **announced.get(), "loss_scale_factor": self.loss_scale_factor}

    @property
    def forms_micro_batches_by_tokens(self) -> bool:
        """True when the token budget, not a sequence count, cuts a mini-batch."""
        sizes = (self.ppo_micro_batch_size_per_gpu, self.ppo_micro_batch_size)
        return self.use_dynamic_bsz or sizes == (None, None)

    def sequences_per_micro_batch(self, ranks: int) -> int | None:
        """Sequences in one forward on one rank; None where the token budget decides."""
        if self.forms_micro_batches_by_tokens:
            return None
        return sequences_per_rank(
            self.ppo_micro_batch_size_per_gpu, self.ppo_micro_batch_size, ranks
        )

    def sequences_per_update(self, responses_per_prompt: int | None = None) -> int:
        """Sequences in one update over all ranks."""
        n = self.rollout_n if responses_per_prompt is None else responses_per_prompt
        return self.ppo_mini_batch_size * n


@dataclass(frozen=True)
class RefConfig(Block):
    """The reference policy: forward only."""

    strategy: str = follows("actor_rollout_ref.actor.strategy")
    """Engine; follows the actor."""
    use_torch_compile: bool = follows("actor_rollout_ref.actor.use_torch_compile")
    """Compile each decoder block; follows the actor."""
    log_prob_micro_batch_size: Count | None = None
    """Sequences in one forward over all ranks; give `log_prob_micro_batch_size_per_gpu`."""
    log_prob_micro_batch_size_per_gpu: Count | None = None
    """Sequences in one forward on one rank; null forms micro-batches by token budget."""
    log_prob_use_dynamic_bsz: bool = follows("actor_rollout_ref.actor.use_dynamic_bsz")
    """Form micro-batches by token budget; follows the actor."""
    log_prob_max_token_len_per_gpu: Count = follows(
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    )
    """Token budget of one forward on one rank; follows the actor."""
    fsdp_config: FSDPConfig = block(FSDPConfig)

    def sequences_per_micro_batch(self, ranks: int) -> int | None:
        """Sequences in one forward on one rank; None where the token budget decides."""
        if self.log_prob_use_dynamic_bsz:
            return None
        return sequences_per_rank(
            self.log_prob_micro_batch_size_per_gpu, self.log_prob_micro_batch_size, ranks
        )
