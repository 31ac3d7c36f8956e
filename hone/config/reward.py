"""Rewards: the score function, the manager, reward models and how the parts are mixed.

Parts are named and mixed with explicit coefficients; the sandbox limits live here too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hone.config.block import Block
from hone.config.engine import FSDPConfig, sequences_per_rank
from hone.config.keys import follows
from hone.config.profiler import ProfilerConfig


@dataclass(frozen=True)
class CustomRewardFunctionConfig(Block):
    """A user's own score function."""

    path: str | None = None
    """File, `pkg://module` or module that holds the function; null scores by data source."""
    name: str = "compute_score"
    """Name of the function."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """More keyword arguments bound to it."""


@dataclass(frozen=True)
class RewardManagerModuleConfig(Block):
    """A user's own manager class."""

    path: str | None = None
    """File or module of the class."""
    name: str = "custom_reward_manager"
    """Name of the class."""


@dataclass(frozen=True)
class RewardManagerConfig(Block):
    """Which manager turns scores into token rewards."""

    source: Literal["register", "importlib"] = "register"
    """register looks `name` up in the table; importlib loads `module`."""
    name: str = field(default=follows("reward_model.reward_manager"))
    """naive, batch, prime, dapo, blank, or a registered name."""
    module: RewardManagerModuleConfig = field(default_factory=RewardManagerModuleConfig)
    """A user's own manager class."""


@dataclass(frozen=True)
class SandboxFusionConfig(Block):
    """A code-running service; null url runs code in the local sandbox."""

    url: str | None = None
    """Address of the service."""
    max_concurrent: int = 64
    """Requests at the same time."""
    memory_limit_mb: int = 1024
    """Memory of one run, for the service and the local sandbox."""


@dataclass(frozen=True)
class OverlongBufferConfig(Block):
    """DAPO's soft penalty for long responses."""

    enable: bool = False
    """Apply the penalty."""
    len: int = 0
    """Tokens before the limit over which the penalty grows from 0 to the factor."""
    penalty_factor: float = 1.0
    """Penalty at the limit."""
    log: bool = False
    """Report it beside the score."""


@dataclass(frozen=True)
class RewardKwargs(Block):
    """Settings of the managers."""

    overlong_buffer_cfg: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    """DAPO's soft penalty for long responses."""
    max_resp_len: int | None = None
    """Response limit of that penalty; null takes `data.max_response_length`."""
    num_processes: int | None = None
    """prime: scoring processes; null chooses by cores."""
    timeout_s: float = 300.0
    """prime: seconds one score may take; then its process is killed and counted."""
    on_failure: Literal["raise", "score"] = "score"
    """A score function that raises, hangs or returns NaN stops the run, or gets `failure_score`."""
    failure_score: float = 0.0
    """Score of a failed call when `on_failure=score`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More keyword arguments for a manager of your own; unknown keys beside this one land here."""


@dataclass(frozen=True)
class RewardModelModelConfig(Block):
    """The reward model itself."""

    input_tokenizer: str | None = field(default=follows("actor_rollout_ref.model.path"))
    """Tokenizer of the policy; null when both share one."""
    path: str | None = None
    """Folder or hub name of the reward model."""
    external_lib: str | tuple[str, ...] | None = field(
        default=follows("actor_rollout_ref.model.external_lib")
    )
    """Python modules to import first; follows the actor."""
    trust_remote_code: bool = False
    """Run code that ships with the model."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's own config."""
    use_shm: bool = False
    """Copy the model into shared memory first."""
    use_remove_padding: bool = True
    """Rows are packed without padding."""
    use_fused_kernels: bool = False
    """Fused kernels; a scoring head has none."""
    fsdp_config: FSDPConfig = field(default_factory=lambda: FSDPConfig(forward_only=True))
    """Sharding, dtype, offload."""


