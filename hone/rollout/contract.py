"""The rollout contract: the interface of every engine and its data types.

Engines take and return token ids. A sampled token depends on (seed, absolute position) and the preceding
tokens, never on the batch. tests/rollout/engine_contract.py is the executable version of this contract.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from hone.errors import UserError
from hone.ops.counter_rng import fold_seed
from hone.types import Fields, JsonObject, Settings

if TYPE_CHECKING:
    from hone.config.generation import GenerationRolloutConfig
    from hone.config.rollout import RolloutConfig
    from hone.models.policy import PolicyModel
    from hone.rollout.native.peers import Peers
    from hone.tokenizer import Tokenizer

Weights = Iterable[tuple[str, Tensor]]
"""Tensors with their Hugging Face names."""
_MIN_TEMPERATURE = 1e-5
"""The lowest positive temperature; with a lower one, logits / temperature may overflow."""


_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "n": (1,),
    "best_of": (1,),
}
"""Sampling parameters of other engines, with the values that ask for nothing."""


class StopReason(str, Enum):
    STOP = "stop"
    """An end-of-text token, a stop token or a stop string."""
    LENGTH = "length"
    ABORT = "abort"


def trajectory_seed(run_seed: int, uid: str, sample_index: int) -> int:
    """Returns the sampling seed of a trajectory; it does not depend on engine or batch."""
    return fold_seed(run_seed, uid, sample_index)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a request. `temperature=0` is greedy; `top_k=-1` disables top-k."""

    max_tokens: int
    temperature: float
    seed: int
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        integers = {"max_tokens": self.max_tokens, "seed": self.seed, "top_k": self.top_k}
        integers |= {f"stop_token_ids[{i}]": token for i, token in enumerate(self.stop_token_ids)}
        for name, value in integers.items():
            if not isinstance(value, Integral) or not -(2**63) <= value < 2**63:
                raise ValueError(f"sampling: {name}={value!r} must be a 64-bit integer")
        is_valid_temperature = (
            self.temperature == 0 or _MIN_TEMPERATURE <= self.temperature < math.inf
        )
        for name, rule, is_valid in (
            ("max_tokens", "at least 1", self.max_tokens >= 1),
            ("temperature", f"0 (greedy) or at least {_MIN_TEMPERATURE}", is_valid_temperature),
            ("top_k", "-1 (all) or positive", self.top_k == -1 or self.top_k > 0),
            ("top_p", "in (0, 1]", 0 < self.top_p <= 1),
            ("min_p", "in [0, 1]", 0 <= self.min_p <= 1),
            ("stop", "strings with at least one character", all(self.stop)),
        ):
            if not is_valid:
                raise ValueError(f"sampling: {name}={getattr(self, name)} must be {rule}")
        # The values are sent to other processes as JSON, which cannot encode numpy numbers.
        for name in ("max_tokens", "seed", "top_k"):
            object.__setattr__(self, name, int(getattr(self, name)))
        for name in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "stop_token_ids", tuple(map(int, self.stop_token_ids)))

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p excludes tokens; greedy requests ignore these parameters."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @staticmethod
    def from_mapping(params: Settings, *, max_tokens: int, seed: int) -> Sampling:
        """Converts an agent loop's `sampling_params`, which may lower `max_tokens` and replace `seed`.

        `logprobs` and values that ask for nothing (`_NEUTRAL_VALUES`, None) have no effect. Any other unknown
        name raises.
        """
        field_names = Sampling.__dataclass_fields__
        values: Fields = {"max_tokens": max_tokens, "seed": seed, "temperature": 1.0}
        for name, value in params.items():
            if name == "max_new_tokens":
                name = "max_tokens"
            if name == "logprobs" or value is None or value in _NEUTRAL_VALUES.get(name, ()):
                continue
            if name not in field_names:
                raise ValueError(
                    f"sampling_params has no {name!r}; it may have {', '.join(sorted(field_names))}"
                )
            values[name] = value
        if values.get("top_k") == 0:
            values["top_k"] = -1
        values["max_tokens"] = min(values["max_tokens"], max_tokens)
        return Sampling(**values)


def ids_of(value: Any) -> Any:
    """Returns the list of a tensor, an array or a BatchEncoding; returns other values unchanged.

    In transformers 5, `tokenizer.apply_chat_template` returns a BatchEncoding, in 4 it returned a list.
    """
    value = getattr(value, "input_ids", value)
    return value.tolist() if hasattr(value, "tolist") else value


@dataclass(frozen=True)
class TokenOutput:
    """The output of one request."""

    token_ids: list[int]
    log_probs: list[float] = field(default_factory=list)
    """The log-prob of each token under softmax(logits / temperature), before top-k, top-p and min-p; greedy
    requests use temperature 1. The trainer computes log-probs in the same way."""
    versions: list[int] = field(default_factory=list)
    """The weight version that sampled each token."""
    stop_reason: StopReason = StopReason.STOP
    num_preempted: int | None = None
    """Number of preemptions of the request; None if the engine does not report them."""
    cached_tokens: int | None = None
    """Number of prompt tokens that hit the prefix cache; None if the engine does not report the number."""
    routed_experts: Tensor | None = None
    """The experts [tokens, layers, k] that computed the prompt and all response tokens but the last; None
    without `rollout.enable_rollout_routing_replay`."""
    extra_fields: JsonObject = field(default_factory=dict)
    """More values of an engine of your own, as in verl; hone does not read them."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)


@dataclass(frozen=True)
class TokenDelta:
    """The tokens that were sampled since the last delta of the same request."""

    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]


OnTokens = Callable[[TokenDelta], None]
"""Called with each delta, in the event loop of `generate`'s caller; all deltas together are the output."""


