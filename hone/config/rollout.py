"""Config of the rollout: engine, sampling, turns and tools, validation sampling."""

from __future__ import annotations

from typing import Literal

from hone.config.block import SchemaBlock, block, follows
from hone.config.engine import LogProbConfig, ProfilerConfig, block_following_actor
from hone.config.ranges import (
    Count,
    CountOrZero,
    Fraction,
    NotNegative,
    Positive,
    PositiveFraction,
    TopK,
)
from hone.types import Settings

SINGLE_TURN_LOOP, TOOL_LOOP, SEARCH_LOOP = "single_turn_agent", "tool_agent", "search_agent"
BUILT_IN_LOOPS = (SINGLE_TURN_LOOP, TOOL_LOOP, "react_agent", SEARCH_LOOP)


class DistributionConfig(SchemaBlock):
    """The sampling distribution."""

    temperature: NotNegative = 1.0
    """Softmax temperature; 0 decodes greedily. The trainer's log-probs use the same temperature."""
    top_k: TopK = -1
    """Keep the k most likely tokens; -1 keeps all."""
    top_p: PositiveFraction = 1.0
    """Keep the most likely tokens that together reach this probability."""
    min_p: Fraction = 0.0
    """Keep tokens with at least this probability relative to the most likely one."""


class ValKwargs(DistributionConfig):
    """Sampling during validation."""

    temperature: NotNegative = 0.0
    """Softmax temperature; 0 decodes greedily."""
    n: Count = 1
    """Responses per prompt."""
    do_sample: bool | None = None
    """False decodes greedily; null and true sample if the temperature is above 0."""

    @property
    def uses_sampling(self) -> bool:
        """Whether tokens are sampled instead of decoded greedily."""
        return self.do_sample is not False and self.temperature > 0


class MultiTurnConfig(SchemaBlock):
    """Limits and formats of multi-turn loops."""

    enable: bool = False
    """Use the tool loop for rows without `agent_name` if tools or interactions are configured."""
    max_assistant_turns: Count | None = None
    """Model turns per trajectory; null is no limit."""
    tool_config_path: str | None = None
    """YAML file that lists the tools."""
    function_tool_path: str | None = None
    """Python file whose decorated functions are tools."""
    max_user_turns: Count | None = None
    """Environment turns per trajectory; null is no limit."""
    max_parallel_calls: Count = 1
    """Maximum concurrent tool calls per turn; further calls are refused with a message."""
    max_tool_calls: CountOrZero | None = None
    """Tool calls per trajectory; further calls are refused with a message. null is no limit."""
    tool_timeout_s: Positive = 60.0
    """Timeout in seconds of a call of a tool or interaction, and of its start; after a tool call times out,
    the model reads an error message."""
    trajectory_timeout_s: Positive | None = None
    """Seconds after which a trajectory ends with its current turn; null is no limit."""
    max_tool_response_length: CountOrZero = 256
    """Maximum tool answer in characters, as in verl; longer answers are truncated."""
    tool_response_truncate_side: Literal["left", "right", "middle"] = "middle"
    """The part that truncation drops, as in verl 0.9; middle keeps both ends."""
    max_observation_tokens: CountOrZero | None = None
    """Maximum tool answer in tokens; null applies only the character limit."""
    interaction_config_path: str | None = None
    """YAML file that lists the interactions (simulated users)."""
    format: str = "hermes"
    """Format of tool calls: hermes, llama3_json, pythonic, qwen3_coder, deepseek, mistral,
    gpt-oss, glm, kimi, plain, react, or `pkg.mod:Class` for a custom one."""


class AgentConfig(SchemaBlock):
    """Agent loops."""

    default_agent_loop: str = SINGLE_TURN_LOOP
    """Agent loop of rows without `agent_name`; `pkg.mod:Class` for a custom one."""
    agent_loop_config_path: str | None = None
    """YAML file that lists more loops (name, _target_, arguments)."""


class SearchServiceConfig(SchemaBlock):
    """Requests to a retrieval service."""

    topk: Count = 3
    """Passages per query."""
    timeout_s: Positive = 30.0
    """Timeout of a request in seconds."""
    retries: CountOrZero = 3
    """Retries with exponential backoff; if all fail, the search returns nothing and counts as failed."""


