"""The engine's heart on a GPU: `step` admits what fits, draws a chunk of tokens, retires what ended.

Public surface as in core.py. The host looks at the results once a chunk; between, rows move on by
themselves. On a CPU the same logic runs over the reference kernels, which is how it is tested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.models.policy import PolicyModel
from hone.ops.transfer import send
from hone.rollout.contract import RolloutError, StopReason
from hone.rollout.native.decode_graph import DecodeStep, bucket_sizes, decode_layout
from hone.rollout.native.decoder import ModuleDecoder, is_plain
from hone.rollout.native.exact_decoder import ExactDecoder
from hone.rollout.native.fused_decoder import FusedDecoder, can_join
from hone.rollout.native.kernel_choice import kernels_for
from hone.rollout.native.paged_cache import PagedCache, pages_for
from hone.rollout.native.paged_layouts import PagedPrefill
from hone.rollout.native.paged_rows import MAX_STOPS, HostRows, RowState
from hone.rollout.native.sampler import SamplingRows, draw
from hone.rollout.requests import Request, RequestRules

PAGE_SIZE = 16
STEPS_PER_CHUNK = 32
"""Tokens drawn between two looks of the host: enough to hide them, few enough to refill slots soon."""
STEPS_UNWATCHED = 64
"""The same where no request waits for a slot."""


@dataclass
class Row:
    """A running sequence: its request and its pages."""

    request: Request
    pages: list[int]
    stops: list[int]
    careful: bool
    """Its end is not seen by the GPU alone: stop strings, or too many stop tokens."""
    known: int = field(default=0)
    """Tokens whose keys were found in the cache when it was admitted."""
    version: int = 0
    """Weights its first keys were computed with."""

    @property
    def limit(self) -> int:
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens


@dataclass(frozen=True)
class PagedRules(RequestRules):
    """The rules of every engine, and no more tokens than the pages were laid out for."""

    longest: int = field(kw_only=True)
    pages: int = field(kw_only=True)

    def check(self, request: Request) -> None:
        super().check(request)
        reach = len(request.prompt_ids) + request.sampling.max_tokens
        if reach > self.longest:
            raise RolloutError(
                f"request {request.request_id} may reach {reach} tokens, but the engine was built "
                f"for {self.longest}; raise rollout.max_model_len"
            )
        if -(-reach // PAGE_SIZE) >= self.pages:
            raise RolloutError(
                f"request {request.request_id} may reach {reach} tokens, more than the whole cache "
                f"of {self.pages} pages of {PAGE_SIZE}; raise rollout.gpu_memory_utilization"
            )


class PagedCore:
    """Continuous batching over a policy's own parameters, keys and values in pages."""

    def __init__(
        self,
        policy: PolicyModel,
        *,
        eos_ids: Sequence[int],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        gpu_memory_utilization: float,
        tokenizer: Any = None,
        enforce_eager: bool = False,
        capture_sizes: Sequence[int] | None = None,
        prefix_caching: bool = True,
        pages: int | None = None,
        exact: ExactDecoder | None = None,
    ) -> None:
        config = policy.lm.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        weight = next(policy.parameters())
        self.device = weight.device
        self.policy = policy
        self._max_rows, self._prefill_limit = max_num_seqs, max_num_batched_tokens
        self._prefix_caching = prefix_caching
        self._exact = exact
        self._kernels = exact.kernels if exact is not None else kernels_for(self.device)
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        width = -(-max_model_len // PAGE_SIZE)
        page_bytes = text.num_hidden_layers * 2 * kv_heads * PAGE_SIZE * head_dim * weight.itemsize
        self.cache = PagedCache(
            layers=text.num_hidden_layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            pages=pages
            or pages_for(
                wanted=max_num_seqs * (width + STEPS_UNWATCHED // PAGE_SIZE + 1) + 1,
                bytes_per_page=page_bytes,
                share=gpu_memory_utilization,
                device=self.device,
            ),
            page_size=PAGE_SIZE,
            dtype=weight.dtype,
            device=self.device,
        )
        common = vars(RequestRules.of(config, eos_ids, tokenizer))
        self.rules = PagedRules(**common, longest=max_model_len, pages=self.cache.pages)
        self._forward: Any = self._choose_forward(max_model_len)
        self._logits = exact.logits if exact is not None else policy.logits
        self._device_rows = RowState.empty(max_num_seqs, width, STEPS_UNWATCHED + 1, self.device)
        self._host_rows = HostRows(max_num_seqs, width)
        self._step = DecodeStep(
            self._forward,
            self._logits,
            self._decode_layout,
            self._device_rows,
            self._kernels,
            page_size=PAGE_SIZE,
            sizes=bucket_sizes(max_num_seqs, capture_sizes),
            graphs=self.device.type == "cuda" and not enforce_eager,
        )
        self._spare = max_num_seqs * (STEPS_UNWATCHED // PAGE_SIZE)
        """Pages kept for the next chunk of every other row before one may take ahead."""
        self._version = 0
        self.prefilled_tokens = 0
        """Prompt tokens computed so far; a group's prompt counts once."""
        self.preempted = 0
        self._waiting: deque[Request] = deque()
        self._active: list[Row] = []
        self._placed: list[tuple[int, int]] = []

    def _choose_forward(self, max_model_len: int) -> Any:
        if self._exact is not None:
            self._exact.reach(max_model_len)
            return self._exact
        if is_plain(self.policy) and can_join(self.policy):
            return FusedDecoder(self.policy, self._kernels, max_model_len)
        return ModuleDecoder(self.policy)

    # -- the surface that engine.py drives -----------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        """New weights: keys computed with the old ones may not be found again."""
        self._version = version
        self.cache.pool.forget_all()

    def forget(self) -> None:
        """Nothing to do: decoding reads the parameters themselves."""

    def add(self, request: Request) -> None:
        self.rules.check(request)
        self._waiting.append(request)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._active)

    def abort(self) -> list[Request]:
        """End everything with what it has."""
        ended = [*(row.request for row in self._active), *self._waiting]
        for row in self._active:
            self.cache.pool.release(row.pages)
        for request in ended:
            request.stop_reason = StopReason.ABORT
        self._active, self._placed = [], []
        self._waiting.clear()
        return ended

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Draw a chunk of tokens for every sequence, admit what fits; returns the finished ones.

        New prompts are launched behind the running sequences' chunk: the host's work on them is hidden.
        """
        self.cache.reserve()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the decode thread starts on device 0
        if not self._active and self._forward.refresh():
            self._step.forget()
        steps = self._steps()
        self._extend_active(steps)
        self._place_active()
        running = len(self._active)
        if running:
            self._decode(steps)
        while admitted := self._admit(steps):
            self._prefill(admitted)
        if not running:
            self._decode(min(steps, self._steps()))  # they got pages for no more
        return self._retire()

    # -- room ----------------------------------------------------------------------------------

    def _steps(self) -> int:
        """Decode steps until the host looks again: no more than the longest sequence still needs."""
        most = STEPS_PER_CHUNK if self._waiting else STEPS_UNWATCHED
        left = [row.limit - row.request.length for row in self._active]
        return max(1, min(most, max(left, default=most)))

    def _pages_needed(self, row: Row, steps: int) -> int:
        """Pages to add so that `steps` more tokens can be fed after those it has."""
        whole = -(-row.limit // PAGE_SIZE) - len(row.pages)
        if self.cache.pool.available - whole >= self._spare:  # plenty: all it may ever need at once
            return max(0, whole)
        reach = min(row.request.length + steps, row.limit)
        return max(0, -(-reach // PAGE_SIZE) - len(row.pages))

    def _extend_active(self, steps: int) -> None:
        """Pages for the next chunk, oldest sequences first; the newest give theirs back if need be."""
        at = 0
        while at < len(self._active):
            row = self._active[at]
            need = self._pages_needed(row, steps)
            if need <= self.cache.pool.available:
                row.pages += self.cache.pool.take(need)
                at += 1
            else:
                self._preempt(self._active.pop())

    def _preempt(self, row: Row) -> None:
        """Send a sequence back to wait: it keeps its tokens and is computed again from them."""
        self.cache.pool.release(row.pages)
        self._waiting.appendleft(row.request)
        self.preempted += 1

    def _admit(self, steps: int) -> list[Row]:
        """What fits the free rows, the pages and, each distinct prompt counted once, one prefill."""
        pool, admitted = self.cache.pool, list[Row]()
        tokens, seen = 0, dict[tuple[int, ...], Row]()
        while self._waiting and len(self._active) + len(admitted) < self._max_rows:
            request = self._waiting[0]
            ids = tuple(request.prompt_ids + request.token_ids)
            leader = seen.get(ids)
            if leader is not None:
                found = leader.pages[: len(ids) // PAGE_SIZE]
            else:
                found = pool.find(ids) if self._prefix_caching else []
            new = 0 if leader is not None else len(ids) - len(found) * PAGE_SIZE
            if admitted and tokens + new > self._prefill_limit:
                break
            row = self._row(request, found)
            pool.hold(found)
            need = self._pages_needed(row, steps + 1)
            if need > pool.available:
                pool.release(found)
                if not admitted and not self._active:
                    raise RolloutError(
                        f"request {request.request_id} does not fit the empty cache; this is a defect"
                    )
                break
            row.pages = [*found, *pool.take(need)]
            seen.setdefault(ids, row)
            tokens += new
            admitted.append(row)
            self._waiting.popleft()
        return admitted

    def _row(self, request: Request, found: list[int]) -> Row:
        sampling = request.sampling
        ends = [] if sampling.ignore_eos else sorted(self.rules.eos_ids)
        stops = list(dict.fromkeys([*ends, *sampling.stop_token_ids]))
        careful = bool(sampling.stop) or len(stops) > MAX_STOPS
        return Row(request, list(found), stops, careful, len(found) * PAGE_SIZE, self._version)

    # -- computing -----------------------------------------------------------------------------

    def _place_active(self) -> None:
        """Row i of the state is sequence i; rows that only went on are already in place."""
        if self._placed == [(id(row), len(row.pages)) for row in self._active]:
            self._device_rows.count.zero_()
            return
        self._place(0, self._active)
        self._host_rows.idle_from(len(self._active))
        self._host_rows.send(self._device_rows, 0, self._max_rows)

    def _place(self, begin: int, rows: list[Row]) -> None:
        states = []
        for row in rows:
            request, position = row.request, row.request.length - 1
            states.append(
                (
                    request.token_ids[-1] if request.token_ids else request.prompt_ids[-1],
                    position,
                    row.pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE,
                    request.sampling.seed,
                    row.limit,
                    0,
                    0,
                )
            )
        self._host_rows.fill(
            begin,
            states,
            temperatures=[row.request.sampling.temperature for row in rows],
            stops=[row.stops for row in rows],
            pages=[row.pages for row in rows],
        )

    def _prefill(self, admitted: list[Row]) -> None:
        """Compute each distinct prompt once, give its followers their own last page, draw for all."""
        leaders: dict[tuple[int, ...], int] = {}
        rank: list[int] = []
        chosen: list[Row] = []
        copies: list[tuple[int, int]] = []
        for row in admitted:
            ids = tuple(row.request.prompt_ids + row.request.token_ids)
            if ids not in leaders:
                leaders[ids] = len(chosen)
                chosen.append(row)
            elif tail := len(ids) % PAGE_SIZE:
                page = (len(ids) - tail) // PAGE_SIZE
                copies.append((chosen[leaders[ids]].pages[page], row.pages[page]))
            rank.append(leaders[ids])
        hidden = self._prompt_hidden(chosen, list(leaders))
        self.cache.copy_pages([a for a, _ in copies], [b for _, b in copies])
        begin, end = len(self._active), len(self._active) + len(admitted)
        self._place(begin, admitted)
        self._host_rows.send(self._device_rows, begin, end)
        logits = self._logits(hidden[send(torch.tensor(rank), self.device)])
        self._draw(logits, [row.request for row in admitted], begin, end)
        if self._prefix_caching:
            for ids, at in leaders.items():
                self.cache.pool.remember(ids, chosen[at].pages)
        self._active += admitted

    def _prompt_hidden(self, rows: list[Row], prompts: list[tuple[int, ...]]) -> Tensor:
        """Hidden states [S, d] of each prompt's last token."""
        starts = [row.known for row in rows]
        lengths = [len(ids) - start for ids, start in zip(prompts, starts, strict=True)]
        pages = [row.pages for row in rows]
        layout: Any
        if self._exact is not None:
            layout = self._exact.prefill_layout(self.cache, pages, starts, lengths)
        else:
            layout = PagedPrefill(self.cache, self._kernels, pages, starts, lengths, self.device)
        ids = [t for p, start in zip(prompts, starts, strict=True) for t in p[start:]]
        fed = send(torch.from_numpy(np.array(ids, np.int64)), self.device)
        hidden = self._forward(fed, layout.positions, layout)
        self.prefilled_tokens += len(ids)
        last = torch.tensor(lengths).cumsum(0) - 1
        return hidden[send(last, self.device)]

    def _draw(self, logits: Tensor, requests: list[Request], begin: int, end: int) -> None:
        rows = self._device_rows.rows(begin, end)
        if not any(_truncates(request) for request in requests):
            self._kernels.sample(logits, rows, PAGE_SIZE)
            return
        sampling = SamplingRows.of([request.sampling for request in requests], self.device)
        tokens, log_probs = draw(logits[: end - begin].float(), rows.position + 1, sampling)
        if self._exact is not None:
            log_probs = self._kernels.log_probs_of(
                logits[: end - begin], tokens, rows.inverse_temperature
            )
        self._kernels.advance(tokens, log_probs, rows, PAGE_SIZE)

    def _decode_layout(self, rows: RowState) -> Any:
        if self._exact is None:
            return decode_layout(self.cache, self._kernels, rows)
        return self._exact.decode_layout(self.cache, rows)

    def _decode(self, steps: int) -> None:
        """`steps` tokens for every row, one after the other, without a look at them."""
        requests = [row.request for row in self._active]
        plain = not any(_truncates(request) for request in requests)
        for _ in range(steps):
            logits = self._step.run(len(requests), draw=plain)
            if not plain:
                self._draw(logits, requests, 0, len(requests))

    # -- results -------------------------------------------------------------------------------

    def _retire(self) -> list[Request]:
        """Read what was drawn, take out the finished."""
        rows = self._device_rows.rows(0, len(self._active))
        tokens, log_probs = rows.tokens_out.cpu().tolist(), rows.log_probs_out.tolist()
        counts, flags = rows.count.tolist(), rows.finished.tolist()
        staying: list[Row] = []
        finished: list[Request] = []
        for index, row in enumerate(self._active):
            self._append(row, tokens[index][: counts[index]], log_probs[index], bool(flags[index]))
            if row.request.stop_reason is None:
                staying.append(row)
                continue
            finished.append(row.request)
            if self._prefix_caching and row.version == self._version:
                # The last token was drawn but never fed.
                ids = row.request.prompt_ids + row.request.token_ids
                self.cache.pool.remember(ids[:-1], row.pages)
            self.cache.pool.release(row.pages)
        self._active = staying
        self._placed = [] if finished else [(id(row), len(row.pages)) for row in staying]
        return finished

    def _append(self, row: Row, tokens: list[int], log_probs: list[float], flag: bool) -> None:
        request = row.request
        if row.careful:
            for token, log_prob in zip(tokens, log_probs, strict=False):
                request.token_ids.append(token)
                request.log_probs.append(log_prob)
                request.versions.append(self._version)
                request.stop_reason = self.rules.stop_reason(request)
                if request.stop_reason is not None:
                    return
            return
        request.token_ids += tokens
        request.log_probs += log_probs[: len(tokens)]
        request.versions += [self._version] * len(tokens)
        if flag or request.cancelled:
            request.stop_reason = self.rules.stop_reason(request)


def _truncates(request: Request) -> bool:
    s = request.sampling
    return s.top_k > 0 or s.top_p < 1 or s.min_p > 0
