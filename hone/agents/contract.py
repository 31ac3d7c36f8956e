"""The agent-loop contract, `async run(sampling_params, **row)`, and the default loop.

A loop gets token ids and a client of the rollout engine; generated text is never tokenised again.
verl's `ct_` methods ("continuous token") extend token ids. Images, video and audio are not supported.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar
from uuid import uuid4

import torch

from hone.agents.loop_context import LoopContext
from hone.agents.observations import observation_ids
from hone.agents.tools.loading import Tool
from hone.config import PPOTrainerConfig
from hone.config.data import DataConfig
from hone.config.rollout import RolloutConfig, SamplingConfig
from hone.data.messages import Message, PromptError
from hone.data.prompt_ids import initialize_system_prompt
from hone.plugins import Table
from hone.rollout.contract import OnTokens, RolloutEngine, Sampling, StopReason, TokenOutput, ids_of
from hone.tokenizer import Tokenizer
from hone.types import Fields, JsonValue, Row, Settings

C = TypeVar("C")
L = TypeVar("L", bound="type[AgentLoopBase]")

LOOPS: Table[Callable[..., AgentLoopBase]] = Table(
    "agent loop",
    {
        "single_turn_agent": "hone.agents.contract:SingleTurnAgentLoop",
        "tool_agent": "hone.agents.loops.tool:ToolAgentLoop",
        "search_agent": "hone.agents.loops.search:SearchAgentLoop",
        "react_agent": "hone.agents.loops.tool:ReactAgentLoop",
    },
)

_TOKEN_FIELDS = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "versions")
_TEACHER_COLUMNS = ("teacher_ids", "teacher_logprobs")


@dataclass
class AgentLoopMetrics:
    """Seconds and counts of one trajectory."""

    generate_sequences: float = 0.0  # seconds
    tool_calls: float = 0.0  # seconds
    compute_score: float = 0.0  # seconds
    num_preempted: int = 0
    later_prompt_tokens: int = 0
    """Prompt tokens of the turns after the first, if the engine counts prefix-cache hits."""
    later_cached_tokens: int = 0
    """How many of `later_prompt_tokens` were prefix-cache hits."""


@dataclass
class AgentLoopOutput:
    """One row of a trajectory: `response_mask` is 1 for sampled tokens and 0 for observations."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    response_mask: Sequence[int]
    response_logprobs: Sequence[float] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics | Settings = field(default_factory=AgentLoopMetrics)
    multi_modal_data: Settings | None = None
    extra_fields: Fields = field(default_factory=dict)
    versions: Sequence[int] | None = None
    stop_reason: str | None = None
    routed_experts: torch.Tensor | None = None
    mm_processor_kwargs: Settings | None = None
    mm_processor_output: Sequence[Fields] | None = None

    def __post_init__(self) -> None:
        for name in _TOKEN_FIELDS:
            setattr(self, name, ids_of(getattr(self, name)))

    def truncate(self, max_tokens: int) -> None:
        """Truncates the response to `max_tokens`."""
        for name in _TOKEN_FIELDS[1:]:  # all fields but `prompt_ids`
            values = getattr(self, name)
            if values is not None:
                setattr(self, name, values[:max_tokens])

    def as_dict(self) -> Row:
        """Returns the trajectory as verl's batch columns, without fields that are None."""
        fields = {name: value for name, value in vars(self).items() if value is not None}
        columns: Row = {
            "prompts": torch.tensor(fields.pop("prompt_ids"), dtype=torch.int64),
            "responses": torch.tensor(fields.pop("response_ids"), dtype=torch.int64),
            "response_mask": torch.tensor(fields.pop("response_mask"), dtype=torch.int64),
        }
        if "response_logprobs" in fields:
            columns["rollout_log_probs"] = torch.tensor(fields.pop("response_logprobs"))
        if "reward_score" in fields:
            scores = torch.zeros(len(columns["responses"]))
            scores[-1:] = fields.pop("reward_score")  # an empty response has no last token
            columns["rm_scores"] = scores
        extra_fields = dict(fields.pop("extra_fields"))
        for name in _TEACHER_COLUMNS:
            if name in extra_fields:
                columns[name] = extra_fields.pop(name)
        return {**columns, **fields, "extra_fields": extra_fields}


@dataclass(frozen=True)
class MergeResult:
    """The token ids of a trajectory after a turn was appended."""

    token_ids: list[int]
    appended_token_count: int


class DictConfigWrap(Generic[C]):
    """Wraps a config, which `hydra.utils.instantiate` then passes unchanged."""

    def __init__(self, config: C) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "config":
            raise AttributeError(name)
        return getattr(self.config, name)


