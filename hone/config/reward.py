"""Rewards: the score function, the manager, reward models and how the parts are mixed."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from hone.config.block import Count, Positive, SchemaBlock, Share, block, follows
from hone.config.engine import MicroBatches, PlacementConfig
from hone.types import Settings


class CustomRewardFunctionConfig(SchemaBlock):
    """A user's own score function."""

    path: str | None = None
    """File, `pkg://module` or module that holds the function; null scores by data source."""
    name: str = "compute_score"
    """Name of the function."""
    reward_kwargs: Settings = field(default_factory=dict)
    """More keyword arguments bound to it."""


class RewardManagerModuleConfig(SchemaBlock):
    """A user's own manager class."""

    path: str | None = None
    """File or module of the class."""
    name: str = "custom_reward_manager"
    """Name of the class."""


class RewardManagerConfig(SchemaBlock):
    """Which manager turns scores into token rewards."""

    source: Literal["register", "importlib"] = "register"
    """register looks `name` up in the table; importlib loads `module`."""
    name: str = follows("reward_model.reward_manager")
    """naive, batch, prime, dapo, blank, or a registered name."""
    module: RewardManagerModuleConfig = block(RewardManagerModuleConfig)


class SandboxConfig(SchemaBlock):
    """A code-running service; null url runs code in the local sandbox."""

    url: str | None = None
    """Address of the service."""
    memory_limit_mb: Count = 1024
    """Memory of one run, for the service and the local sandbox."""


class SandboxFusionConfig(SandboxConfig):
    """A code-running service that scores many responses at the same time."""

    max_concurrent: Count = 64
    """Requests at the same time."""


class OverlongBufferConfig(SchemaBlock):
    """DAPO's soft penalty for long responses."""

    enable: bool = False
    """Apply the penalty."""
    len: int = 0
    """Tokens before the limit over which the penalty grows from 0 to the factor."""
    penalty_factor: float = 1.0
    """Penalty at the limit."""
    log: bool = False
    """Report it beside the score."""


class RewardKwargs(SchemaBlock):
    """Settings of the managers."""

    overlong_buffer_cfg: OverlongBufferConfig = block(OverlongBufferConfig)
    max_resp_len: int | None = None
    """Response limit of that penalty; null takes `data.max_response_length`."""
    num_processes: Count | None = None
    """prime: scoring processes; null chooses by cores."""
    timeout_s: Positive = 300.0
    """prime: seconds one score may take; then its process is killed and counted."""
    on_failure: Literal["raise", "score"] = "score"
    """A score function that raises, hangs or returns NaN stops the run, or gets `failure_score`."""
    failure_score: float = 0.0
    """Score of a failed call when `on_failure=score`."""
    extra: Settings = field(default_factory=dict)
    """More keyword arguments for a manager of your own; unknown keys beside this one land here."""


class RewardModelModelConfig(SchemaBlock):
    """The reward model itself."""

    input_tokenizer: str | None = follows("actor_rollout_ref.model.path")
    """Tokenizer of the policy; null when both share one."""
    path: str | None = None
    """Folder or hub name of the reward model."""
    external_lib: str | tuple[str, ...] | None = follows("actor_rollout_ref.model.external_lib")
    """Python modules to import first; follows the actor."""
    trust_remote_code: bool = False
    """Run code that ships with the model."""
    override_config: Settings = field(default_factory=dict)
    """Changes to the model's own config."""
    fsdp_config: PlacementConfig = block(PlacementConfig)


class RewardModelConfig(MicroBatches):
    """Reward models (outcome or process) and the manager's legacy place."""

    enable: bool = False
    """Score with a reward model."""
    type: Literal["orm", "prm"] = "orm"
    """orm scores a whole response, prm each step."""
    model: RewardModelModelConfig = block(RewardModelModelConfig)
    micro_batch_size: Count | None = None
    """Sequences in one forward over all ranks; give `micro_batch_size_per_gpu`."""
    micro_batch_size_per_gpu: Count | None = None
    """Sequences in one forward on one rank; null uses the token budget."""
    max_length: Count | None = None
    """Longest prompt plus response the reward model reads; longer rows lose their head."""
    use_dynamic_bsz: bool = follows("critic.use_dynamic_bsz")
    """Form micro-batches by token budget; follows the critic."""
    forward_max_token_len_per_gpu: int = follows("critic.forward_max_token_len_per_gpu")
    """Token budget of one forward on one rank; follows the critic."""
    reward_manager: str = "naive"
    """naive, batch, prime, dapo, blank, or a registered name."""
    sandbox_fusion: SandboxFusionConfig = block(SandboxFusionConfig)
    reward_kwargs: RewardKwargs = block(RewardKwargs)
    verifiable_reward_coef: float = 1.0
    """Weight of the rule score in the sum."""
    modeling_reward_coef: float = 1.0
    """Weight of the reward model's score in the sum."""
    turn_reward_coef: dict[str, float] = field(default_factory=dict)
    """Weights of what tools and interactions give a turn, by their names: `{calc_gsm8k_reward: 0.5}`."""
    trajectory_reward_coef: dict[str, float] = field(default_factory=dict)
    """Weights of what tools and interactions give the whole trajectory, by their names."""
    credit_assignment: str | float = 0.1
    """Process rewards: gamma-decay, strict min-form, or a temperature above 0 (soft min)."""
    split_step_char: str = "\n\n"
    """Process rewards: a token whose text ends so closes a step."""
    step_separator: str = "\n"
    """Process rewards: the one token the model reads at the end of a step."""
    repeatness_punishment: bool = False
    """A repetitive response gets rule score 0."""
    high_repeat_threshold: Share = 0.2
    """Repetitiveness above which that happens."""
    structure_format_score: float = 0.0
    """Search scores: credit for a well-formed but wrong trajectory."""
    final_format_score: float = 0.0
    """Search scores: credit for a final answer in its tags."""
    retrieval_score: float = 0.0
    """Search scores: credit for retrieving a passage with the answer."""
    score_observations: bool = False
    """Score what tools and searches said together with the policy's words, as verl does."""
    scores: dict[str, str] = field(default_factory=dict)
    """More score functions: data source to `pkg.mod:function` or `file.py:function`."""
    score_kwargs: Settings = field(default_factory=dict)
    """More keyword arguments for the score functions."""
    format_score: float | None = None
    """Rule scores: credit for a well-formed wrong answer; null: each rule's own (countdown 0.1)."""
