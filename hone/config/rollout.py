"""Rollout: which engine decodes, how it samples, turns and tools, validation sampling.

`native` is ours and decodes with the actor's own parameters; server settings of other engines are neutral.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hone.config.block import Block
from hone.config.engine import sequences_per_rank
from hone.config.keys import follows
from hone.config.profiler import ProfilerConfig

SINGLE_TURN_LOOP, TOOL_LOOP = "single_turn_agent", "tool_agent"
BUILT_IN_LOOPS = (SINGLE_TURN_LOOP, TOOL_LOOP)


@dataclass(frozen=True)
class ValKwargs(Block):
    """Sampling during validation."""

    top_k: int = -1
    """Keep the k likeliest tokens; -1 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together reach this probability."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the likeliest."""
    temperature: float = 0.0
    """Softmax temperature; used when `do_sample` is true."""
    n: int = 1
    """Responses a prompt."""
    do_sample: bool = False
    """Sample; false decodes greedily."""


@dataclass(frozen=True)
class MultiTurnConfig(Block):
    """Limits and formats of loops with more than one turn."""

    enable: bool = False
    """Use the tool loop where a row names no loop of its own and tools or interactions are given."""
    max_assistant_turns: int | None = None
    """Model turns a trajectory; null is no limit."""
    tool_config_path: str | None = None
    """YAML file that lists the tools."""
    function_tool_path: str | None = None
    """Python file whose decorated functions are tools."""
    max_user_turns: int | None = None
    """Environment turns a trajectory; null is no limit."""
    max_parallel_calls: int = 1
    """Tool calls of one turn that are made, at the same time; further ones get a sentence."""
    max_tool_calls: int | None = None
    """Tool calls a trajectory; null is no limit. Beyond it the model is told to answer."""
    tool_timeout_s: float = 60.0
    """Seconds one tool call may take (then the model sees a time-out message), and each other wait for a
    tool or an interaction."""
    trajectory_timeout_s: float | None = None
    """Seconds after which a trajectory ends with its current turn; null is no limit."""
    max_tool_response_length: int = 256
    """Longest tool answer, in characters as the family counts; longer ones are cut."""
    tool_response_truncate_side: Literal["left", "right", "middle"] = "middle"
    """What a cut keeps: left the head, right the tail, middle both."""
    max_observation_tokens: int | None = None
    """Longest tool answer in tokens; null leaves only the character limit."""
    interaction_config_path: str | None = None
    """YAML file that lists the interactions (simulated users)."""
    use_inference_chat_template: bool = False
    """A switch of a path that does not exist here."""
    tokenization_sanity_check_mode: Literal["disable", "strict", "ignore_strippable"] = "strict"
    """Check of re-tokenised turns; nothing is re-tokenised here."""
    format: str = "hermes"
    """Tool-call parser: hermes, or `pkg.mod:Class` for your own."""
    num_repeat_rollouts: int | None = None
    """Nothing reads it in the family either."""


@dataclass(frozen=True)
class CustomAsyncServerConfig(Block):
    """A user's own server class."""

    path: str | None = None
    """File of the class."""
    name: str | None = None
    """Name of the class."""


@dataclass(frozen=True)
class AgentConfig(Block):
    """Agent loops."""

    num_workers: int = 8
    """Loop workers; loops are coroutines beside their engine here."""
    default_agent_loop: str = SINGLE_TURN_LOOP
    """Loop of rows that name none in `agent_name`; `pkg.mod:Class` is your own."""
    agent_loop_config_path: str | None = None
    """YAML file that lists more loops (name, _target_, arguments)."""
    custom_async_server: CustomAsyncServerConfig = field(default_factory=CustomAsyncServerConfig)
    """A user's own server class."""


@dataclass(frozen=True)
class CheckpointEngineConfig(Block):
    """How weights reach a rollout engine that holds its own copy."""

    backend: str = "naive"
    """How weights travel to a rollout pool of its own: memory_file or cuda_ipc on one machine, gloo or
    nccl; naive chooses by where both stand. In the trainer's processes nothing travels."""
    update_weights_bucket_megabytes: int = 2048
    """Megabytes in one transfer."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """More arguments of the backend."""

    @property
    def bucket_bytes(self) -> int:
        return self.update_weights_bucket_megabytes * 2**20


@dataclass(frozen=True)
class TraceConfig(Block):
    """Tracing of agent loops."""

    backend: str | None = None
    """mlflow or weave."""
    token2text: bool = False
    """Write text beside ids."""
    max_samples_per_step_per_worker: int | None = None
    """Traces a step and worker."""


@dataclass(frozen=True)
class PrometheusConfig(Block):
    """Metrics endpoint of rollout servers."""

    enable: bool = False
    """Open the endpoint."""
    port: int = 9090
    """Its port."""
    file: str | None = None
    """File to list the endpoints in."""
    served_model_name: str | None = field(default=follows("actor_rollout_ref.model.path"))
    """Name of the model in the metrics."""


@dataclass(frozen=True)
class EngineKwargs(Block):
    """Arguments passed through to other engines."""

    vllm: dict[str, Any] = field(default_factory=dict)
    """For vLLM."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """For SGLang."""
    trtllm: dict[str, Any] = field(default_factory=dict)
    """For TensorRT-LLM."""


@dataclass(frozen=True)
class SamplingConfig(Block):
    """How one response is drawn in training."""

    temperature: float = 1.0
    """Softmax temperature; the trainer's log-probs use it too."""
    top_k: int = -1
    """Keep the k likeliest tokens; -1 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together reach this probability."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the likeliest."""
    do_sample: bool = True
    """Sample; false decodes greedily."""
    n: int = 1
    """Responses a prompt (group size)."""
    stop: str | tuple[str, ...] = ()
    """Strings that end a turn; they stay in the response."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a turn, beside the model's own end tokens."""
    ignore_eos: bool = False
    """Go on after the end token, up to the length limit."""
    max_tokens_per_turn: int | None = None
    """Longest turn in tokens; null is what is left of `response_length`."""
    seed: int | None = field(default=follows("trainer.seed"))
    """Seed of sampling; follows the run seed."""