@dataclass(frozen=True)
class RewardServerConfig(Block):
    """A generative reward model behind an inference server."""

    name: str | None = None
    """Engine of the server; null has no server."""
    dtype: str = "auto"
    """Compute dtype."""
    gpu_memory_utilization: float = 0.5
    """Share of GPU memory."""
    enforce_eager: bool = True
    """No CUDA graphs."""
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """Batch sizes to capture."""
    free_cache_engine: bool = True
    """Free the KV cache when idle."""
    data_parallel_size: int = 1
    """Copies inside one server."""
    expert_parallel_size: int = 1
    """Ranks that share the experts."""
    tensor_model_parallel_size: int = 1
    """Ranks that share one copy."""
    max_num_batched_tokens: int = 8192
    """Tokens of one prefill batch."""
    max_model_len: int | None = None
    """Longest prompt plus response."""
    max_num_seqs: int = 1024
    """Sequences decoded at the same time."""
    load_format: str = "auto"
    """Where weights are loaded from."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """More arguments of the engine."""
    limit_images: int | None = None
    """Images a prompt."""
    enable_chunked_prefill: bool = True
    """Cut long prefills."""
    enable_prefix_caching: bool = True
    """Keep shared prefixes."""
    disable_log_stats: bool = True
    """Do not log statistics."""
    skip_tokenizer_init: bool = False
    """Serve ids only."""
    prompt_length: int = 2048
    """Longest prompt."""
    response_length: int = 2048
    """Longest answer."""


@dataclass(frozen=True)
class RewardModelConfig(Block):
    """Reward models (outcome or process) and the manager's legacy place."""

    enable: bool = False
    """Score with a reward model."""
    type: Literal["orm", "prm"] = "orm"
    """orm scores a whole response, prm each step."""
    enable_resource_pool: bool = False
    """Give the reward model devices of its own."""
    n_gpus_per_node: int = field(default=follows("trainer.n_gpus_per_node"))
    """Devices a node of that pool."""
    nnodes: int = 0
    """Nodes of that pool."""
    strategy: Literal["fsdp", "fsdp2", "megatron", "veomni"] = "fsdp2"
    """Engine beyond one rank."""
    model: RewardModelModelConfig = field(default_factory=RewardModelModelConfig)
    """The reward model itself."""
    micro_batch_size: int | None = None
    """Sequences in one forward over all ranks; give `micro_batch_size_per_gpu`."""
    micro_batch_size_per_gpu: int | None = None
    """Sequences in one forward on one rank; null uses the token budget."""
    max_length: int | None = None
    """Longest prompt plus response the reward model reads; longer rows lose their head."""
    use_dynamic_bsz: bool = field(default=follows("critic.use_dynamic_bsz"))
    """Form micro-batches by token budget; follows the critic."""
    forward_max_token_len_per_gpu: int = field(
        default=follows("critic.forward_max_token_len_per_gpu")
    )
    """Token budget of one forward on one rank; follows the critic."""
    ulysses_sequence_parallel_size: int = 1
    """Ranks that share one sequence."""
    reward_manager: str = "naive"
    """naive, batch, prime, dapo, blank, or a registered name."""
    launch_reward_fn_async: bool = False
    """Score while log-probs are computed."""
    use_reward_loop: bool = True
    """Score each response as soon as it is there."""
    reward_loop_source: Literal["register", "importlib"] = "register"
    """Where the reward-loop manager comes from."""
    reward_loop_module_path: str | None = None
    """File of a reward-loop manager."""
    reward_loop_class_name: str | None = None
    """Class of a reward-loop manager."""
    num_workers: int = 1
    """Reward workers."""
    sandbox_fusion: SandboxFusionConfig = field(default_factory=SandboxFusionConfig)
    """A code-running service."""
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    """Profiling of the reward model."""
    rollout: RewardServerConfig = field(default_factory=RewardServerConfig)
    """A generative reward model behind an inference server."""
    reward_kwargs: RewardKwargs = field(default_factory=RewardKwargs)
    """Settings of the managers."""
    verifiable_reward_coef: float = 1.0
    """Weight of the rule score in the sum."""
    modeling_reward_coef: float = 1.0
    """Weight of the reward model's score in the sum."""
    credit_assignment: str | float = 0.1
    """Process rewards: gamma-decay, strict min-form, or a temperature above 0 (soft min)."""
    training: bool = False
    """Train the reward model during the run."""
    split_step_char: str = "\n\n"
    """Process rewards: a token whose text ends so closes a step."""
    step_separator: str = "\n"
    """Process rewards: the one token the model reads at the end of a step."""
    repeatness_punishment: bool = False
    """A repetitive response gets rule score 0."""
    high_repeat_threshold: float = 0.2
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
    score_kwargs: dict[str, Any] = field(default_factory=dict)
    """More keyword arguments for the score functions."""
    format_score: float | None = None
    """Rule scores: credit for a well-formed wrong answer; null: each rule's own (countdown 0.1)."""

    def sequences_per_micro_batch(self, ranks: int) -> int | None:
        """Sequences in one forward on one rank; None where the token budget decides."""
        if self.use_dynamic_bsz:
            return None
        return sequences_per_rank(self.micro_batch_size_per_gpu, self.micro_batch_size, ranks)
