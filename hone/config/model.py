"""The policy's model: where it comes from, how it is changed, LoRA.

Loading happens in `hone.models`; nothing here touches a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hone.config.block import Block


@dataclass(frozen=True)
class FusedKernelOptions(Block):
    """Which fused kernels."""

    impl_backend: Literal["torch", "triton"] = "torch"
    """Implementation of the fused linear + log-softmax."""


@dataclass(frozen=True)
class TiledMLPConfig(Block):
    """MLP computed in slices of the sequence."""

    enabled: bool = False
    """Slice the MLP."""
    num_shards: int = 4
    """Slices."""


@dataclass(frozen=True)
class MTPConfig(Block):
    """Multi-token prediction heads."""

    enable: bool = False
    """Build the heads."""
    enable_train: bool = False
    """Train the heads."""
    enable_rollout: bool = False
    """Decode with the heads."""
    detach_encoder: bool = False
    """Stop gradients into the trunk."""
    mtp_loss_scaling_factor: float = 0.1
    """Weight of the heads' loss."""
    speculative_algorithm: str = "EAGLE"
    """Speculative decoding algorithm."""
    speculative_num_steps: int = 2
    """Speculative steps."""
    speculative_eagle_topk: int = 2
    """Candidates a step."""
    speculative_num_draft_tokens: int = 4
    """Draft tokens."""
    method: str = "mtp"
    """Speculation method."""
    num_speculative_tokens: int = 1
    """Speculated tokens a step."""


@dataclass(frozen=True)
class ModelConfig(Block):
    """The policy's model."""

    path: str = "~/models/deepseek-llm-7b-chat"
    """Folder or hub name of the model; a training checkpoint folder works too."""
    hf_config_path: str | None = None
    """Folder of the model config where it differs from `path`."""
    tokenizer_path: str | None = None
    """Folder of the tokenizer where it differs from `path`."""
    use_shm: bool = False
    """Copy the model into shared memory first."""
    trust_remote_code: bool = False
    """Run code that ships with the tokenizer; models are opened with the code of transformers."""
    custom_chat_template: str | None = None
    """Chat template text that replaces the tokenizer's own."""
    external_lib: str | tuple[str, ...] | None = None
    """Python modules to import first, for example to register an architecture."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's own config."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    enable_activation_offload: bool = False
    """Keep activations in host memory."""
    use_remove_padding: bool = True
    """Rows are packed without padding."""
    lora_rank: int = 0
    """LoRA rank; 0 trains all parameters."""
    lora_alpha: float = 16
    """LoRA scale: the update is multiplied by alpha / rank."""
    lora_dropout: float = 0.0
    """Dropout before the LoRA matrices."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Modules that get LoRA matrices: all-linear, one pattern, or a list of names."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Modules that get none."""
    lora_adapter_path: str | None = None
    """Folder of an adapter to start from."""
    use_liger: bool = False
    """Liger kernels."""
    use_fused_kernels: bool = False
    """Fused linear + log-softmax; chunked log-probs are always on."""
    fused_kernel_options: FusedKernelOptions = field(default_factory=FusedKernelOptions)
    """Which fused kernels."""
    tiled_mlp: TiledMLPConfig = field(default_factory=TiledMLPConfig)
    """MLP computed in slices of the sequence."""
    mtp: MTPConfig = field(default_factory=MTPConfig)
    """Multi-token prediction heads."""

    @property
    def uses_lora(self) -> bool:
        """True when only adapters are trained."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None