@dataclass(frozen=True)
class RolloutConfig(SamplingConfig):
    """Producing trajectories."""

    name: str = "native"
    """Engine: native decodes with the actor's own parameters, hf is the slow reference; your own is
    pkg.mod:Class."""
    mode: Literal["async", "sync"] = "async"
    """Loops always run as coroutines; both values give that."""
    prompt_length: int = field(default=follows("data.max_prompt_length"))
    """Longest prompt in tokens; follows the data."""
    response_length: int = field(default=follows("data.max_response_length"))
    """Longest response in tokens, all turns together; follows the data."""
    dtype: Literal["auto", "fp32", "float32", "bf16", "bfloat16"] = "auto"
    """Compute dtype; auto is the actor's."""
    exact: bool = False
    """Rollout and trainer log-probs agree bit for bit, at a cost: Llama and Qwen2 families, one rank."""
    gpu_memory_utilization: float = 0.5
    """Share of GPU memory for the KV cache; nothing to share out on CPU."""
    enforce_eager: bool = False
    """No CUDA graphs, for debugging."""
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """Batch sizes to capture as CUDA graphs; null chooses."""
    free_cache_engine: bool = True
    """Free the KV cache after generation."""
    tensor_model_parallel_size: int = 1
    """Ranks that share one copy of the model when decoding."""
    data_parallel_size: int = 1
    """Copies inside one server."""
    expert_parallel_size: int = 1
    """Ranks that share the experts."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages."""
    max_num_batched_tokens: int = 8192
    """Tokens of one prefill batch."""
    max_model_len: int | None = None
    """Longest prompt plus response; null is prompt_length + response_length."""
    max_num_seqs: int = 256
    """Sequences decoded at the same time."""
    enable_chunked_prefill: bool = True
    """Cut long prefills into batches of `max_num_batched_tokens`."""
    enable_prefix_caching: bool = True
    """Keep the keys and values of shared prefixes."""
    logprobs_mode: str = "processed_logprobs"
    """Log-probs after temperature; top-k and top-p do not renormalise them."""
    scheduling_policy: str = "fcfs"
    """Order of waiting requests."""
    load_format: str = "auto"
    """Where an engine with its own copy first loads weights from."""
    log_prob_micro_batch_size: int | None = None
    """Sequences in one forward over all ranks; give `log_prob_micro_batch_size_per_gpu`."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Old log-probs: sequences in one forward on one rank; null uses the token budget."""
    log_prob_use_dynamic_bsz: bool = field(
        default=follows("actor_rollout_ref.actor.use_dynamic_bsz")
    )
    """Old log-probs: form micro-batches by token budget; follows the actor."""
    log_prob_max_token_len_per_gpu: int = field(
        default=follows("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    )
    """Old log-probs: token budget of one forward on one rank; follows the actor."""
    disable_log_stats: bool = True
    """Do not log the engine's own statistics."""
    over_sample_rate: float = 0.0
    """Nothing reads it in the family either."""
    multi_stage_wake_up: bool = False
    """Wake weights and cache apart."""
    engine_kwargs: EngineKwargs = field(default_factory=EngineKwargs)
    """Arguments passed through to other engines."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    """Sampling during validation."""
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    """Limits and formats of loops with more than one turn."""
    calculate_log_probs: bool = True
    """Keep the log-probs of sampled tokens: correction and `rollout_corr/*` read them."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """Agent loops."""
    checkpoint_engine: CheckpointEngineConfig = field(default_factory=CheckpointEngineConfig)
    """How weights reach an engine that holds its own copy."""
    trace: TraceConfig = field(default_factory=TraceConfig)
    """Tracing of agent loops."""
    skip_rollout: bool = False
    """Reuse generations dumped by an earlier run."""
    skip_dump_dir: str | None = None
    """Folder of those generations."""
    skip_tokenizer_init: bool = True
    """Engines see token ids only."""
    enable_rollout_routing_replay: bool = False
    """Record expert routing."""
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    """Profiling of the rollout."""
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)
    """Metrics endpoint of rollout servers."""
    quantization: str | None = None
    """Quantised weights for decoding."""
    quantization_config_file: str | None = None
    """Settings of the quantisation."""
    layered_summon: bool = False
    """Gather LoRA weights layer by layer."""
    full_determinism: bool = False
    """Deterministic sampling; the native engine's always is."""
    nnodes: int = 0
    """Nodes of a rollout pool of its own; 0 shares the trainer's."""
    n_gpus_per_node: int = field(default=follows("trainer.n_gpus_per_node"))
    """Devices a node of that pool."""

    @property
    def default_loop(self) -> str:
        """The agent loop of rows that name none; `multi_turn.enable` turns single turns into talks."""
        named = self.agent.default_agent_loop
        return TOOL_LOOP if self.multi_turn.enable and named == SINGLE_TURN_LOOP else named

    @property
    def max_total_tokens(self) -> int:
        """Longest prompt plus response in tokens."""
        return self.max_model_len or self.prompt_length + self.response_length

    def log_prob_sequences_per_micro_batch(self, ranks: int) -> int | None:
        """Old log-probs: sequences in one forward on one rank; None: the token budget decides."""
        if self.log_prob_use_dynamic_bsz:
            return None
        return sequences_per_rank(
            self.log_prob_micro_batch_size_per_gpu, self.log_prob_micro_batch_size, ranks
        )