class RetrieverConfig(SearchServiceConfig):
    """The retrieval service of the search loop; `hone serve-retriever` starts one."""

    url: str = "http://127.0.0.1:8000/retrieve"
    """URL of the retrieval service."""


class CheckpointEngineConfig(SchemaBlock):
    """Weight transfer to a rollout engine with separate weights."""

    backend: str = "naive"
    """Transfer to a separate rollout pool: memory_file, cuda_ipc (one node), gloo, nccl; naive chooses."""
    update_weights_bucket_megabytes: Count = 2048
    """Megabytes per transfer."""
    probe_every: CountOrZero | None = None
    """Check after the first and every k-th publish that rollout and trainer agree on a fixed row; 0 never.
    null is 4 if the rollout decodes with the parameters of an actor on one device, else 10."""

    @property
    def bucket_bytes(self) -> int:
        return self.update_weights_bucket_megabytes * 2**20


class ServerConfig(SchemaBlock):
    """HTTP inference servers, with rollout.name=sglang or vllm."""

    urls: tuple[str, ...] = ()
    """Servers that already run, as http://host:port; empty starts one per rollout worker."""
    api_key_env: str | None = None
    """Environment variable with the servers' API key."""
    weights: Literal["disk", "tensor", "distributed"] = "disk"
    """How new weights are sent: disk (files in `weights_folder`), tensor (in the request, by CUDA IPC on a
    GPU), or distributed (broadcast in a process group, SGLang only)."""
    weights_folder: str | None = None
    """Folder that trainer and servers share; null is a folder in the machine's shared memory."""
    keep_weights: bool = True
    """Keep a copy of the last weights for a server that restarts; if false, a restart ends the run."""
    timeout: Positive = 60.0
    """Seconds that a server may take to answer a call, or to send the next token of a response."""
    max_attempts: Count = 3
    """Consecutive attempts at a request that may end without a new token before the request fails."""
    max_start_wait_time: Positive = 300.0
    """Seconds that a server may take to become healthy, at the start or after a loss. A request may wait as
    long for its first token, including its time in the server's queue."""


class SGLangConfig(SchemaBlock):
    """The SGLang server that a rollout worker starts."""

    python: str | None = None
    """Python interpreter that has SGLang; null is the interpreter of the run."""


class VLLMConfig(SchemaBlock):
    """The processes of rollout.name=vllm."""

    python: str | None = None
    """Python interpreter that has vLLM, such as .venv-vllm/bin/python of `make setup-vllm`; null is the
    interpreter of the run."""
    start_timeout_s: Positive = 600.0
    """Seconds that vLLM may take to start."""
    stall_timeout_s: Positive = 600.0
    """Seconds that a decode step or a weight update may take before vLLM is restarted."""
    weights: Literal["auto", "distributed"] = "auto"
    """How new weights reach vLLM's workers: auto shares memory (CUDA IPC on a GPU) if all workers are on this
    machine; distributed shares memory with the first worker, which broadcasts the weights (gloo, NCCL)."""


class EngineKwargs(SchemaBlock):
    """Arguments that are passed to other engines unchanged."""

    sglang: Settings = block(dict)
    """Server arguments of SGLang: mem_fraction_static=0.8 becomes --mem-fraction-static 0.8."""
    vllm: Settings = block(dict)
    """Arguments of vllm.LLM, such as max_num_batched_tokens or quantization."""


class SamplingConfig(DistributionConfig):
    """Sampling of a response."""

    do_sample: bool = True
    """Sample; false decodes greedily."""
    stop: str | tuple[str, ...] = ()
    """Strings that end a turn and stay in the response."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a turn, in addition to the model's end tokens."""
    ignore_eos: bool = False
    """Continue after the end token, up to the length limit."""
    max_tokens_per_turn: Count | None = None
    """Maximum turn length in tokens; null is the remainder of `response_length`."""
    seed: int | None = follows("trainer.seed")
    """Seed of sampling; default: the run seed."""


