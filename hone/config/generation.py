"""The `generation` tree: a file of prompts in, a file with responses out.

It has an engine and sampling, no training; the actor block only takes what the family's file writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hone.config.block import Block
from hone.config.rollout import SamplingConfig
from hone.config.trainer import RayKwargs


@dataclass(frozen=True)
class GenerationDataConfig(Block):
    """Prompts in, responses out."""

    path: tuple[str, ...] = ("~/data/rlhf/math/test.parquet",)
    """Parquet or jsonl files of prompts; one path or a list. Must be given."""
    prompt_key: str = "prompt"
    """Column of the prompt: a list of messages, or a string (one user turn)."""
    prompt_format: Literal["chat", "raw"] = "chat"
    """chat renders with the chat template; raw takes the string as it is."""
    n_samples: int = 5
    """Responses a prompt."""
    output_path: str = "math_Qwen2-7B-Instruct.parquet"
    """File to write: the rows with a `responses` column. Must be given."""
    overwrite: bool = False
    """Replace a file that another job wrote; this job's own finished file stays as it is."""
    batch_size: int = 128
    """Prompts in flight at a time; a row is kept as soon as its last response ends."""
    max_samples: int = -1
    """Rows kept; -1 keeps all."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """More arguments of the chat template."""


@dataclass(frozen=True)
class GenerationModelConfig(Block):
    """The model."""

    path: str = "~/models/Qwen2-7B-Instruct"
    """Folder or hub name of the model; a training checkpoint folder works too. Must be given."""
    tokenizer_path: str | None = None
    """Folder of the tokenizer where it differs from `path`."""
    external_lib: str | tuple[str, ...] | None = None
    """Python modules to import first."""
    trust_remote_code: bool = False
    """Run code that ships with the tokenizer; models are opened with the code of transformers."""
    custom_chat_template: str | None = None
    """Chat template text that replaces the tokenizer's own."""
    lora_adapter_path: str | None = None
    """Folder of an adapter to apply."""


@dataclass(frozen=True)
class GenerationRolloutConfig(SamplingConfig):
    """Engine and sampling."""

    top_k: int = 50
    """Keep the k likeliest tokens; -1 keeps all."""
    top_p: float = 0.7
    """Keep the likeliest tokens that together reach this probability."""
    name: str = "native"
    """Engine: native is ours, hf is the slow reference; your own is pkg.mod:Class."""
    mode: Literal["async", "sync"] = "async"
    """Requests always run as coroutines; both values give that."""
    prompt_length: int = 1536
    """Longest prompt in tokens."""
    response_length: int = 512
    """Longest response in tokens."""
    dtype: Literal["auto", "fp32", "float32", "bf16", "bfloat16"] = "auto"
    """Compute dtype; auto is fp32 on CPU and bf16 on GPU."""
    gpu_memory_utilization: float = 0.5
    """Share of GPU memory for the KV cache."""
    enforce_eager: bool = False
    """No CUDA graphs, for debugging."""
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """Batch sizes to capture as CUDA graphs; null chooses."""
    enable_prefix_caching: bool = True
    """Keep the keys and values of shared prefixes."""
    exact: bool = False
    """Log-probs are bit for bit those of a training pass: Llama and Qwen2 families, one rank."""
    free_cache_engine: bool = True
    """Free the KV cache after generation."""
    load_format: str = "auto"
    """Where an engine with its own copy first loads weights from."""
    tensor_model_parallel_size: int = 1
    """Ranks that share one copy of the model."""
    data_parallel_size: int = 1
    """Copies inside one server."""
    max_num_batched_tokens: int = 8192
    """Tokens of one prefill batch."""
    max_model_len: int | None = None
    """Longest prompt plus response; null is prompt_length + response_length."""
    max_num_seqs: int = 256
    """Sequences decoded at the same time."""
    log_prob_micro_batch_size: int | None = None
    """Nothing is trained here."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Nothing is trained here."""
    disable_log_stats: bool = True
    """Do not log the engine's own statistics."""
    enable_chunked_prefill: bool = True
    """Cut long prefills."""
    calculate_log_probs: bool = False
    """Write a `log_probs` column beside the responses."""

    @property
    def max_total_tokens(self) -> int:
        """Longest prompt plus response in tokens."""
        return self.max_model_len or self.prompt_length + self.response_length


@dataclass(frozen=True)
class GenerationActorFSDPConfig(Block):
    """Sharding of the model."""

    fsdp_size: int = -1
    """Ranks that share one copy of the model."""
    forward_prefetch: bool = False
    """Gather the next layer's parameters early."""


@dataclass(frozen=True)
class GenerationActorConfig(Block):
    """Keys of the family's file; nothing is trained here."""

    strategy: Literal["fsdp", "fsdp2", "megatron"] = "fsdp2"
    """Engine beyond one rank."""
    ulysses_sequence_parallel_size: int = 1
    """Ranks that share one sequence."""
    entropy_from_logits_with_chunking: bool = False
    """Entropy in chunks."""
    entropy_checkpointing: bool = False
    """Recompute the entropy."""
    fsdp_config: GenerationActorFSDPConfig = field(default_factory=GenerationActorFSDPConfig)
    """Sharding of the model."""


@dataclass(frozen=True)
class GenerationTrainerConfig(Block):
    """Devices and seed."""

    nnodes: int = 1
    """Machines."""
    n_gpus_per_node: int = 1
    """Processes a machine, one a device; prompts are shared out over them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU when there is one."""
    num_threads: int | None = None
    """CPU threads of each process; null: OMP_NUM_THREADS, or its share of the cores."""
    controller: Literal["auto", "local", "ray"] = "auto"
    """auto and local: this process, or one plain process a rank; ray is refused, torchrun spans machines."""
    seed: int = 1
    """Run seed of the sampling."""


@dataclass(frozen=True)
class GenerationConfig(Block):
    """Everything one generation run reads."""

    trainer: GenerationTrainerConfig = field(default_factory=GenerationTrainerConfig)
    """Devices and seed."""
    data: GenerationDataConfig = field(default_factory=GenerationDataConfig)
    """Prompts in, responses out."""
    model: GenerationModelConfig = field(default_factory=GenerationModelConfig)
    """The model."""
    rollout: GenerationRolloutConfig = field(default_factory=GenerationRolloutConfig)
    """Engine and sampling."""
    actor: GenerationActorConfig = field(default_factory=GenerationActorConfig)
    """Keys of the family's file."""
    ray_kwargs: RayKwargs = field(default_factory=RayKwargs)
    """Ray."""

    @property
    def world_size(self) -> int:
        """Ranks of the run, all nodes together."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node
