"""Config of the reward: score function, reward manager, reward models and their weights."""

from __future__ import annotations

from typing import Literal

from hone.config.block import SchemaBlock, block, follows
from hone.config.data import CustomClassConfig
from hone.config.engine import (
    MODEL_KEY,
    ULYSSES_SIZE_KEY,
    FSDPConfig,
    MicroBatches,
    OptimConfig,
    ProfilerConfig,
)
from hone.config.ranges import Count, CountOrZero, Fraction, NotNegative, Positive
from hone.types import Settings


class CustomRewardFunctionConfig(SchemaBlock):
    """A custom score function."""

    path: str | None = None
    """File, `pkg://module` or module that holds the function; null scores by data source."""
    name: str = "compute_score"
    """Name of the function."""
    reward_kwargs: Settings = block(dict)
    """Additional keyword arguments of the function."""


class RewardManagerConfig(SchemaBlock):
    """The manager that converts scores to token rewards."""

    source: Literal["register", "importlib"] = "register"
    """register looks `name` up in the table; importlib loads `module`."""
    name: str = follows("reward_model.reward_manager")
    """naive, batch, prime, dapo, blank, or a registered name."""
    module: CustomClassConfig = block(CustomClassConfig, name="custom_reward_manager")


class SandboxConfig(SchemaBlock):
    """A code execution service; a null url uses the local sandbox."""

    url: str | None = None
    """Address of the service."""
    memory_limit_mb: Count = 1024
    """Memory of one run, for the service and the local sandbox."""


class SandboxFusionConfig(SandboxConfig):
    """A code execution service that scores many responses concurrently."""

    max_concurrent: Count = 64
    """Maximum concurrent requests."""


class OverlongBufferConfig(SchemaBlock):
    """DAPO's soft penalty for long responses."""

    enable: bool = False
    """Apply the penalty."""
    len: CountOrZero = 0
    """Number of tokens before the length limit in which the penalty grows from 0 to `penalty_factor`."""
    penalty_factor: float = 1.0
    """Penalty at the length limit."""
    log: bool = False
    """Report the penalty with the score."""


class RewardKwargs(SchemaBlock):
    """Settings of the managers."""

    overlong_buffer_cfg: OverlongBufferConfig = block(OverlongBufferConfig)
    max_resp_len: Count | None = None
    """Response limit of the overlong penalty; null uses `data.max_response_length`."""
    num_processes: Count | None = None
    """prime: scoring processes; null uses the number of cores."""
    timeout_s: Positive = 300.0
    """prime: seconds that one score may take before its process is killed and counted as a failure."""
    on_failure: Literal["raise", "score"] = "score"
    """Whether a score function that raises, hangs or returns NaN stops the run or gets `failure_score`."""
    failure_score: float = 0.0
    """Score of a failed call with `on_failure=score`."""
    extra: Settings = block(dict)
    """Additional keyword arguments of a custom manager; unknown keys of this block are moved here."""


class RewardModelModelConfig(SchemaBlock):
    """Source of the reward model."""

    input_tokenizer: str | None = follows("actor_rollout_ref.model.path")
    """Tokenizer of the policy; null if both models use the same tokenizer."""
    path: str | None = None
    """Folder or hub name of the reward model."""
    external_lib: str | tuple[str, ...] | None = follows("actor_rollout_ref.model.external_lib")
    """Python modules to import first; default: the actor's."""
    trust_remote_code: bool = False
    """Run code that ships with the model."""
    override_config: Settings = block(dict)
    """Values that override the model's config.json."""
    fsdp_config: FSDPConfig = block(FSDPConfig)
    ref_path: str | None = None
    """PRIME: folder or hub name of the frozen reference; null is `path`."""
    update: Literal["before", "after", "reverse", "none"] = "before"
    """PRIME: train the model before it scores a batch, after it scored the batch (after, reverse), or not."""
    beta_train: Positive = 0.05
    """PRIME: weight β of the log-ratio."""
    loss_type: Literal["ce", "dpo"] = "ce"
    """PRIME: cross-entropy with the outcome, or DPO against the mean of a group's other outcomes."""
    enable_gradient_checkpointing: bool = follows(f"{MODEL_KEY}.enable_gradient_checkpointing")
    """PRIME: recompute activations in the backward pass; default: as for the actor."""
    optim: OptimConfig = block(OptimConfig, weight_decay=0.0, clip_grad=10.0)


class RewardServerConfig(SchemaBlock):
    """A running server that scores responses; with a null url, the run's own processes score."""

    url: str | tuple[str, ...] | None = None
    """Address as http://HOST:PORT or with the endpoint's path; requests alternate between several URLs."""
    kind: Literal["classify", "pooling", "score", "texts"] = "classify"
    """Endpoint of a classifier: vLLM's classify, pooling or score; texts takes `{texts}` and returns
    `{scores}`."""
    model: str | None = follows("reward_model.model.path")
    """Name of the model at the server."""
    batch_size: Count = 16
    """Texts per request of a classifier."""
    timeout_s: Positive = 60.0
    """Seconds that one request may take."""
    max_concurrency: Count = 32
    """Maximum concurrent requests."""
    requests_per_minute: Positive | None = None
    """Maximum rate of requests; null is unlimited."""
    retries: CountOrZero = 3
    """Retries of a failed request, with exponential backoff."""
    api_key_env: str | None = None
    """Environment variable that holds the server's key; the key itself is never written."""
    cache: str | None = "memory"
    """Cache of the server's answers: memory, a folder that later runs share, or null for none."""


