"""Rollout: which engine decodes, how it samples, turns and tools, validation sampling.

`native` is ours and decodes with the actor's own parameters; server settings of other engines are neutral.
"""

from __future__ import annotations

from typing import Literal

from hone.config.block import (
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    PositiveShare,
    SchemaBlock,
    Share,
    TopK,
    block,
    follows,
)
from hone.config.engine import LogProbConfig

SINGLE_TURN_LOOP, TOOL_LOOP, SEARCH_LOOP = "single_turn_agent", "tool_agent", "search_agent"
BUILT_IN_LOOPS = (SINGLE_TURN_LOOP, TOOL_LOOP, "react_agent", SEARCH_LOOP)


class DistributionConfig(SchemaBlock):
    """Which distribution tokens are drawn from."""

    temperature: NotNegative = 1.0
    """Softmax temperature; 0 decodes greedily. The trainer's log-probs use it too."""
    top_k: TopK = -1
    """Keep the k likeliest tokens; -1 keeps all."""
    top_p: PositiveShare = 1.0
    """Keep the likeliest tokens that together reach this probability."""
    min_p: Share = 0.0
    """Keep tokens at least this likely relative to the likeliest."""


class ValKwargs(DistributionConfig):
    """Sampling during validation."""

    temperature: NotNegative = 0.0
    """Softmax temperature; 0 decodes greedily."""
    n: Count = 1
    """Responses per prompt."""
    do_sample: bool | None = None
    """False decodes greedily; null and true sample where the temperature is above 0."""

    @property
    def samples(self) -> bool:
        """True where two responses to one prompt may differ."""
        return self.do_sample is not False and self.temperature > 0


class MultiTurnConfig(SchemaBlock):
    """Limits and formats of loops with more than one turn."""

    enable: bool = False
    """Use the tool loop where a row names no loop of its own and tools or interactions are given."""
    max_assistant_turns: Count | None = None
    """Model turns per trajectory; null is no limit."""
    tool_config_path: str | None = None
    """YAML file that lists the tools."""
    function_tool_path: str | None = None
    """Python file whose decorated functions are tools."""
    max_user_turns: Count | None = None
    """Environment turns per trajectory; null is no limit."""
    max_parallel_calls: Count = 1
    """Tool calls of one turn that are made, at the same time; further ones get a sentence."""
    max_tool_calls: CountOrZero | None = None
    """Tool calls per trajectory; null is no limit. Beyond it the model is told to answer."""
    tool_timeout_s: Positive = 60.0
    """Seconds per tool call (then the model sees a time-out message), tool start and interaction."""
    trajectory_timeout_s: Positive | None = None
    """Seconds after which a trajectory ends with its current turn; null is no limit."""
    max_tool_response_length: int = 256
    """Longest tool answer, in characters as verl counts; longer ones are cut."""
    tool_response_truncate_side: Literal["left", "right", "middle"] = "middle"
    """The side that a cut drops, as in verl 0.9; middle keeps both ends."""
    max_observation_tokens: int | None = None
    """Longest tool answer in tokens; null leaves only the character limit."""
    interaction_config_path: str | None = None
    """YAML file that lists the interactions (simulated users)."""
    format: str = "hermes"
    """How the model writes tool calls: hermes, llama3_json, pythonic, qwen3_coder, deepseek, mistral,
    gpt-oss, glm, kimi, plain, react, or `pkg.mod:Class` for your own."""


class AgentConfig(SchemaBlock):
    """Agent loops."""

    default_agent_loop: str = SINGLE_TURN_LOOP
    """Loop of rows that name none in `agent_name`; `pkg.mod:Class` is your own."""
    agent_loop_config_path: str | None = None
    """YAML file that lists more loops (name, _target_, arguments)."""


class SearchServiceConfig(SchemaBlock):
    """How a retrieval service is asked."""

    topk: Count = 3
    """Passages per query."""
    timeout_s: Positive = 30.0
    """Seconds one request may take."""
    retries: CountOrZero = 3
    """Further attempts, with growing pauses; then the search finds nothing and is counted as failed."""


