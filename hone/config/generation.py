"""The `generation` tree: a file of prompts in, a file with responses out."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from hone.config.block import Count, SchemaBlock, block
from hone.config.model import ModelSourceConfig
from hone.config.rollout import RolloutEngineConfig, SearchServiceConfig
from hone.config.trainer import RunTree
from hone.types import Settings


class GenerationDataConfig(SchemaBlock):
    """Prompts in, responses out."""

    path: tuple[str, ...] = ("~/data/rlhf/math/test.parquet",)
    """Parquet or jsonl files of prompts; one path or a list. Must be given."""
    prompt_key: str = "prompt"
    """Column of the prompt: a list of messages, or a string (one user turn)."""
    prompt_format: Literal["chat", "raw"] = "chat"
    """chat renders with the chat template; raw takes the string as it is."""
    n_samples: Count = 5
    """Responses per prompt."""
    output_path: str = "math_Qwen2-7B-Instruct.parquet"
    """File to write: the rows with a `responses` column. Must be given."""
    overwrite: bool = False
    """Replace a file that another job wrote; this job's own finished file stays as it is."""
    batch_size: Count = 128
    """Prompts in flight at a time; a row is kept as soon as its last response ends."""
    max_samples: int = -1
    """Rows kept; -1 keeps all."""
    apply_chat_template_kwargs: Settings = field(default_factory=dict)
    """More arguments of the chat template."""


class GenerationRolloutConfig(RolloutEngineConfig):
    """Engine and sampling."""

    dtype: Literal["auto", "fp32", "float32", "bf16", "bfloat16"] = "auto"
    """Compute dtype; auto is fp32 on CPU and bf16 on GPU."""
    calculate_log_probs: bool = False
    """Write a `log_probs` column beside the responses."""


class GenerationSearchConfig(SearchServiceConfig):
    """Searches between the turns of a response, as `search_agent` makes them in training."""

    url: str | None = None
    """Retrieval service; `--search URL` sets it. null answers in one turn."""
    max_turns: Count = 10
    """Searches of one response; then comes a turn that does not search."""
    max_obs_length: Count = 512
    """Longest passages of one search in tokens."""


class GenerationConfig(RunTree):
    """Everything one generation run reads."""

    data: GenerationDataConfig = block(GenerationDataConfig)
    model: ModelSourceConfig = block(ModelSourceConfig, path="~/models/Qwen2-7B-Instruct")
    rollout: GenerationRolloutConfig = block(GenerationRolloutConfig, top_k=50, top_p=0.7)
    search: GenerationSearchConfig = block(GenerationSearchConfig)
