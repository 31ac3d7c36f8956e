"""The engine's heart on the CPU: `step` is admit, forward, draw, retire; requests join as they come.

New prompts and running sequences go through one forward together. Synchronous and single-threaded: the
thread and the waiting live in engine.py.
"""

from __future__ import annotations

from bisect import insort_left
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hone.models.attention import Layout
from hone.models.policy import PolicyModel
from hone.rollout.contract import StopReason
from hone.rollout.native.cache import DecodeLayout, JointLayout, PrefillLayout, SlotCache
from hone.rollout.native.decoder import PlainDecoder, decoder_forward
from hone.rollout.native.row_grain import row_grain
from hone.rollout.native.sampler import SamplingRows, draw
from hone.rollout.requests import Request, RequestRules, chosen
from hone.tokenizer import Tokenizer


class NativeCore:
    """Continuous batching over a policy's own parameters."""

    def __init__(
        self,
        policy: PolicyModel,
        *,
        eos_ids: Sequence[int],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        config = policy.lm.config
        self.policy = policy
        self.rules = RequestRules.of(config, eos_ids, tokenizer)
        self._max_rows = max_num_seqs
        self._prefill_limit = max_num_batched_tokens
        self._forward = decoder_forward(policy)
        self._fresh = False  # whether the forward has seen the parameters as they are
        self._grain = row_grain(policy.parameters(), packed=isinstance(self._forward, PlainDecoder))
        layers = config.get_text_config().num_hidden_layers
        self.cache = SlotCache(layers, max_num_seqs)
        self.version = 0
        self.prefilled_tokens = 0
        """Prompt tokens computed so far; a group's prompt counts once."""
        self._waiting: list[Request] = []  # by what they may still write, the longest last
        self._active: list[Request] = []
        self._rows: SamplingRows | None = None

    def add(self, request: Request) -> None:
        """Queue it; the longest allowed starts first, in order of arrival among equals.

        So no long one is left to the end, alone in the batch, and those that run together end together.
        """
        self.rules.check(request)
        # Whoever stands behind starts earlier; equals that came before stay behind.
        insort_left(self._waiting, request, key=lambda r: r.sampling.max_tokens)

    def forget(self) -> None:
        """The parameters are others now; keep nothing that was made from them."""
        self._forward.forget()
        self._fresh = False

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._active)

    @torch.inference_mode()
    def abort(self, request_ids: Collection[str] | None = None) -> list[Request]:
        """End these requests (None: all) with what they have; the others move into their slots."""
        waiting = chosen(reversed(self._waiting), request_ids)
        for request in [*chosen(self._active, request_ids), *waiting]:
            request.stop_reason = StopReason.ABORT
        self._waiting = [r for r in self._waiting if r.stop_reason is None]
        return [*self._retire(), *waiting]

    @torch.inference_mode()
    def step(self, wanted: Callable[[], bool] = lambda: True) -> list[Request]:
        """Admit what fits, draw one token for every sequence; returns the finished ones.

        wanted: not asked here, one token is soon drawn.
        """
        admitted = self._admit()
        logits = self._compute(admitted)
        if admitted:
            self._active += admitted
            self._rows = None
        self._draw(logits)
        return self._retire()

    def _admit(self) -> list[Request]:
        """What fits the free slots and, each distinct prompt counted once, one prefill."""
        admitted: list[Request] = []
        tokens, seen = 0, set()
        while self._waiting and len(self._active) + len(admitted) < self._max_rows:
            prompt = tuple(self._waiting[-1].prompt_ids)
            tokens += 0 if prompt in seen else len(prompt)
            if admitted and tokens > self._prefill_limit:
                break
            seen.add(prompt)
            admitted.append(self._waiting.pop())
        return admitted

    def _compute(self, admitted: list[Request]) -> Tensor:  # [A, V]
        """Logits after the last token of every running sequence, then of every admitted one."""
        if not self._fresh or admitted:
            self._forward.refresh()
            self._fresh = True
        if not admitted:
            layout, positions = self._layout([], [])
            hidden = self._hidden([r.token_ids[-1] for r in self._active], positions, layout)
            return self._logits(hidden[: len(self._active)])
        leaders: dict[tuple[int, ...], int] = {}  # each distinct prompt is computed in one slot
        for slot, request in enumerate(admitted, len(self._active)):
            leaders.setdefault(tuple(request.prompt_ids), slot)
        lengths = [len(prompt) for prompt in leaders]
        ids = [r.token_ids[-1] for r in self._active]
        last = [*range(len(ids)), *(len(ids) - 1 + end for end in accumulate(lengths))]
        ids += [token for prompt in leaders for token in prompt]
        layout, positions = self._layout(list(leaders.values()), lengths)
        hidden = self._hidden(ids, positions, layout)
        self.prefilled_tokens += sum(lengths)
        for slot, request in enumerate(admitted, len(self._active)):
            leader = leaders[tuple(request.prompt_ids)]
            if leader != slot:
                self.cache.copy(leader, slot, len(request.prompt_ids))
        rank = {prompt: len(self._active) + i for i, prompt in enumerate(leaders)}
        rows = [*range(len(self._active)), *(rank[tuple(r.prompt_ids)] for r in admitted)]
        logits = self._logits(hidden[torch.tensor(last)])
        return logits if len(rows) == len(logits) else logits[torch.tensor(rows)]

    def _layout(self, slots: list[int], lengths: list[int]) -> tuple[Layout, Tensor]:
        running = torch.tensor([r.length - 1 for r in self._active], dtype=torch.int64)
        self.cache.reserve(max([*lengths, *(r.length for r in self._active)]))
        decode = DecodeLayout(self.cache, running) if self._active else None
        if decode is not None and not slots and len(running) % self._grain == 0:
            return decode, running
        prefill = PrefillLayout(self.cache, slots, lengths) if slots else None
        positions = torch.cat([running, prefill.positions]) if prefill else running
        return JointLayout(decode, prefill), positions

    def _hidden(self, ids: list[int], positions: Tensor, layout: Layout) -> Tensor:
        short = -len(ids) % self._grain
        if short:
            positions = torch.nn.functional.pad(positions, (0, short))
        return self._forward(torch.tensor(ids + [0] * short), positions, layout)

    def _logits(self, hidden: Tensor) -> Tensor:
        rows = len(hidden)
        if short := -rows % self._grain:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, short))
        return self._forward.logits(hidden)[:rows]

    def _draw(self, logits: Tensor) -> None:
        requests = self._active
        if self._rows is None:
            self._rows = SamplingRows.of([r.sampling for r in requests], logits.device)
        positions = torch.tensor([r.length for r in requests])
        tokens, log_probs = draw(logits, positions, self._rows)
        for request, token, log_prob in zip(
            requests, tokens.tolist(), log_probs.tolist(), strict=True
        ):
            request.token_ids.append(token)
            request.log_probs.append(log_prob)
            request.versions.append(self.version)
            request.stop_reason = self.rules.stop_reason(request)

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
