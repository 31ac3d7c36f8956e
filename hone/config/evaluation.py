"""The `evaluation` tree: a file with responses in, scores per data source out."""

from __future__ import annotations

from hone.config.block import Count, Positive, PositiveShare, SchemaBlock, block
from hone.config.reward import CustomRewardFunctionConfig, SandboxConfig


class EvaluationDataConfig(SchemaBlock):
    """The file to score."""

    path: tuple[str, ...] = ("math_Qwen2-7B-Instruct.parquet",)
    """Parquet or jsonl files with a column of responses; one path or a list. Must be given."""
    response_key: str = "responses"
    """Column of the responses, a list per row."""
    data_source_key: str = "data_source"
    """Column that chooses the score function."""
    reward_model_key: str = "reward_model"
    """Column with the ground truth."""


class EvaluationMetricsConfig(SchemaBlock):
    """What is computed from the scores."""

    pass_at: tuple[int, ...] | None = None
    """k of pass@k, best@k and maj@k; null is the powers of two up to the responses per row."""
    correct_from: float = 1.0
    """Least score that counts as correct in pass@k."""
    confidence: PositiveShare = 0.95
    """Level of the intervals: bootstrap over rows, or exact binomial where all are 0 or all are 1."""
    bootstrap_samples: Count = 1000
    """Resamples of the rows for the intervals."""
    seed: int = 1
    """Seed of the resampling."""


class EvaluationOutputConfig(SchemaBlock):
    """Where the results go."""

    json_path: str | None = None
    """File for the results; null prints only."""
    plot_path: str | None = None
    """PNG of the results; null draws none."""
    scores_path: str | None = None
    """Parquet of the rows with a `scores` column; null writes none."""


class EvaluationConfig(SchemaBlock):
    """Everything one evaluation reads."""

    data: EvaluationDataConfig = block(EvaluationDataConfig)
    custom_reward_function: CustomRewardFunctionConfig = block(CustomRewardFunctionConfig)
    metrics: EvaluationMetricsConfig = block(EvaluationMetricsConfig)
    output: EvaluationOutputConfig = block(EvaluationOutputConfig)
    sandbox_fusion: SandboxConfig = block(SandboxConfig)
    num_processes: Count | None = None
    """Scoring processes; null chooses by cores."""
    timeout_s: Positive = 300.0
    """Seconds one score may take; then it counts as failed."""
