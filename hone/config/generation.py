"""The trees `generation`, which generates responses for prompts, and `evaluation`, which scores them."""

from __future__ import annotations

from typing import Literal

from hone.config.block import SchemaBlock, block
from hone.config.model import ModelSourceConfig
from hone.config.ranges import Count, CountOrAll, Positive, PositiveFraction
from hone.config.reward import CustomRewardFunctionConfig, SandboxConfig
from hone.config.rollout import RolloutEngineConfig, SearchServiceConfig
from hone.config.trainer import RunTree
from hone.types import Settings


class GenerationDataConfig(SchemaBlock):
    """Prompt and response files."""

    path: tuple[str, ...] = ("~/data/rlhf/math/test.parquet",)
    """Parquet or jsonl files of prompts; one path or a list. Required."""
    prompt_key: str = "prompt"
    """Column of the prompt: a list of messages, or a string (one user turn)."""
    prompt_format: Literal["chat", "raw"] = "chat"
    """chat renders the prompt with the chat template; raw uses the string unchanged."""
    n_samples: Count = 5
    """Responses per prompt."""
    output_path: str = "math_Qwen2-7B-Instruct.parquet"
    """File to write: the rows with a `responses` column. Required."""
    overwrite: bool = False
    """Replace a file that another job wrote; a finished file of the same job is never replaced."""
    batch_size: Count = 128
    """Concurrent prompts; a row is saved as soon as its last response ends."""
    max_samples: CountOrAll = -1
    """Number of rows to use; -1 uses all."""
    apply_chat_template_kwargs: Settings = block(dict)
    """Additional arguments of the chat template."""


class GenerationRolloutConfig(RolloutEngineConfig):
    """Engine and sampling."""

    dtype: Literal["auto", "fp32", "float32", "bf16", "bfloat16"] = "auto"
    """Compute dtype; auto is fp32 on CPU and bf16 on GPU."""
    calculate_log_probs: bool = False
    """Also write a `log_probs` column."""


class GenerationSearchConfig(SearchServiceConfig):
    """Search between the turns of a response, as with `search_agent` in training."""

    url: str | None = None
    """URL of the retrieval service, also set by `--search URL`; null generates a single turn."""
    max_turns: Count = 10
    """Maximum searches per response, followed by one turn without search."""
    max_obs_length: Count = 512
    """Maximum length of the passages of one search, in tokens."""


class GenerationConfig(RunTree):
    """The config of a generation run."""

    data: GenerationDataConfig = block(GenerationDataConfig)
    model: ModelSourceConfig = block(ModelSourceConfig, path="~/models/Qwen2-7B-Instruct")
    rollout: GenerationRolloutConfig = block(GenerationRolloutConfig, top_k=50, top_p=0.7)
    search: GenerationSearchConfig = block(GenerationSearchConfig)


class EvaluationDataConfig(SchemaBlock):
    """The file to score."""

    path: tuple[str, ...] = ("math_Qwen2-7B-Instruct.parquet",)
    """Parquet or jsonl files with a column of responses; one path or a list. Required."""
    response_key: str = "responses"
    """Column of the responses, one list per row."""
    data_source_key: str = "data_source"
    """Column whose value selects the score function."""
    reward_model_key: str = "reward_model"
    """Column with the ground truth."""


class EvaluationMetricsConfig(SchemaBlock):
    """Metrics computed from the scores."""

    pass_at: tuple[int, ...] | None = None
    """Values of k for pass@k, best@k and maj@k; null: powers of two up to the responses per row."""
    correct_from: float = 1.0
    """Minimum score that counts as correct in pass@k."""
    confidence: PositiveFraction = 0.95
    """Confidence level of intervals: bootstrap over rows, or exact binomial if all scores are 0 or all 1."""
    bootstrap_samples: Count = 1000
    """Bootstrap samples for the confidence intervals."""
    seed: int = 1
    """Seed of the bootstrap."""


class EvaluationOutputConfig(SchemaBlock):
    """Output files of the results."""

    json_path: str | None = None
    """JSON file for the results; null only prints them."""
    plot_path: str | None = None
    """PNG plot of the results; null draws none."""
    scores_path: str | None = None
    """Parquet file of the rows with a `scores` column; null writes none."""


class EvaluationConfig(SchemaBlock):
    """The config of an evaluation."""

    data: EvaluationDataConfig = block(EvaluationDataConfig)
    custom_reward_function: CustomRewardFunctionConfig = block(CustomRewardFunctionConfig)
    metrics: EvaluationMetricsConfig = block(EvaluationMetricsConfig)
    output: EvaluationOutputConfig = block(EvaluationOutputConfig)
    sandbox_fusion: SandboxConfig = block(SandboxConfig)
    num_processes: Count | None = None
    """Scoring processes; null uses the number of cores."""
    timeout_s: Positive = 300.0
    """Seconds that one score may take before it counts as failed."""
