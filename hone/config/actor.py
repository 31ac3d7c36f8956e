"""Config of the policy update, the reference policy and the critic (the value model and its update).

The critic is built if the estimator reads values (gae) or `critic.enable` is true. Each docstring states
whether a batch size is in prompts, sequences or tokens; derived sizes are properties.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Literal

from hone.config.block import SchemaBlock, block, follows
from hone.config.engine import (
    ACTOR_KEY,
    MEGATRON_PARALLEL_KEYS,
    ULYSSES_SIZE_KEY,
    FSDPConfig,
    LogProbConfig,
    LossAggMode,
    MegatronConfig,
    OptimConfig,
    ProfilerConfig,
    UpdateConfig,
    block_following_actor,
)
from hone.config.model import TrainedModelConfig
from hone.config.ranges import AboveOne, Count, Fraction, NotNegative, Positive
from hone.types import Settings

current_batch_info: ContextVar[Settings] = ContextVar("hone_batch_info", default={})  # noqa: B039
"""`batch_num_tokens` and `global_batch_size` of the current mini-batch; empty outside of mini-batches."""


class PolicyLossConfig(SchemaBlock):
    """The policy loss and its constants."""

    loss_mode: str = "vanilla"
    """Name of the loss, or `pkg.mod:function` for a custom one."""
    agg_mode: LossAggMode | None = None
    """Aggregation of the policy loss; null is `actor.loss_agg_mode`, which the entropy and the KL loss always
    use."""
    clip_cov_ratio: Fraction = 2e-4
    """clip_cov: share of tokens whose gradient is dropped."""
    clip_cov_lb: float = 1.0
    """clip_cov: lower covariance bound."""
    clip_cov_ub: float = 5.0
    """clip_cov: upper covariance bound."""
    kl_cov_ratio: Fraction = 2e-4
    """kl_cov: share of tokens that get the KL term."""
    ppo_kl_coef: float = 0.1
    """kl_cov: weight of the KL term."""
    dro_beta: Positive | None = None
    """dro: weight of the squared log-ratio; required."""


class RouterReplayConfig(SchemaBlock):
    """Routing of mixture-of-experts models: which experts compute a token in the update."""

    mode: Literal["disabled", "R2", "R3"] = "disabled"
    """R2 replays the experts of the old log-prob pass; R3 replays the experts that the rollout recorded."""


class ActorConfig(UpdateConfig):
    """The policy update."""

    clip_ratio: NotNegative = 0.2
    """The probability ratio is clipped to 1 - clip_ratio … 1 + clip_ratio."""
    clip_ratio_low: NotNegative | None = None
    """Lower clip range; null uses `clip_ratio`."""
    clip_ratio_high: NotNegative | None = None
    """Upper clip range; null uses `clip_ratio`. DAPO uses 0.28."""
    clip_ratio_c: AboveOne = 3.0
    """Dual clip: upper bound of the ratio for negative advantages; above 1."""
    tau_pos: Positive = 1.0
    """sapo: temperature for positive advantages."""
    tau_neg: Positive = 1.05
    """sapo: temperature for negative advantages."""
    policy_loss: PolicyLossConfig = block(PolicyLossConfig)
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL to the reference policy to the loss."""
    kl_loss_coef: NotNegative = 0.001
    """Weight of the KL loss."""
    kl_loss_type: str = "low_var_kl"
    """KL estimator of the loss: kl|k1, abs, mse|k2, low_var_kl|k3; a trailing + uses the gradient of k2."""
    router_replay: RouterReplayConfig = block(RouterReplayConfig)
    use_torch_compile: bool = follows(".fsdp_config.use_torch_compile")
    """Compile each decoder block with torch.compile."""
    calculate_sum_pi_squared: bool = False
    """Compute the sum of squared probabilities even if the estimator does not read it."""
    fsdp_config: FSDPConfig = block(FSDPConfig)
    megatron: MegatronConfig = block(MegatronConfig)
    ulysses_sequence_parallel_size: Count = follows(f".{ULYSSES_SIZE_KEY}")
    """Ranks that split each sequence in updates and log-prob passes; their number multiplies the token
    budgets."""

    @property
    def policy_loss_agg_mode(self) -> LossAggMode:
        """The aggregation of the policy loss."""
        return self.policy_loss.agg_mode or self.loss_agg_mode

    @property
    def global_batch_info(self) -> Settings:
        """Arguments of `agg_loss` for a custom policy loss: `agg_loss(..., **config.global_batch_info)`."""
        return {
            "dp_size": 1,
            **current_batch_info.get(),
            "loss_scale_factor": self.loss_scale_factor,
        }


class RefConfig(LogProbConfig):
    """The reference policy, used for forward passes only."""

    strategy: str = follows(f"{ACTOR_KEY}.strategy")
    """Engine; default: the actor's."""
    use_torch_compile: bool = follows(f"{ACTOR_KEY}.use_torch_compile")
    """Compile each decoder block; default: as for the actor."""
    fsdp_config: FSDPConfig = block_following_actor(
        FSDPConfig, "fsdp_config", "tensor_parallel_size"
    )
    megatron: MegatronConfig = block_following_actor(
        MegatronConfig, "megatron", *MEGATRON_PARALLEL_KEYS
    )
    ulysses_sequence_parallel_size: Count = follows(f"{ACTOR_KEY}.ulysses_sequence_parallel_size")
    """Ranks that split each sequence; default: the actor's number."""
    profiler: ProfilerConfig = block(ProfilerConfig)


class CriticModelConfig(TrainedModelConfig):
    """The value model."""

    path: str | None = None
    """Folder or hub name; null starts from the actor's model."""
    external_lib: str | tuple[str, ...] | None = follows("actor_rollout_ref.model.external_lib")
    """Python modules to import first; default: the actor's."""
    fsdp_config: FSDPConfig = block(FSDPConfig)


class CriticConfig(UpdateConfig):
    """The value update."""

    enable: bool | None = None
    """Build the critic; null builds it when the estimator reads values."""
    forward_micro_batch_size: Count | None = None
    """Sequences in one value pass over all ranks; prefer `forward_micro_batch_size_per_gpu`."""
    forward_micro_batch_size_per_gpu: Count | None = follows("critic.ppo_micro_batch_size_per_gpu")
    """Sequences in one value pass on one rank; default: `ppo_micro_batch_size_per_gpu`."""
    forward_max_token_len_per_gpu: Count = follows("critic.ppo_max_token_len_per_gpu")
    """Token budget of one value pass on one rank; default: `ppo_max_token_len_per_gpu`."""
    cliprange_value: Positive = 0.5
    """In the loss, new values are clipped to this distance from the old ones."""
    optim: OptimConfig = block(OptimConfig, lr=1e-5)
    model: CriticModelConfig = block(CriticModelConfig)
    megatron: MegatronConfig = block_following_actor(
        MegatronConfig, "megatron", *MEGATRON_PARALLEL_KEYS
    )
    ulysses_sequence_parallel_size: Count = follows(f".model.{ULYSSES_SIZE_KEY}")
    """Ranks that split each sequence; their number multiplies the token budgets."""
