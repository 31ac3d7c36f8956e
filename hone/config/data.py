"""Config of the data that `hone.data` loads; lengths are in tokens, batch sizes in prompts."""

from __future__ import annotations

from typing import Literal

from hone.config.block import SchemaBlock, block, follows
from hone.config.ranges import Count, CountOrAll, Fraction, OneOrMore
from hone.types import Settings


class CustomClassConfig(SchemaBlock):
    """A custom class in a file or module."""

    path: str | None = None
    """File or module that holds the class, or `file.py:Class`; null uses the built-in class."""
    name: str | None = None
    """Name of the class, if the path does not end with it."""


class SamplerConfig(SchemaBlock):
    """A custom sampler (curriculum)."""

    class_path: str | None = None
    """File or module that holds the sampler, or `file.py:Class`; null uses `shuffle`."""
    class_name: str | None = None
    """Name of the sampler class, if the path does not end with it."""


class RowsConfig(SchemaBlock):
    """Rows to train and validate on."""

    train_files: tuple[str, ...] = ("~/data/rlhf/gsm8k/train.parquet",)
    """Parquet or jsonl files to train on; one path or a list."""
    val_files: tuple[str, ...] | None = ("~/data/rlhf/gsm8k/test.parquet",)
    """Parquet or jsonl files to validate on; one path or a list. [] or null disables validation."""
    train_max_samples: CountOrAll = -1
    """Number of training rows to use; -1 uses all."""
    val_max_samples: CountOrAll = -1
    """Number of validation rows to use; -1 uses all."""
    prompt_key: str = "prompt"
    """Column of the prompt: a list of messages, or a string (one user turn)."""
    prompt_format: Literal["chat", "raw"] = "chat"
    """chat renders the prompt with the chat template; raw uses the string unchanged."""
    shuffle: bool = True
    """Shuffle training rows each epoch."""
    seed: int | None = None
    """Seed of the data order; null uses the run seed."""
    custom_cls: CustomClassConfig = block(CustomClassConfig)
    apply_chat_template_kwargs: Settings = block(dict)
    """Additional arguments of the chat template."""
    on_bad_row: Literal["raise", "skip"] = "raise"
    """Whether an invalid row stops the run, or is skipped and counted."""


class DataConfig(RowsConfig):
    """Prompts to train and validate on."""

    dataset_weights: tuple[float, ...] | None = None
    """Share of each training file in a batch, in the order of `train_files`; null mixes by size."""
    reward_fn_key: str = "data_source"
    """Column whose value selects the score function."""
    max_prompt_length: Count = 512
    """Maximum prompt length in tokens."""
    max_response_length: Count = 512
    """Maximum response length in tokens, over all turns."""
    train_batch_size: Count = 1024
    """Prompts per step."""
    gen_batch_size: Count | None = None
    """Prompts per generation batch when groups are filtered; null is `train_batch_size` times
    `oversample_factor`."""
    oversample_factor: OneOrMore = 1.0
    """Prompts that get responses in each step, as a multiple of `train_batch_size`; filters select groups."""
    filter_accuracy: bool = False
    """Prefer groups whose mean score lies between the two accuracy bounds; other groups fill up the batch."""
    accuracy_lower_bound: Fraction = 0.2
    """Lowest mean score that `filter_accuracy` prefers."""
    accuracy_upper_bound: Fraction = 0.8
    """Highest mean score that `filter_accuracy` prefers."""
    filter_truncate: bool = False
    """Prefer groups without a response of `max_response_length` tokens; other groups fill up the batch."""
    output_path: str | None = None
    """main_generation_server: file to write the responses to."""
    val_batch_size: Count | None = None
    """Prompts per validation round; null is all at once."""
    tool_config_path: str | None = follows("actor_rollout_ref.rollout.multi_turn.tool_config_path")
    """YAML file that lists the tools whose schemas enter the prompt; default: the rollout's file."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """How a prompt longer than `max_prompt_length` is handled."""
    validation_shuffle: bool = False
    """Shuffle validation rows."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than `max_prompt_length` before training."""
    image_key: str = "images"
    """Column of images; training refuses rows with images, since no supported model reads them."""
    video_key: str = "videos"
    """Column of videos; training refuses rows with videos, since no supported model reads them."""
    audio_key: str = "audios"
    """Column of audio clips; training refuses rows with audio, since no supported model reads them."""
    trust_remote_code: bool = follows("actor_rollout_ref.model.trust_remote_code")
    """Run code that ships with the tokenizer; default: as for the model."""
    sampler: SamplerConfig = block(SamplerConfig)
    datagen: CustomClassConfig = block(CustomClassConfig)

    @property
    def prompts_per_generation(self) -> int:
        """Prompts in one generation round."""
        oversampled_prompts = int(self.train_batch_size * self.oversample_factor)
        return self.gen_batch_size or oversampled_prompts
