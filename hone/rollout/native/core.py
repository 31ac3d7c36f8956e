"""The engine's heart on the CPU: `step` is admit, prefill, decode; requests join and leave as they come.

Synchronous and single-threaded: the thread and the waiting live in engine.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hone.models.policy import PolicyModel
from hone.rollout.contract import RolloutError, Sampling, StopReason, TokenOutput
from hone.rollout.native.cache import DecodeLayout, PrefillLayout, SlotCache
from hone.rollout.native.sampler import SamplingRows, draw

_MIN_ROWS = 8
"""Matrix products with fewer rows take another path with other rounding; rows are padded up to this."""


@dataclass
class Request:
    """One request on its way through the engine."""

    prompt_ids: list[int]
    sampling: Sampling
    request_id: str
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None
    owner: Any = None
    """Whoever waits for it; the core never looks at it."""

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    def output(self) -> TokenOutput:
        assert self.stop_reason is not None
        return TokenOutput(self.token_ids, self.log_probs, self.versions, self.stop_reason)


class NativeCore:
    """Continuous batching over a policy's own parameters."""

    def __init__(
        self,
        policy: PolicyModel,
        *,
        eos_ids: Sequence[int],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tokenizer: Any = None,
    ) -> None:
        config = policy.lm.config
        self._policy = policy
        self._eos = frozenset(eos_ids)
        self._max_rows = max_num_seqs
        self._prefill_tokens = max_num_batched_tokens
        self._tokenizer = tokenizer
        self._max_positions = getattr(config, "max_position_embeddings", None)
        self.cache = SlotCache(config.num_hidden_layers, max_num_seqs)
        self.version = 0
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []
        self._rows: SamplingRows | None = None

    def add(self, request: Request) -> None:
        longest = len(request.prompt_ids) + request.sampling.max_tokens
        if not request.prompt_ids:
            raise RolloutError(f"request {request.request_id} has an empty prompt")
        if self._max_positions is not None and longest > self._max_positions:
            raise RolloutError(
                f"request {request.request_id} may reach {longest} tokens, but the model has "
                f"{self._max_positions} positions; shorten the prompt or max_tokens"
            )
        if request.sampling.stop and self._tokenizer is None:
            raise RolloutError("stop strings need a tokenizer; this engine was built without one")
        self._waiting.append(request)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._active)

    def abort(self) -> list[Request]:
        """End everything with what it has."""
        ended = [*self._active, *self._waiting]
        for request in ended:
            request.stop_reason = StopReason.ABORT
        self._active, self._rows = [], None
        self._waiting.clear()
        return ended

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Admit what fits, then draw one token for every running sequence; returns the finished ones."""
        admitted = self._admit()
        if admitted:
            logits = self._prefill(admitted)
            self._active += admitted
            self._draw(admitted, logits)
            finished = self._retire()
            if finished or not self._active:
                return finished
        if self._active:
            logits = self._decode()
            self._draw(self._active, logits)
        return self._retire()

    def _admit(self) -> list[Request]:
        admitted: list[Request] = []
        tokens, seen = 0, set()
        while self._waiting and len(self._active) + len(admitted) < self._max_rows:
            prompt = tuple(self._waiting[0].prompt_ids)
            tokens += 0 if prompt in seen else len(prompt)
            if admitted and tokens > self._prefill_tokens:
                break
            seen.add(prompt)
            admitted.append(self._waiting.popleft())
        return admitted

    def _prefill(self, admitted: list[Request]) -> Tensor:  # [A, V]
        """Compute each distinct prompt once; the others of its group take a copy."""
        first_slot = len(self._active)
        leader: dict[tuple[int, ...], int] = {}
        for offset, request in enumerate(admitted):
            leader.setdefault(tuple(request.prompt_ids), offset)
        slots = [first_slot + offset for offset in leader.values()]
        lengths = [len(prompt) for prompt in leader]
        self.cache.reserve(max(lengths) + 1)
        layout = PrefillLayout(self.cache, slots, [0] * len(slots), lengths)
        ids = torch.tensor([token for prompt in leader for token in prompt])
        hidden = self._forward(ids, layout.positions, layout)
        last = torch.tensor(lengths).cumsum(0) - 1
        logits = self._head(hidden.index_select(0, last))
        rank = {prompt: i for i, prompt in enumerate(leader)}
        for offset, request in enumerate(admitted):
            prompt = tuple(request.prompt_ids)
            if leader[prompt] != offset:
                self.cache.copy(first_slot + leader[prompt], first_slot + offset, len(prompt))
        return logits[torch.tensor([rank[tuple(r.prompt_ids)] for r in admitted])]

    def _decode(self) -> Tensor:  # [A, V]
        positions = torch.tensor([r.length - 1 for r in self._active])
        self.cache.reserve(int(positions.max()) + 1)
        ids = torch.tensor([r.token_ids[-1] for r in self._active])
        hidden = self._forward(ids, positions, DecodeLayout(self.cache, positions))
        return self._head(hidden[: len(self._active)])

    def _forward(self, ids: Tensor, positions: Tensor, layout: Any) -> Tensor:
        short = _MIN_ROWS - len(ids)
        if short > 0:
            ids = torch.cat([ids, ids.new_zeros(short)])
            positions = torch.cat([positions, positions.new_zeros(short)])
        out = self._policy.decoder(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, layout=layout
        )
        return out.last_hidden_state[0]

    def _head(self, hidden: Tensor) -> Tensor:
        rows = len(hidden)
        if rows < _MIN_ROWS:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, _MIN_ROWS - rows))
        return self._policy.logits(hidden)[:rows]

    def _draw(self, requests: list[Request], logits: Tensor) -> None:
        rows = self._rows if requests is self._active else None
        if rows is None:
            rows = SamplingRows.of([r.sampling for r in requests], logits.device)
            if requests is self._active:
                self._rows = rows
        positions = torch.tensor([r.length for r in requests])
        tokens, log_probs = draw(logits, positions, rows)
        for request, token, log_prob in zip(
            requests, tokens.tolist(), log_probs.tolist(), strict=True
        ):
            request.token_ids.append(token)
            request.log_probs.append(log_prob)
            request.versions.append(self.version)
            request.stop_reason = self._stop_reason(request, token)

    def _stop_reason(self, request: Request, token: int) -> StopReason | None:
        sampling = request.sampling
        if token in self._eos and not sampling.ignore_eos:
            return StopReason.STOP
        if token in sampling.stop_token_ids:
            return StopReason.STOP
        if sampling.stop and self._ends_with_stop(request):
            return StopReason.STOP
        return StopReason.LENGTH if len(request.token_ids) >= sampling.max_tokens else None

    def _ends_with_stop(self, request: Request) -> bool:
        """Whether the newest token completed a stop string (it may have begun several tokens ago)."""
        longest = max(len(s) for s in request.sampling.stop)
        # A token is at least one character or part of one; a few more cover multi-token characters.
        tail = self._tokenizer.decode(request.token_ids[-(longest + 8) :])
        return any(s in tail for s in request.sampling.stop)

    def _retire(self) -> list[Request]:
        """Take out the finished and close the gaps: the last sequences move into the freed slots."""
        finished = [r for r in self._active if r.stop_reason is not None]
        if not finished:
            return []
        slot = 0
        while slot < len(self._active):
            if self._active[slot].stop_reason is None:
                slot += 1
                continue
            last = self._active.pop()
            if slot < len(self._active):
                if last.stop_reason is None:
                    self.cache.copy(len(self._active), slot, last.length)
                self._active[slot] = last
        self._rows = None
        return finished
