"""The `evaluation` tree: scores a file of responses per data source."""

from __future__ import annotations

from hone.config.block import SchemaBlock, block
from hone.config.ranges import Count, Positive, PositiveShare
from hone.config.reward import CustomRewardFunctionConfig, SandboxConfig


class EvaluationDataConfig(SchemaBlock):
    """The file to score."""

    path: tuple[str, ...] = ("math_Qwen2-7B-Instruct.parquet",)
    """Parquet or jsonl files with a column of responses; one path or a list. Must be given."""
    response_key: str = "responses"
    """Column of the responses, one list per row."""
    data_source_key: str = "data_source"
    """Column that chooses the score function."""
    reward_model_key: str = "reward_model"
    """Column with the ground truth."""


class EvaluationMetricsConfig(SchemaBlock):
    """Metrics computed from the scores."""

    pass_at: tuple[int, ...] | None = None
    """Values of k for pass@k, best@k and maj@k; null is the powers of two up to the responses per row."""
    correct_from: float = 1.0
    """Minimum score that counts as correct in pass@k."""
    confidence: PositiveShare = 0.95
    """Confidence level: bootstrap over rows, or exact binomial if all scores are 0 or all are 1."""
    bootstrap_samples: Count = 1000
    """Bootstrap samples for the confidence intervals."""
    seed: int = 1
    """Seed of the resampling."""


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
