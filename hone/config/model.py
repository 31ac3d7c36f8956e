"""Config of the policy's model: its source, its preparation for training, and LoRA."""

from __future__ import annotations

from hone.config.block import SchemaBlock, block
from hone.config.ranges import CountOrZero, Fraction, Positive
from hone.types import Settings


class ModelSourceConfig(SchemaBlock):
    """Source of a model and its tokenizer."""

    path: str = "~/models/deepseek-llm-7b-chat"
    """Folder or hub name of the model; a training checkpoint folder works too."""
    tokenizer_path: str | None = None
    """Folder of the tokenizer, if it differs from `path`."""
    trust_remote_code: bool = False
    """Run code that ships with the tokenizer; models always use the code of transformers."""
    custom_chat_template: str | None = None
    """Chat template text that replaces the tokenizer's."""
    external_lib: str | tuple[str, ...] | None = None
    """Python modules to import first, for example to register an architecture."""
    lora_adapter_path: str | None = None
    """Folder of a LoRA adapter: training starts from it, and generation applies it."""


class TrainedModelConfig(SchemaBlock):
    """Preparation of a model for training: config overrides, gradient checkpointing, LoRA."""

    override_config: Settings = block(dict)
    """Values that override the model's config.json."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    lora_rank: CountOrZero = 0
    """LoRA rank; 0 trains all parameters."""
    lora_alpha: Positive = 16
    """LoRA scale: the product of the LoRA matrices is multiplied by alpha / rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Modules that get LoRA matrices: all-linear, one pattern, or a list of names."""


class ModelConfig(TrainedModelConfig, ModelSourceConfig):
    """The policy's model."""

    lora_dropout: Fraction = 0.0
    """Dropout before the LoRA matrices."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Modules that get no LoRA matrices."""

    @property
    def uses_lora(self) -> bool:
        """Whether only adapters are trained."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None