class RetrieverConfig(SearchServiceConfig):
    """The retrieval service of the search loop; `hone serve-retriever` is one."""

    url: str = "http://127.0.0.1:8000/retrieve"
    """Where queries are posted."""


class CheckpointEngineConfig(SchemaBlock):
    """How weights reach a rollout engine that holds its own copy."""

    backend: str = "naive"
    """Way to a rollout pool of its own: memory_file, cuda_ipc (one machine), gloo, nccl; naive chooses."""
    update_weights_bucket_megabytes: int = 2048
    """Megabytes in one transfer."""

    @property
    def bucket_bytes(self) -> int:
        return self.update_weights_bucket_megabytes * 2**20


class SamplingConfig(DistributionConfig):
    """How one response is drawn."""

    do_sample: bool = True
    """Sample; false decodes greedily."""
    stop: str | tuple[str, ...] = ()
    """Strings that end a turn; they stay in the response."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a turn, beside the model's own end tokens."""
    ignore_eos: bool = False
    """Go on after the end token, up to the length limit."""
    max_tokens_per_turn: Count | None = None
    """Longest turn in tokens; null is what is left of `response_length`."""
    seed: int | None = follows("trainer.seed")
    """Seed of sampling; follows the run seed."""


class RolloutEngineConfig(SamplingConfig):
    """An engine that decodes, and how."""

    name: str = "native"
    """Engine: native decodes with the actor's parameters, hf is slow; your own is pkg.mod:Class."""
    prompt_length: Count = 1536
    """Longest prompt in tokens."""
    response_length: Count = 512
    """Longest response in tokens, all turns together."""
    exact: bool = False
    """Rollout and trainer log-probs agree bit for bit, at a cost: Llama and Qwen2 families, one rank."""
    gpu_memory_utilization: PositiveShare = 0.5
    """Share of GPU memory for the KV cache; nothing to share out on CPU."""
    enforce_eager: bool = False
    """No CUDA graphs, for debugging."""
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """Batch sizes to capture as CUDA graphs; null chooses."""
    max_num_batched_tokens: int = 8192
    """Tokens of one prefill batch."""
    max_model_len: Count | None = None
    """Longest prompt plus response; null is prompt_length + response_length."""
    max_num_seqs: Count = 256
    """Sequences decoded at the same time."""
    enable_prefix_caching: bool = True
    """Keep the keys and values of shared prefixes."""
    calculate_log_probs: bool = True
    """Keep the log-probs of sampled tokens: correction and `rollout_corr/*` read them."""

    @property
    def max_total_tokens(self) -> int:
        """Longest prompt plus response in tokens."""
        return self.max_model_len or self.prompt_length + self.response_length


class RolloutConfig(LogProbConfig, RolloutEngineConfig):
    """Producing trajectories."""

    n: Count = 1
    """Responses per prompt (group size)."""
    free_cache_engine: bool = True
    """Free the KV cache after generation."""
    val_kwargs: ValKwargs = block(ValKwargs)
    multi_turn: MultiTurnConfig = block(MultiTurnConfig)
    agent: AgentConfig = block(AgentConfig)
    checkpoint_engine: CheckpointEngineConfig = block(CheckpointEngineConfig)
    nnodes: int = 0
    """Nodes of a rollout pool of its own; 0 shares the trainer's."""
    n_gpus_per_node: int = follows("trainer.n_gpus_per_node")
    """Devices per node of that pool."""

    @property
    def default_loop(self) -> str:
        """The agent loop of rows that name none: with `multi_turn.enable` and something to talk to, the
        tool loop stands for the single-turn one."""
        named, turns = self.agent.default_agent_loop, self.multi_turn
        talks = turns.tool_config_path or turns.function_tool_path or turns.interaction_config_path
        return TOOL_LOOP if turns.enable and talks and named == SINGLE_TURN_LOOP else named