class ToolListWrap:
    """Wraps a list of tools, which `hydra.utils.instantiate` then passes unchanged."""

    def __init__(self, tools: list[Tool]) -> None:
        self.tools = tools


@dataclass(eq=False)
class ServerManager:
    """The engine's client for one trajectory; each request has the trajectory's seed."""

    engine: RolloutEngine
    _: KW_ONLY
    seed: int
    max_tokens: int
    max_model_len: int | None = None
    """The limit of the tokens of prompt plus response of each request."""
    priority: int = 0
    """The priority of requests without their own; the oldest group has the lowest number."""

    async def generate(
        self,
        request_id: str | None = None,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Settings,
        image_data: Sequence[Fields] | None = None,
        video_data: Sequence[Fields] | None = None,
        audio_data: Sequence[Fields] | None = None,
        mm_processor_kwargs: Settings | None = None,
        mm_processor_output: Sequence[Fields] | None = None,
        priority: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> TokenOutput:
        """Returns one completion; `on_tokens` is called with each sampled chunk of tokens."""
        prompt_ids, max_tokens = ids_of(prompt_ids), self.max_tokens
        if self.max_model_len is not None:
            max_tokens = min(max_tokens, self.max_model_len - len(prompt_ids))
            if max_tokens < 1:  # the prompt fills the context
                return TokenOutput([], stop_reason=StopReason.LENGTH)
        sampling = Sampling.from_mapping(sampling_params, max_tokens=max_tokens, seed=self.seed)
        media = {"image": image_data, "video": video_data, "audio": audio_data}
        return await self.engine.generate(
            prompt_ids,
            sampling,
            request_id or uuid4().hex,
            priority=self.priority if priority is None else priority,
            on_tokens=on_tokens,
            multi_modal_data={kind: data for kind, data in media.items() if data} or None,
        )


def default_sampling(rollout: SamplingConfig) -> Fields:
    """Returns the `sampling_params` of training and of `hone generate`."""
    return {
        **{name: getattr(rollout, name) for name in ("top_k", "top_p", "min_p", "ignore_eos")},
        "temperature": rollout.temperature if rollout.do_sample else 0.0,
        "stop": (rollout.stop,) if isinstance(rollout.stop, str) else tuple(rollout.stop or ()),
        "stop_token_ids": tuple(rollout.stop_token_ids or ()),
        "max_tokens": rollout.max_tokens_per_turn,
    }


def validation_sampling(rollout: RolloutConfig) -> Fields:
    """Returns the `sampling_params` of validation: greedy unless `val_kwargs.do_sample`."""
    val_kwargs = rollout.val_kwargs
    temperature = val_kwargs.temperature if val_kwargs.uses_sampling else 0.0
    filters = {name: getattr(val_kwargs, name) for name in ("top_k", "top_p", "min_p")}
    return {**default_sampling(rollout), **filters, "temperature": temperature}


_CONTEXT_NAMES = (
    *("prompt_ids", "response_limit", "request_id"),
    *("prompt_length", "response_length", "dataset_config"),
)
"""The attributes of a loop that its context has; a subclass may use these names for anything."""


class AgentLoopBase(ABC):
    """Base class of agent loops; each trajectory gets a new instance. Its names are those of verl."""

    _class_initialized = False
    _hone: LoopContext

    def __init__(
        self,
        trainer_config: PPOTrainerConfig | DictConfigWrap[PPOTrainerConfig],
        server_manager: ServerManager,
        tokenizer: Tokenizer,
        processor: Callable[..., Fields] | None = None,
        dataset_cls: type | None = None,
        data_config: DataConfig | DictConfigWrap[DataConfig] | None = None,
        dataset_config: DataConfig | None = None,
        **kwargs: JsonValue,
    ) -> None:
        config = _unwrap(trainer_config)
        self._hone = LoopContext(self)
        self.config = config
        self.rollout_config = config.actor_rollout_ref.rollout
        self.data_config = _unwrap(data_config or dataset_config or config.data)
        self.dataset_cls = dataset_cls
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.loop = asyncio.get_event_loop()
        self.init_class(config=config, tokenizer=tokenizer, processor=processor, **kwargs)

    @classmethod
    def init_class(
        cls,
        config: PPOTrainerConfig,
        tokenizer: Tokenizer,
        processor: Callable[..., Fields] | None,
        **kwargs: JsonValue,
    ) -> None:
        """Called for every instance; verl's overrides test `_class_initialized` to run only once."""
        cls._class_initialized = True

    @cached_property
    def apply_chat_template_kwargs(self) -> Settings:
        """The options of the chat template, from `data.apply_chat_template_kwargs`."""
        return self.data_config.get("apply_chat_template_kwargs") or {}

    @cached_property
    def system_prompt(self) -> list[int]:
        """The token ids of the system prompt that the chat template adds by itself."""
        return initialize_system_prompt(self.tokenizer, **self.apply_chat_template_kwargs)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the loop's context; called only for names that the loop lacks."""
        if name in _CONTEXT_NAMES:
            return getattr(self._hone, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    async def process_vision_info(self, messages: list[Message]) -> Fields:
        """Returns no media, because rollout engines refuse images and videos."""
        return {}

    process_multi_modal_info = process_vision_info

    async def apply_chat_template(
        self,
        messages: list[Message],
        tools: Sequence[Settings] | None = None,
        images: Sequence[Fields] | None = None,
        videos: Sequence[Fields] | None = None,
        remove_system_prompt: bool = False,
        audios: Sequence[Fields] | None = None,
    ) -> list[int]:
        """Returns the token ids of the messages with the generation prompt.

        `remove_system_prompt` drops the system prompt that the template adds, for messages that are
        appended to a prompt.
        """
        if images or videos or audios:
            raise PromptError("images, videos and audio are not supported; give text only")
        ids = self._hone.render(messages, tools)
        return ids[len(self.system_prompt) :] if remove_system_prompt else ids

    async def ct_build_initial_tokens(
        self,
        messages: list[Message],
        tools: Sequence[Settings] | None = None,
        images: Sequence[Fields] | None = None,
        videos: Sequence[Fields] | None = None,
        audios: Sequence[Fields] | None = None,
        mm_inputs_out: Fields | None = None,
    ) -> list[int]:
        """Returns the ids of `apply_chat_template`, truncated left to `rollout.prompt_length`."""
        ids = await self.apply_chat_template(messages, tools, images, videos, audios=audios)
        return ids[max(len(ids) - self._hone.prompt_length, 0) :]

    async def ct_merge_context_msg(
        self,
        previous_messages: list[Message],
        updated_messages: list[Message],
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: Sequence[Settings] | None = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """Appends the messages after `previous_messages` to the token ids, with mask 0."""
        ids = observation_ids(
            updated_messages[len(previous_messages) :],
            self.tokenizer,
            last_token=runtime_token_ids[-1],
            template_kwargs=self.apply_chat_template_kwargs,
            chat=self.data_config.get("prompt_format", "chat") == "chat",
        )
        log_probs = None if response_logprobs is None else [*response_logprobs, *[0.0] * len(ids)]
        merged = MergeResult([*runtime_token_ids, *ids], len(ids))
        return merged, [*response_mask, *[0] * len(ids)], log_probs

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: list[float] | None = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """Appends the model's tokens to the token ids, with mask 1."""
        count = len(assistant_token_ids)
        log_probs = None
        if response_logprobs is not None:
            log_probs = [*response_logprobs, *(assistant_logprobs or [0.0] * count)]
        merged = MergeResult([*runtime_token_ids, *assistant_token_ids], count)
        return merged, [*response_mask, *[1] * count], log_probs

    @abstractmethod
    async def run(
        self, sampling_params: Fields, **kwargs: Any
    ) -> AgentLoopOutput | Sequence[AgentLoopOutput]:
        """Returns the trajectory of one data row; `kwargs` are the row's columns.

        A list is one trajectory that becomes several rows of the batch, in the order of the list.
        """


class SingleTurnAgentLoop(AgentLoopBase):
    """The loop `single_turn_agent`, the default: one prompt and one completion."""

    async def run(self, sampling_params: Fields, **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = self._hone.prompt_ids(kwargs)
        start_time = time.perf_counter()
        output = await self.server_manager.generate(
            kwargs["trajectory_id"], prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            num_turns=2,  # the prompt and the completion
            metrics=AgentLoopMetrics(
                time.perf_counter() - start_time, num_preempted=output.num_preempted or 0
            ),
            versions=output.versions,
            stop_reason=output.stop_reason.value,
            routed_experts=output.routed_experts,
        )


def _unwrap(config: C | DictConfigWrap[C]) -> C:
    return config.config if isinstance(config, DictConfigWrap) else config


def register(agent_name: str) -> Callable[[L], L]:
    """Returns a decorator that registers a loop as `agent_name`."""
    return LOOPS.register(agent_name)


register_agent_loop = LOOPS.add