class RolloutEngineConfig(SamplingConfig):
    """The rollout engine and its sampling."""

    name: str = "native"
    """Engine: native decodes with the actor's parameters; vllm and sglang run in separate processes
    (docs/engines.md); hf is slow; pkg.mod:Class is a custom one."""
    prompt_length: Count = 1536
    """Maximum prompt length in tokens."""
    response_length: Count = 512
    """Maximum response length in tokens, over all turns."""
    exact: bool = False
    """Make rollout and trainer log-probs bitwise equal (slower), for Llama and Qwen2 models on one rank."""
    gpu_memory_utilization: PositiveFraction = 0.5
    """Share of GPU memory for the KV cache; no effect on CPU."""
    enforce_eager: bool = False
    """Disable CUDA graphs, for debugging."""
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """Batch sizes to capture as CUDA graphs; null chooses them automatically."""
    max_num_batched_tokens: Count = 8192
    """Maximum tokens of a prefill batch."""
    max_model_len: Count | None = None
    """Maximum prompt plus response in tokens; a response ends there. null is the sum of both limits."""
    max_num_seqs: Count = 256
    """Maximum concurrent sequences."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of shared prefixes."""
    calculate_log_probs: bool = True
    """Return the log-probs of sampled tokens, for rollout correction and `rollout_corr/*` metrics."""
    tensor_model_parallel_size: Count = 1
    """Devices over which each layer is split: ranks with native (docs/engines.md), else server devices."""
    pipeline_model_parallel_size: Count = 1
    """Devices over which the layers are distributed, with vllm and sglang."""
    data_parallel_size: Count = 1
    """Replicas of each rollout worker, with vllm and sglang."""
    vllm: VLLMConfig = block(VLLMConfig)
    server: ServerConfig = block(ServerConfig)
    sglang: SGLangConfig = block(SGLangConfig)
    engine_kwargs: EngineKwargs = block(EngineKwargs)

    @property
    def max_total_tokens(self) -> int:
        """Maximum prompt plus response in tokens."""
        return self.max_model_len or self.prompt_length + self.response_length

    def response_limit(self, prompt_tokens: int) -> int:
        """Returns the maximum response in tokens, over all turns, to a prompt of this length."""
        return min(self.response_length, self.max_total_tokens - prompt_tokens)


class RolloutConfig(LogProbConfig, RolloutEngineConfig):
    """The rollout: engine, sampling, agent loops."""

    n: Count = 1
    """Responses per prompt (group size)."""
    enable_rollout_routing_replay: bool = False
    """Record the experts of every token, for `actor.router_replay.mode=R3`."""
    free_cache_engine: bool = True
    """Free the KV cache after generation."""
    keep_stale_kv: bool = False
    """Keep the KV cache of running requests over a weight update, which is faster but computes their next
    tokens from keys of old weights. Only native and vllm (in processes of the run) can keep it."""
    merge_lora: bool = False
    """Send merged weights even to an engine that accepts LoRA adapters."""
    val_kwargs: ValKwargs = block(ValKwargs)
    multi_turn: MultiTurnConfig = block(MultiTurnConfig)
    agent: AgentConfig = block(AgentConfig)
    checkpoint_engine: CheckpointEngineConfig = block(CheckpointEngineConfig)
    nnodes: CountOrZero = 0
    """Nodes of a separate rollout pool; 0 uses the trainer's nodes."""
    n_gpus_per_node: CountOrZero = follows("trainer.n_gpus_per_node")
    """Devices per node of the rollout pool."""
    profiler: ProfilerConfig = block_following_actor(
        ProfilerConfig, "profiler", "enable", "all_ranks", "ranks"
    )

    @property
    def default_loop(self) -> str:
        """The agent loop of rows without `agent_name`: the tool loop replaces the single-turn loop if
        `multi_turn.enable` is set and tools or interactions are configured."""
        loop_name, multi_turn = self.agent.default_agent_loop, self.multi_turn
        has_tools = multi_turn.tool_config_path or multi_turn.function_tool_path
        has_several_turns = multi_turn.enable and (has_tools or multi_turn.interaction_config_path)
        return TOOL_LOOP if has_several_turns and loop_name == SINGLE_TURN_LOOP else loop_name
