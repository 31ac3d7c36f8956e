"""The core of the native engine on a CPU: a step admits requests and samples a token per sequence.

One forward computes new prompts and running sequences together. Keys are stored in contiguous slots
instead of blocks: attention reads a slot as a view, while a block table would need a copy of all
keys at every step.
"""

from __future__ import annotations

from bisect import insort_left
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.models.attention import Layout
from hone.models.policy import PolicyModel
from hone.ops.groups import first_equal_indices
from hone.ops.packed_linear import row_multiple
from hone.rollout.contract import StopReason
from hone.rollout.native.cache import DecodeLayout, JointLayout, PrefillLayout, SlotCache
from hone.rollout.native.decoder import Forward, PlainDecoder, decoder_forward
from hone.rollout.native.sampler import SamplingRows, sample_tokens
from hone.rollout.requests import Request, RequestRules, select
from hone.tokenizer import Tokenizer


class NativeCore:
    """Continuous batching over the policy's parameters."""

    def __init__(
        self,
        policy: PolicyModel,
        *,
        eos_ids: Sequence[int],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tokenizer: Tokenizer | None = None,
        forward: Forward | None = None,
    ) -> None:
        """`forward` replaces the default forward of the policy."""
        config = policy.lm.config
        self.policy = policy
        self.rules = RequestRules.of(config, eos_ids, tokenizer)
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._forward = forward if forward is not None else decoder_forward(policy)
        self._forward_is_current = False  # whether the forward has read the current parameters
        packed = isinstance(self._forward, PlainDecoder)
        self.row_multiple = row_multiple(policy.parameters(), packed=packed)
        """Rows of a forward are padded to this multiple."""
        self.cache = SlotCache(config.get_text_config().num_hidden_layers, max_num_seqs)
        self.version = 0
        self.prefilled_tokens = 0
        """Prompt tokens computed so far; the shared prompt of a group counts once."""
        self._waiting: list[Request] = []  # sorted by max_tokens, ascending
        self._running: list[Request] = []
        self._sampling: SamplingRows | None = None  # None after the running requests have changed

    def add(self, request: Request) -> None:
        """Queues a request: the largest max_tokens starts first, ties start in order of arrival.

        Otherwise a long request could start last and run alone in the batch.
        """
        self.rules.check(request)
        insort_left(self._waiting, request, key=lambda r: r.sampling.max_tokens)

    def free_cache(self) -> None:
        self.cache.free()

    def invalidate(self) -> None:
        """Drops everything that was computed from the old parameters."""
        self._forward.invalidate()
        self._forward_is_current = False

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @torch.inference_mode()
    def abort(self, request_ids: Collection[str] | None = None) -> list[Request]:
        """Aborts the requests with these ids (None: all); they keep the tokens sampled so far."""
        waiting = select(reversed(self._waiting), request_ids)
        for request in [*select(self._running, request_ids), *waiting]:
            request.stop_reason = StopReason.ABORT
        self._waiting = [r for r in self._waiting if r.stop_reason is None]
        return [*self._remove_finished(), *waiting]

    @torch.inference_mode()
    def step(self, must_yield: Callable[[], bool] = lambda: True) -> list[Request]:
        """Admits requests, samples one token per sequence, and returns the finished requests.

        `must_yield` is ignored, because a step of one token is short.
        """
        admitted = self._admit()
        logits = self._next_logits(admitted)
        if admitted:
            self._running += admitted
            self._sampling = None
        self._sample(logits)
        return self._remove_finished()

    def _admit(self) -> list[Request]:
        """Removes and returns waiting requests that fit the free slots and the prefill budget."""
        admitted: list[Request] = []
        prompts: set[tuple[int, ...]] = set()
        batched_tokens = 0
        while self._waiting and len(self._running) + len(admitted) < self._max_num_seqs:
            prompt = tuple(self._waiting[-1].prompt_ids)
            batched_tokens += 0 if prompt in prompts else len(prompt)
            if admitted and batched_tokens > self._max_num_batched_tokens:
                break
            prompts.add(prompt)
            admitted.append(self._waiting.pop())
        return admitted

    def _next_logits(self, admitted: list[Request]) -> Tensor:  # [sequences, V]
        """Returns next-token logits of the running sequences, then of the admitted ones.

        Each distinct prompt is computed once, in the slot of the first request that has it.
        """
        if not self._forward_is_current or admitted:
            self._forward.refresh()
            self._forward_is_current = True
        ids, num_running = [r.token_ids[-1] for r in self._running], len(self._running)
        if not admitted:
            return self._logits(self._hidden_states(ids, *self._layout([], []))[:num_running])
        first_indices = first_equal_indices([tuple(r.prompt_ids) for r in admitted])
        distinct_indices = sorted(set(first_indices))
        lengths = [len(admitted[i].prompt_ids) for i in distinct_indices]
        last_token_indices = [
            *range(num_running),
            *(num_running - 1 + end for end in accumulate(lengths)),
        ]
        ids += [token for i in distinct_indices for token in admitted[i].prompt_ids]
        hidden = self._hidden_states(
            ids, *self._layout([num_running + i for i in distinct_indices], lengths)
        )
        self.prefilled_tokens += sum(lengths)
        for i, first in enumerate(first_indices):
            if first != i:
                length = len(admitted[i].prompt_ids)
                self.cache.copy(num_running + first, num_running + i, length)
        row_by_first_index = {first: num_running + i for i, first in enumerate(distinct_indices)}
        rows = [*range(num_running), *(row_by_first_index[first] for first in first_indices)]
        logits = self._logits(hidden[torch.tensor(last_token_indices)])
        return logits if len(rows) == len(logits) else logits[torch.tensor(rows)]

    def _layout(self, slots: list[int], lengths: list[int]) -> tuple[Tensor, Layout]:
        """Returns positions and layout: the running sequences, then the new prompts in `slots`."""
        running_positions = torch.tensor([r.length - 1 for r in self._running], dtype=torch.int64)
        self.cache.reserve(max([*lengths, *(r.length for r in self._running)]), len(self._running))
        decode = DecodeLayout(self.cache, running_positions) if self._running else None
        if decode is not None and not slots and len(running_positions) % self.row_multiple == 0:
            return running_positions, decode
        prefill = PrefillLayout(self.cache, slots, lengths) if slots else None
        positions = (
            torch.cat([running_positions, prefill.positions]) if prefill else running_positions
        )
        return positions, JointLayout(decode, prefill)

    def _hidden_states(self, ids: list[int], positions: Tensor, layout: Layout) -> Tensor:
        padding = -len(ids) % self.row_multiple
        if padding:
            positions = F.pad(positions, (0, padding))
        return self._forward(torch.tensor(ids + [0] * padding), positions, layout)

    def _logits(self, hidden: Tensor) -> Tensor:
        rows = len(hidden)
        if padding := -rows % self.row_multiple:
            hidden = F.pad(hidden, (0, 0, 0, padding))
        return self._forward.logits(hidden)[:rows]

    def _sample(self, logits: Tensor) -> None:
        requests = self._running
        if self._sampling is None:
            self._sampling = SamplingRows.of([r.sampling for r in requests], logits.device)
        positions = torch.tensor([r.length for r in requests])
        tokens, log_probs = sample_tokens(logits, positions, self._sampling)
        for request, token, log_prob in zip(
            requests, tokens.tolist(), log_probs.tolist(), strict=True
        ):
            request.append(token, log_prob, self.version)
            request.stop_reason = self.rules.stop_reason(request)

    def _remove_finished(self) -> list[Request]:
        """Removes and returns the finished requests; the last sequences move into their slots."""
        finished = [r for r in self._running if r.stop_reason is not None]
        if not finished:
            return []
        slot = 0
        while slot < len(self._running):
            if self._running[slot].stop_reason is None:
                slot += 1
                continue
            last = self._running.pop()
            if slot < len(self._running):
                if last.stop_reason is None:
                    self.cache.copy(len(self._running), slot, last.length)
                self._running[slot] = last
        self._sampling = None
        return finished
