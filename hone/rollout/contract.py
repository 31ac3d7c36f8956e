"""The rollout contract: what every engine promises, and the words it is spoken in.

Token in, token out. A sampled token depends on (seed, absolute position) and the text before it, never on
the batch it was computed in. An executable version of this page is tests/rollout/engine_contract.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from hone.types import JsonObject, Row, Settings

if TYPE_CHECKING:
    from hone.config.generation import GenerationRolloutConfig
    from hone.config.rollout import RolloutConfig
    from hone.models.policy import PolicyModel
    from hone.tokenizer import Tokenizer

_COOLEST = 1e-5
"""Colder than this, logits divided by the temperature overflow."""


class StopReason(str, Enum):
    STOP = "stop"
    """An end-of-text token, a stop token or a stop string."""
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class Sampling:
    """How one request is drawn. `temperature=0` is greedy; `top_k=-1` keeps every token."""

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
        whole = {"max_tokens": self.max_tokens, "seed": self.seed, "top_k": self.top_k}
        whole |= {f"stop_token_ids[{i}]": token for i, token in enumerate(self.stop_token_ids)}
        for name, value in whole.items():
            if not isinstance(value, Integral) or not -(2**63) <= value < 2**63:
                raise ValueError(f"sampling: {name}={value!r} must be a whole number of 64 bits")
        cool = self.temperature == 0 or _COOLEST <= self.temperature < math.inf
        for name, must, holds in (
            ("max_tokens", "at least 1", self.max_tokens >= 1),
            ("temperature", f"0 (greedy) or at least {_COOLEST}", cool),
            ("top_k", "-1 (all) or positive", self.top_k == -1 or self.top_k > 0),
            ("top_p", "in (0, 1]", 0 < self.top_p <= 1),
            ("min_p", "in [0, 1]", 0 <= self.min_p <= 1),
        ):
            if not holds:
                raise ValueError(f"sampling: {name}={getattr(self, name)} must be {must}")

    @property
    def cuts(self) -> bool:
        """Whether some tokens may not be drawn. Greedy requests lose nothing by a cut."""
        truncates = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return truncates and self.temperature > 0

    @staticmethod
    def from_mapping(params: Settings, *, max_tokens: int, seed: int) -> Sampling:
        """From a loop's `sampling_params`; what it leaves out comes from the keywords.

        `logprobs` and `repetition_penalty=1` ask for nothing that differs here. Unknown names raise.
        """
        known = Sampling.__dataclass_fields__
        values: Row = {"max_tokens": max_tokens, "seed": seed, "temperature": 1.0}
        for name, value in params.items():
            if name == "max_new_tokens":
                name = "max_tokens"
            if name == "logprobs" or (name == "repetition_penalty" and value in (None, 1, 1.0)):
                continue
            if name not in known:
                raise ValueError(
                    f"sampling_params has no {name!r}; known: {', '.join(sorted(known))}"
                )
            if value is None:
                continue
            if name == "stop":
                value = (value,) if isinstance(value, str) else tuple(value)
            values[name] = tuple(value) if name == "stop_token_ids" else value
        if values.get("top_k") == 0:
            values["top_k"] = -1
        values["max_tokens"] = min(values["max_tokens"], max_tokens)
        return Sampling(**values)


@dataclass(frozen=True)
class TokenOutput:
    """What one request produced."""

    token_ids: list[int]
    log_probs: list[float] = field(default_factory=list)
    """log p of each token under softmax(logits / temperature), before any truncation of the tail:
    the number the trainer computes for the same token. Greedy requests report temperature 1."""
    versions: list[int] = field(default_factory=list)
    """How many updates the weights had seen when each token was drawn."""
    stop_reason: StopReason = StopReason.STOP
    num_preempted: int | None = None
    """How often the request lost its memory and was computed again; None where the engine does not say."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were found in the prefix cache; None where the engine does not say."""
    routed_experts: Tensor | None = None
    """None: routing is not replayed."""
    extra_fields: JsonObject = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)


@dataclass(frozen=True)
class TokenDelta:
    """The tokens of a request that were drawn since its last delta."""

    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]


OnTokens = Callable[[TokenDelta], None]
"""Called in the event loop of the request; the deltas of a request add up to its output."""


@dataclass(frozen=True)
class Traits:
    """What an engine does; the executable contract leaves out the clauses of what it does not."""

    decodes_with_module: bool
    """It decodes with the module that it was built over, which may be the training module itself;
    otherwise it has weights of its own, and gets new ones by `load`."""
    seeded: bool = True
    """A token follows from (seed, absolute position) and the text before it."""
    batch_invariant: bool = True
    """A request gets the same tokens alone and in any batch."""
    partial_keep: bool = True
    """`pause(keep=True)` keeps running requests."""
    multi_modal: bool = False
    adapters: bool = False
    """`load` takes LoRA tensors alone where the base weights have not changed; otherwise all are merged."""


class RolloutError(RuntimeError):
    """An engine could not do what was asked; the message says which request and why."""


@dataclass(frozen=True)
class RolloutSpec:
    """What an engine is built from: the one argument of the object that `rollout.name` names."""

    config: RolloutConfig | GenerationRolloutConfig
    """The `rollout` block; both name alike what an engine reads."""
    model_path: str
    load_policy: Callable[[], PolicyModel]
    """The module to decode with: the training module itself where both stand in one process, else a copy
    of this engine's own. An engine with weights of its own loads `model_path` and never calls it."""
    dtype: torch.dtype
    device: torch.device
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    """Token ids that end a response."""


@runtime_checkable
class RolloutEngine(Protocol):
    """What agent loops, workers and `weights/` need of an engine.

    Verbs may be awaited from any event loop and thread; those that change the engine wait for the
    decoding step that runs.
    """

    @property
    def traits(self) -> Traits: ...

    @property
    def version(self) -> int:
        """How many updates the weights have seen."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        *,
        on_tokens: OnTokens | None = None,
        multi_modal_data: Settings | None = None,
    ) -> TokenOutput:
        """Draw one response. While the engine is paused the request waits."""

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End these requests (None: all) with the tokens they have; the engine goes on."""

    async def pause(self, keep: bool = False) -> None:
        """Stop decoding. `keep`: running requests stay and go on after `resume`, else they end as aborted."""

    async def resume(self) -> None: ...

    async def begin_update(self) -> None:
        """Until `commit` the engine draws no token: requests that it has must be paused, new ones raise."""

    async def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take some of the new weights by their Hugging Face names; any number of times."""

    async def commit(self, version: int) -> None:
        """The new weights are whole and have this version; without a `load` it only announces it."""

    async def sleep(self) -> None:
        """Give back the memory that only generation needs."""

    async def wake_up(self) -> None:
        """Ready to decode after `sleep`, or after the parameters of a leased module have moved."""

    async def close(self) -> None:
        """End every request; later ones raise."""


@runtime_checkable
class Driven(Protocol):
    """An engine that computes in this process, in the thread that calls `drive`."""

    def drive(self, until: Callable[[], bool]) -> None:
        """Decode in this thread until `until()` is true or the engine has failed or is closed.

        `until` is asked at the start, after requests were answered, and after `notify`; no lock is held
        and nothing decodes meanwhile, so it may wait for loops that got an answer to ask again.
        """

    def notify(self) -> None:
        """Have the driving thread ask `until` again; from any thread."""
