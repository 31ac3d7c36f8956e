"""The engine's heart on a GPU: `step` admits what fits, draws a chunk of tokens, retires what ended.

Public surface as in core.py; who waits, runs and holds pages is paged_schedule.py's. The host looks at
the results once a chunk; between, rows move on by themselves. Tested on a CPU over reference kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hone.models.families import key_shape
from hone.models.policy import PolicyModel
from hone.ops.transfer import send
from hone.rollout.native.cut_rows import CutRows
from hone.rollout.native.decode_graph import DecodeStep, bucket_sizes, decode_layout
from hone.rollout.native.decoder import ModuleDecoder, is_plain
from hone.rollout.native.exact_decoder import ExactDecoder
from hone.rollout.native.exact_layouts import ExactLayout
from hone.rollout.native.fused_decoder import FusedDecoder, can_join
from hone.rollout.native.kernel_choice import kernels_for
from hone.rollout.native.paged_cache import PagedCache, pages_for
from hone.rollout.native.paged_layouts import PagedDecode, PagedPrefill
from hone.rollout.native.paged_rows import HostRows, RowState
from hone.rollout.native.paged_schedule import (
    PAGE_SIZE,
    STEPS_UNWATCHED,
    PagedRules,
    PagedSchedule,
    Row,
)
from hone.rollout.requests import Request, RequestRules
from hone.tokenizer import Tokenizer


class _Drawn(NamedTuple):
    """What the host has read of the rows and not handed to their requests yet."""

    tokens: Tensor  # [N, C]
    log_probs: Tensor
    counts: list[int]
    finished: list[int]


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
        tokenizer: Tokenizer | None = None,
        enforce_eager: bool = False,
        capture_sizes: Sequence[int] | None = None,
        prefix_caching: bool = True,
        pages: int | None = None,
        exact: ExactDecoder | None = None,
    ) -> None:
        self.device = next(policy.parameters()).device
        self.policy = policy
        self._exact = exact
        self._version = 0
        self._kernels = exact.kernels if exact is not None else kernels_for(self.device)
        width = -(-max_model_len // PAGE_SIZE)
        self.cache = _cache_for(
            policy,
            pages,
            wanted=max_num_seqs * (width + STEPS_UNWATCHED // PAGE_SIZE + 1) + 1,
            share=gpu_memory_utilization,
        )
        common = vars(RequestRules.of(policy.lm.config, eos_ids, tokenizer))
        self.rules = PagedRules(**common, longest=max_model_len, pages=self.cache.pages)
        self._schedule = PagedSchedule(
            self.cache.pool,
            self.rules,
            max_rows=max_num_seqs,
            prefill_limit=max_num_batched_tokens,
            prefix_caching=prefix_caching,
        )
        self._forward = self._choose_forward(max_model_len)
        self._logits = exact.logits if exact is not None else policy.logits
        self._max_rows = max_num_seqs
        self._device_rows = RowState.empty(max_num_seqs, width, STEPS_UNWATCHED + 1, self.device)
        self._host_rows = HostRows(max_num_seqs, width)
        self._placed: list[tuple[int, int]] = []
        self._addresses: list[int] = []  # of the parameters, where recorded steps read them
        self._step = DecodeStep(
            self._forward,
            self._logits,
            self._decode_layout,
            self._device_rows,
            self._kernels,
            page_size=PAGE_SIZE,
            sizes=bucket_sizes(max_num_seqs, capture_sizes),
            graphs=self.device.type == "cuda" and not enforce_eager,
            known_forward=not isinstance(self._forward, ModuleDecoder),
        )
        self.prefilled_tokens = 0
        """Prompt tokens computed so far; a group's prompt counts once."""

    def _choose_forward(self, max_model_len: int) -> ExactDecoder | FusedDecoder | ModuleDecoder:
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
        self._version = version
        self.forget()

    def forget(self) -> None:
        """The weights are others: keys computed with the old ones may not be found again."""
        self._schedule.forget()

    def add(self, request: Request) -> None:
        self._schedule.add(request)

    @property
    def busy(self) -> bool:
        return self._schedule.busy

    @property
    def preempted(self) -> int:
        """Times a sequence gave its pages back and was computed again."""
        return self._schedule.preempted

    def abort(self, request_ids: Collection[str] | None = None) -> list[Request]:
        """End these requests (None: all) with what they have."""
        self._placed = []
        return self._schedule.abort(request_ids)

    @torch.no_grad()
    def step(self, wanted: Callable[[], bool] = lambda: True) -> list[Request]:
        """Draw a chunk of tokens for every sequence, admit what fits; returns the finished ones.

        New prompts are launched behind the running sequences' chunk: the host's work on them is hidden.
        Until the engine is `wanted` for something else, chunks in which nothing can change follow each
        other, and the host takes up the tokens of one while the device draws the next.
        """
        self.cache.reserve()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the decode thread starts on device 0
        schedule = self._schedule
        if not schedule.active:
            self._follow_parameters()
        steps = schedule.steps()
        schedule.extend(steps)
        self._place_active()
        running = len(schedule.active)
        if running:
            self._decode(steps)
        while admitted := schedule.admit(steps):
            self._prefill(admitted)
        if not running:
            self._decode(min(steps, schedule.steps(drawn=1)))  # they got pages for no more
        drawn = self._read()
        while not (any(drawn.finished) or wanted()) and (more := schedule.ahead(drawn.counts)):
            self._device_rows.count.zero_()
            self._decode(more)
            self._take_up(drawn)
            drawn = self._read()
        self._take_up(drawn)
        return self._retire()

    def _follow_parameters(self) -> None:
        """Recorded steps read fixed addresses: where parameters have moved, steps are recorded anew."""
        self._forward.refresh()
        addresses = self.policy.addresses()
        if addresses != self._addresses:
            self._addresses = addresses
            self._step.forget()

    # -- computing -----------------------------------------------------------------------------

    def _place_active(self) -> None:
        """Row i of the state is sequence i; rows that only went on are already in place.

        Where none is left all are made idle: old ones would fill up the next batch and write its pages.
        """
        active = self._schedule.active
        if active and self._placed == [(id(row), len(row.pages)) for row in active]:
            self._device_rows.count.zero_()
            return
        self._place(0, active)
        self._host_rows.idle_from(len(active))
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
        end = len(self._schedule.active)
        begin = end - len(admitted)
        self._place(begin, admitted)
        self._host_rows.send(self._device_rows, begin, end)
        logits = self._logits(hidden[send(torch.tensor(rank), self.device)])
        self._draw(logits, self._cut([row.request for row in admitted]), begin, end)
        for ids, at in leaders.items():
            self._schedule.remember(chosen[at], ids)

    def _prompt_hidden(self, rows: list[Row], prompts: list[tuple[int, ...]]) -> Tensor:
        """Hidden states [S, d] of each prompt's last token."""
        starts = [row.known for row in rows]
        lengths = [len(ids) - start for ids, start in zip(prompts, starts, strict=True)]
        pages = [row.pages for row in rows]
        layout: ExactLayout | PagedPrefill
        if self._exact is not None:
            layout = self._exact.prefill_layout(self.cache, pages, starts, lengths)
        else:
            layout = PagedPrefill(self.cache, self._kernels, pages, starts, lengths, self.device)
        ids = [t for p, start in zip(prompts, starts, strict=True) for t in p[start:]]
        fed = send(torch.from_numpy(np.array(ids, np.int64)), self.device)
        forward: Callable[..., Tensor] = self._forward  # each takes its own kind of layout
        hidden = forward(fed, layout.positions, layout)
        self.prefilled_tokens += len(ids)
        last = torch.tensor(lengths).cumsum(0) - 1
        return hidden[send(last, self.device)]

    def _draw(self, logits: Tensor, cut: CutRows | None, begin: int, end: int) -> None:
        rows = self._device_rows.rows(begin, end)
        if cut is None:
            self._kernels.sample(logits, rows, PAGE_SIZE)
        else:
            cut.draw(logits[: end - begin], rows, self._kernels, PAGE_SIZE)

    def _cut(self, requests: list[Request]) -> CutRows | None:
        return CutRows.of(
            [r.sampling for r in requests], self.device, exact=self._exact is not None
        )

    def _decode_layout(self, rows: RowState) -> ExactLayout | PagedDecode:
        if self._exact is None:
            return decode_layout(self.cache, self._kernels, rows)
        return self._exact.decode_layout(self.cache, rows)

    def _decode(self, steps: int) -> None:
        """`steps` tokens for every row, one after the other, without a look at them."""
        requests = [row.request for row in self._schedule.active]
        cut = self._cut(requests) if steps else None
        for _ in range(steps):
            logits = self._step.run(len(requests), draw=cut is None)
            if cut is not None:
                self._draw(logits, cut, 0, len(requests))

    # -- results -------------------------------------------------------------------------------

    def _read(self) -> _Drawn:
        """Wait for the device, and copy what it drew: the next chunk is written over it."""
        rows = self._device_rows.rows(0, len(self._schedule.active))
        tokens = rows.tokens_out.to("cpu", copy=True)
        log_probs = rows.log_probs_out.to("cpu", copy=True)
        return _Drawn(tokens, log_probs, rows.count.tolist(), rows.finished.tolist())

    def _take_up(self, drawn: _Drawn) -> None:
        tokens, log_probs = drawn.tokens.tolist(), drawn.log_probs.tolist()
        for index, row in enumerate(self._schedule.active):
            count, flag = drawn.counts[index], bool(drawn.finished[index])
            self._append(row, tokens[index][:count], log_probs[index], flag)

    def _retire(self) -> list[Request]:
        """Take out the finished."""
        active = self._schedule.active
        finished = self._schedule.retire()
        self._placed = [] if finished else [(id(row), len(row.pages)) for row in active]
        return finished

    def _append(self, row: Row, tokens: list[int], log_probs: list[float], flag: bool) -> None:
        request = row.request
        if row.careful:
            for token, log_prob in zip(tokens, log_probs, strict=False):
                request.token_ids.append(token)
                request.log_probs.append(log_prob)
                request.versions.append(self.version)
                request.stop_reason = self.rules.stop_reason(request)
                if request.stop_reason is not None:
                    return
            return
        request.token_ids += tokens
        request.log_probs += log_probs[: len(tokens)]
        request.versions += [self.version] * len(tokens)
        if flag or request.cancelled:
            request.stop_reason = self.rules.stop_reason(request)


def _cache_for(policy: PolicyModel, pages: int | None, *, wanted: int, share: float) -> PagedCache:
    """A cache of the policy's shape: `pages`, or as many of the `wanted` as its share of memory holds."""
    text = policy.lm.config.get_text_config()
    weight = next(policy.parameters())
    kv_heads, head_dim = key_shape(text)
    page_bytes = text.num_hidden_layers * 2 * kv_heads * PAGE_SIZE * head_dim * weight.itemsize
    return PagedCache(
        layers=text.num_hidden_layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        pages=pages
        or pages_for(wanted=wanted, bytes_per_page=page_bytes, share=share, device=weight.device),
        page_size=PAGE_SIZE,
        dtype=weight.dtype,
        device=weight.device,
    )