class JudgeConfig(SchemaBlock):
    """A judge: a language model that writes a grade for each response."""

    template: str | None = None
    """Prompt of the judge with {question}, {response} and {ground_truth}, as text or a file; null uses the
    built-in one."""
    format: Literal["text", "json"] = "text"
    """text reads the number after `score_after`; json reads `score` of the last JSON object."""
    score_after: str = "Score:"
    """Text before the grade; only its last occurrence counts."""
    lowest: float = 0.0
    """Lowest grade, which scores 0."""
    highest: float = 10.0
    """Highest grade, which scores 1; a grade outside of the range is a failure."""
    votes: Count = 1
    """Grades per response."""
    vote: Literal["mean", "majority"] = "mean"
    """How several grades become one score; majority takes the lowest of equally frequent grades."""
    temperature: NotNegative = 0.0
    """Sampling temperature of the judge; 0 is greedy."""
    max_tokens: Count = 512
    """Maximum tokens that the judge writes."""


class RewardModelConfig(MicroBatches):
    """Reward models (outcome or process), settings of score functions, and the reward manager."""

    enable: bool = False
    """Score with a reward model."""
    type: Literal["orm", "prm", "prime", "judge"] = "orm"
    """orm scores a whole response; prm scores each step; prime trains a model that scores each token;
    judge is a language model that writes a grade."""
    route_by_style: bool | None = None
    """True: the reward model scores only rows whose `reward_model.style` is model; false: it scores all rows.
    A rule scores the rows of other styles. null is true if a row has the style model."""
    model: RewardModelModelConfig = block(RewardModelModelConfig)
    enable_resource_pool: bool = False
    """Give the reward model a pool of processes and devices of its own, on Ray."""
    n_gpus_per_node: Count = follows("trainer.n_gpus_per_node")
    """Processes per node of the reward model's pool."""
    nnodes: CountOrZero = 0
    """Nodes of the reward model's pool."""
    server: RewardServerConfig = block(RewardServerConfig)
    judge: JudgeConfig = block(JudgeConfig)
    micro_batch_size: Count | None = None
    """Sequences in one forward over all ranks; prefer `micro_batch_size_per_gpu`."""
    micro_batch_size_per_gpu: Count | None = None
    """Sequences in one forward on one rank; null uses the token budget."""
    max_length: Count | None = None
    """Maximum prompt plus response for the reward model; longer rows are truncated from the left."""
    use_dynamic_bsz: bool = follows("critic.use_dynamic_bsz")
    """Form micro-batches by token budget; default: as for the critic."""
    forward_max_token_len_per_gpu: Count = follows("critic.forward_max_token_len_per_gpu")
    """Token budget of one forward on one rank; default: the critic's."""
    ulysses_sequence_parallel_size: Count = follows(f".model.{ULYSSES_SIZE_KEY}")
    """Ranks that split each sequence, for prm and prime; their number multiplies the token budget."""
    reward_manager: str = "naive"
    """naive, batch, prime, dapo, blank, or a registered name."""
    sandbox_fusion: SandboxFusionConfig = block(SandboxFusionConfig)
    reward_kwargs: RewardKwargs = block(RewardKwargs)
    verifiable_reward_coef: float = 1.0
    """Weight of the rule score in `token_level_scores`."""
    modeling_reward_coef: float = 1.0
    """Weight of the reward model's score in `token_level_scores`."""
    turn_reward_coef: dict[str, float] = block(dict)
    """Weights of turn rewards by tool or interaction name: `{calc_gsm8k_reward: 0.5}`."""
    trajectory_reward_coef: dict[str, float] = block(dict)
    """Weights of trajectory rewards by tool or interaction name."""
    credit_assignment: str | float = 0.1
    """Process rewards: gamma-decay, strict min-form, or a temperature above 0 (soft min)."""
    split_step_char: str = "\n\n"
    """Process rewards: a token whose text ends with this string ends a step."""
    step_separator: str = "\n"
    """Process rewards: text of the token that ends a step and has its score. For a causal model, the text may
    be several tokens; the last token that is not blank has the score."""
    step_labels: tuple[str, str] | None = None
    """Process rewards by a causal language model, as Math-Shepherd's: the tokens of a good and of a bad step,
    such as [+,-], whose logits after `step_separator` (such as ки) are compared. null: a token classifier."""
    prime_granularity: Literal["token", "whole"] = "token"
    """PRIME: reward each token, or the last token with the sum."""
    prime_norm: Literal["batch_norm", "none"] = "batch_norm"
    """PRIME: divide implicit rewards by the largest absolute return of the batch."""
    mini_batch_size: Count = follows("actor_rollout_ref.actor.ppo_mini_batch_size")
    """PRIME: sequences in one update of the reward model; default: the actor's number of prompts."""
    repeatness_punishment: bool = False
    """Give repetitive responses a rule score of 0."""
    high_repeat_threshold: Fraction = 0.2
    """Repetitiveness above which a response gets a rule score of 0."""
    structure_format_score: float = 0.0
    """Search scores: credit for a well-formed but wrong trajectory."""
    final_format_score: float = 0.0
    """Search scores: credit for a final answer in its tags."""
    retrieval_score: float = 0.0
    """Search scores: credit for retrieving a passage with the answer."""
    score_observations: bool = False
    """Include tool and search output in the scored text, as verl does."""
    scores: dict[str, str] = block(dict)
    """Additional score functions: data source to `pkg.mod:function` or `file.py:function`."""
    score_kwargs: Settings = block(dict)
    """Additional keyword arguments of the score functions."""
    format_score: float | None = None
    """Rule scores: credit for a well-formed wrong answer; null uses each rule's default (countdown 0.1)."""
    profiler: ProfilerConfig = block(ProfilerConfig)