@dataclass(frozen=True)
class Traits:
    """The capabilities of an engine; tests/rollout/engine_contract.py skips tests that need a missing one."""

    uses_policy_module: bool
    """The engine decodes with the module that `RolloutSpec.load_policy` returns: often the training module.
    Other engines keep a copy of the weights and receive new weights through `load`."""
    honors_seeds: bool = True
    """The same request with the same seed gets the same tokens."""
    samples_by_position: bool = True
    """The random number of a token depends only on (seed, absolute position). So a request that is issued
    again, with its tokens as part of the prompt, continues as if it had not been interrupted."""
    batch_invariant: bool = True
    """A request gets the same tokens alone and in any batch."""
    untruncated_log_probs: bool = True
    """Log-probs are computed before top-k, top-p and min-p, even if a request sets them."""
    log_probs_of_weights: bool = True
    """Log-probs are computed from the loaded weights; the publish probe skips engines that invent them."""
    pause_keeps_requests: bool = True
    """`pause(keep=True)` keeps running requests."""
    orders_by_priority: bool = True
    """Waiting requests start by priority; in other engines, in order of arrival."""
    multi_modal: bool = False
    loads_adapters: bool = False
    """`load` accepts LoRA tensors without the base weights; other engines need merged weights."""


class RolloutError(UserError, RuntimeError):
    """The engine could not complete a call or a request."""


@dataclass(frozen=True)
class RolloutSpec:
    """The argument of the engine factory that `rollout.name` selects."""

    config: RolloutConfig | GenerationRolloutConfig
    """The `rollout` block; both types have the fields that an engine reads."""
    model_path: str
    load_policy: Callable[[], PolicyModel]
    """Returns the module to decode with: the training module if this process has one, else a copy.
    Engines that keep a copy of the weights load `model_path` instead."""
    dtype: torch.dtype
    device: torch.device
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    """Token ids that end a response."""
    rank: int = 0
    world_size: int = 1
    """Number of rollout workers in the run; each has an engine."""
    current_weights: Callable[[], Weights] | None = None
    """Returns the published weights; None if they are not in this process. An engine that keeps a copy calls
    this to load them after its start or after `sleep`."""
    peers: Peers | None = None
    """The tensor-parallel group of the native engine, if there is one. In a group, `load_policy` returns a
    module without weights, and all ranks call `current_weights` together."""
    has_adapters: bool = False
    """Whether the policy has LoRA adapters and the engine may load them without the base weights."""

    @property
    def keeps_stale_kv(self) -> bool:
        """The value of `rollout.keep_stale_kv`, which `hone generate` does not have."""
        return getattr(self.config, "keep_stale_kv", False)


@runtime_checkable
class RolloutEngine(Protocol):
    """The engine interface that agent loops, workers and `weights/` use.

    Methods may be awaited from any event loop and thread; methods that change the engine wait until the
    current decode step has ended.
    """

    @property
    def traits(self) -> Traits: ...

    @property
    def version(self) -> int:
        """The number of the current weights, which the last `commit` has set."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        *,
        priority: int = 0,
        on_tokens: OnTokens | None = None,
        multi_modal_data: Settings | None = None,
    ) -> TokenOutput:
        """Generates one response; waits while the engine is paused.

        If an engine cannot run all requests at once, the lowest `priority` starts first, ties in order of
        arrival.
        """

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """Ends these requests, or all if None; they return their tokens so far. The engine keeps running."""

    async def pause(self, keep: bool = False) -> None:
        """Stops decoding; running requests are aborted or, with `keep`, continue after `resume`."""

    async def resume(self) -> None: ...

    async def begin_update(self) -> None:
        """Prepares to load new weights; raises if requests run.

        Until `commit`, a new request waits if the engine is paused, and raises otherwise.
        """

    async def load(self, weights: Weights) -> None:
        """Loads some of the new weights by Hugging Face name; may be called repeatedly."""

    async def commit(self, version: int) -> None:
        """Ends the weight update and sets the version; without a `load`, only the version changes.

        The next token of a kept request attends only to keys of the new weights.
        """

    async def sleep(self) -> None:
        """Frees the memory that only generation needs; raises if requests run.

        Requests that `pause` has kept stay, and go on after `wake_up` and `resume`.
        """

    async def wake_up(self) -> None:
        """Prepares to decode after `sleep`, or after the parameters of the training module have moved."""

    async def close(self) -> None:
        """Ends every request; later requests raise."""


class DrivenEngine(Protocol):
    """An engine that computes in this process, in the thread that calls `drive`."""

    def drive(self, until: Callable[[], bool]) -> None:
        """Decodes in this thread until `until()` is true or the engine fails or is closed.

        The engine calls `until` at the start, after requests finish, and after `notify`. During this call it
        holds no lock, so `until` may wait for event loops that submit requests.
        """

    def notify(self) -> None:
        """Makes the driving thread call `until` again; may be called from any thread."""


def is_driven(engine: object) -> TypeGuard[DrivenEngine]:
    """Whether an engine has the methods of `DrivenEngine`, itself or as a proxy of an engine.

    From Python 3.12 on, `isinstance` with a protocol does not see methods that `__getattr__` returns.
    """
    return all(callable(getattr(engine, name, None)) for name in ("drive", "notify"))
