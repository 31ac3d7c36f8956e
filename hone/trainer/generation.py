"""Responses for a file of prompts: every row's samples appended as they end, one file at the end.

What is drawn depends on (seed, row, sample) only, so a killed run that resumes writes the same file.
Each response is one completion, or with `search.url` a conversation with a retrieval service.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from hone.agents.agent_data import AgentData
from hone.agents.loop_thread import run_beside
from hone.agents.loops.search import STOPS, SearchConversation, client_of
from hone.config.generation import GenerationConfig
from hone.config.rollout import SamplingConfig
from hone.controller.threads import fix_threads
from hone.data.loader import row_uid
from hone.data.prompts import PromptError, render_prompt
from hone.data.rows import (
    BadRows,
    DataError,
    Row,
    RowStore,
    as_table,
    read_rows,
)
from hone.event_loop import run_coroutine
from hone.models.from_config import build_tokenizer
from hone.models.load import eos_ids, load_causal_lm, resolve_model_path
from hone.models.lora import wrap_lora
from hone.models.policy import PolicyModel
from hone.ops.counter_rng import trajectory_seed
from hone.rollout.build import build_rollout
from hone.rollout.contract import (
    RolloutEngine,
    RolloutError,
    RolloutSpec,
    Sampling,
    StopReason,
    TokenOutput,
)
from hone.tokenizer import Tokenizer
from hone.tracking import progress
from hone.tracking.console import Bar, screen
from hone.trainer.generated import GenerationError, Output, Parts, files_of
from hone.trainer.interrupt import GracefulStop
from hone.trainer.ranks import Ranks, sum_over_ranks
from hone.trainer.threads import resolve_threads
from hone.workers.device import pick_device, pick_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Generation:
    """One `hone generate`, as one rank of it."""

    def __init__(self, config: GenerationConfig, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.output = Path(config.data.output_path).expanduser()
        if self.output.suffix not in (".parquet", ".jsonl"):
            raise GenerationError(
                f"data.output_path={config.data.output_path} must end in .parquet or .jsonl"
            )
        bad = BadRows("raise", skip_key=None)
        self.rows: RowStore = read_rows(config.data.path, bad, "data.path")
        self.count = len(self.rows)
        if config.data.max_samples > 0:
            self.count = min(self.count, config.data.max_samples)
        if self.output.suffix == ".parquet":
            self._check_columns()
        self.tokenizer = build_tokenizer(config.model)
        job = self._job()
        self.parts = Parts(self.output, job, ranks.rank)
        self._file = Output(self.output, job)

    def _check_columns(self) -> None:
        """What could not be written at the end stops the run before it begins."""
        new = self._columns([])
        rows = [
            {name: value for name, value in row.items() if name not in new}
            for row in islice(self.rows.scan(), self.count)
        ]
        try:
            as_table(rows)
        except DataError as error:
            other = self.output.with_suffix(".jsonl")
            raise DataError(
                f"{error}, or write them as they are: data.output_path={other}"
            ) from error

    def run(self) -> Path:
        """Generate what is missing, then write the output in the order of the rows."""
        if self._file.is_done(may_replace=self.config.data.overwrite):
            self._say(f"{self.output} is done already; remove it to generate it again")
            return self.output
        if self.output.exists():
            self._say(f"{self.output} is not from this job; it will be replaced (data.overwrite)")
        if self.ranks.is_first:
            self.parts.name_others()
        self.ranks.wait_for_all()
        done = self.parts.finished()
        self.ranks.wait_for_all()  # all have read before anyone writes: they share out one list
        todo = [i for i in range(self.count) if i not in done]
        mine = todo[self.ranks.rank :: self.ranks.world_size]
        with GracefulStop("stopping when the started responses have ended; all are kept") as stop:
            if mine:
                self._generate(mine, stop)
            stop.agree(sum_over_ranks)  # every rank is here
            stop.raise_if_requested(len(done))
        if self.ranks.is_first:
            self._write()
        self._say(f"wrote {self.output}")
        return self.output

    def _say(self, text: str) -> None:
        if self.ranks.is_first:
            screen().line(text)

    def _generate(self, rows: list[int], stop: GracefulStop) -> None:
        prompts = self._prompts(rows)
        engine = build_engine(
            self.config, self.tokenizer, self.ranks, lambda lm: self._check_positions(prompts, lm)
        )
        alone = self.ranks.world_size == 1
        with self._bar(self.count if alone else len(rows)) as bar:
            bar.update(self.count - len(rows) if alone else 0)
            try:
                run_beside(engine, self._generate_all(engine, prompts, _Meter(bar), stop))
            finally:
                run_coroutine(engine.close())

    def _bar(self, total: int) -> AbstractContextManager[Bar]:
        """Of several ranks the first shows its own share; the others count in silence."""
        if self.ranks.is_first:
            return progress("generate", total)
        return nullcontext(Bar("generate", total, lambda _: None))

    def _prompts(self, rows: list[int]) -> list[tuple[int, list[int]]]:
        """Row number and token ids; a prompt that does not fit stops the run before it begins."""
        data, longest = self.config.data, self.config.rollout.prompt_length
        found = []
        for number in rows:
            row = self.rows[number]
            if data.prompt_key not in row:
                raise DataError(
                    f"{self.rows.where(number)} has no column {data.prompt_key!r} "
                    f"(data.prompt_key); it has {', '.join(row)}"
                )
            try:
                ids = render_prompt(
                    row[data.prompt_key],
                    self.tokenizer,
                    data.prompt_format,
                    template_kwargs=data.apply_chat_template_kwargs,
                    max_tokens=longest,
                )
            except PromptError as error:
                raise DataError(f"{self.rows.where(number)}: {error}") from error
            if not 0 < len(ids) <= longest or len(ids) >= self.config.rollout.max_total_tokens:
                raise DataError(
                    f"{self.rows.where(number)} has {len(ids)} prompt tokens; 1 to {longest} fit "
                    "(rollout.prompt_length, and below rollout.max_model_len where that is set)"
                )
            found.append((number, ids))
        return found

    def _check_positions(
        self, prompts: Sequence[tuple[int, list[int]]], lm: PreTrainedModel
    ) -> None:
        """The longest prompt and its response must fit the model, before anything is drawn."""
        positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
        number, ids = max(prompts, key=lambda prompt: len(prompt[1]))
        reach = len(ids) + next(self._samplings(number, len(ids))).max_tokens
        if positions is None or reach <= positions:
            return
        where, room = self.rows.where(number), positions - len(ids)
        if room <= 0:
            raise GenerationError(
                f"{where} has {len(ids)} prompt tokens, but the model has {positions} positions; "
                "leave this row out, or take another model"
            )
        raise GenerationError(
            f"{where} has {len(ids)} prompt tokens and may reach {reach} with "
            f"rollout.response_length={self.config.rollout.response_length}, but the model has "
            f"{positions} positions; set rollout.response_length={room}, or "
            f"rollout.max_model_len={positions} to cut only the responses to long prompts"
        )

    async def _generate_all(
        self,
        engine: RolloutEngine,
        prompts: Sequence[tuple[int, list[int]]],
        meter: _Meter,
        stop: GracefulStop,
    ) -> None:
        """`data.batch_size` prompts in flight; a row is written when its last sample ends."""
        slots = asyncio.Semaphore(self.config.data.batch_size)

        async def one(number: int, ids: list[int]) -> None:
            requests = enumerate(self._samplings(number, len(ids)))
            async with slots:
                if stop.requested:
                    return
                try:
                    outputs = await asyncio.gather(
                        *(
                            self._respond(engine, ids, sampling, f"{number}/{i}")
                            for i, sampling in requests
                        )
                    )
                except RolloutError as error:
                    raise RolloutError(f"{self.rows.where(number)}: {error}") from error
            self.parts.append(number, self._columns(outputs))
            meter.row(sum(len(output.token_ids) for output in outputs))

        tasks = [asyncio.create_task(one(number, ids)) for number, ids in prompts]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise

    async def _respond(
        self, engine: RolloutEngine, ids: list[int], sampling: Sampling, request_id: str
    ) -> TokenOutput:
        search, rollout = self.config.search, self.config.rollout
        if search.url is None:
            return await engine.generate(ids, sampling, request_id)
        talk = AgentData([], list(ids), request_id, {})
        stops = (*sampling.stop, *STOPS)

        async def generate(prompt_ids: list[int], room: int) -> TokenOutput:
            turn = replace(sampling, max_tokens=min(sampling.max_tokens, room), stop=stops)
            return await engine.generate(prompt_ids, turn, request_id)

        await SearchConversation(
            self.tokenizer,
            client_of(search.url, search.topk, search.timeout_s, search.retries),
            min(rollout.response_length, rollout.max_total_tokens - len(ids)),
            search.max_turns + 1,
            search.max_obs_length,
        ).run(talk, generate)
        reason = StopReason(talk.stop_reason)
        return TokenOutput(
            talk.prompt_ids[len(ids) :], talk.response_logprobs, talk.versions, reason
        )

    @property
    def _seed(self) -> int:
        own = self.config.rollout.seed
        return own if own is not None else self.config.trainer.seed

    def _samplings(self, number: int, prompt_tokens: int) -> Iterator[Sampling]:
        rollout = self.config.rollout
        name, row = self.rows.key(number)
        uid = row_uid(name, row, 0, 0)
        longest = min(rollout.response_length, rollout.max_total_tokens - prompt_tokens)
        for index in range(self.config.data.n_samples):
            yield Sampling(
                max_tokens=min(longest, rollout.max_tokens_per_turn or longest),
                temperature=rollout.temperature if rollout.do_sample else 0.0,
                seed=trajectory_seed(self._seed, uid, index),
                top_k=rollout.top_k if rollout.top_k > 0 else -1,
                top_p=rollout.top_p,
                min_p=rollout.min_p,
                stop=(rollout.stop,) if isinstance(rollout.stop, str) else tuple(rollout.stop),
                stop_token_ids=tuple(rollout.stop_token_ids),
                ignore_eos=rollout.ignore_eos,
            )

    def _columns(self, outputs: Sequence[TokenOutput]) -> Row:
        columns: Row = {
            "responses": [
                self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
                for output in outputs
            ],
            "response_lengths": [len(output.token_ids) for output in outputs],
            "stop_reasons": [output.stop_reason.value for output in outputs],
        }
        if self.config.rollout.calculate_log_probs:
            columns["log_probs"] = [list(output.log_probs) for output in outputs]
        return columns

    def _write(self) -> None:
        done = self.parts.finished()
        self._file.write([{**self.rows[i], **done[i]} for i in range(self.count)])
        self.parts.remove()

    def _job(self) -> str:
        """What decides the responses: rows, model, sampling. Another of these is another job."""
        config, rollout, model = self.config, asdict(self.config.rollout), self.config.model
        names = [field.name for field in fields(SamplingConfig)] + _DECIDES
        data = asdict(config.data)
        for name in _DECIDES_NOTHING:
            del data[name]
        models = [resolve_model_path(path) for path in (model.path, model.tokenizer_path) if path]
        facts = {
            "rows": [self.rows.fingerprint, self.count],
            "model": [
                asdict(model),
                [files_of(path) for path in (*models, model.lora_adapter_path)],
            ],
            "sampling": {name: rollout[name] for name in names if name != "seed"},
            "data": data,
            "seed": self._seed,
        }
        if config.search.url is not None:
            facts["search"] = asdict(config.search)
        text = json.dumps(facts, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def build_engine(
    config: GenerationConfig,
    tokenizer: Tokenizer,
    ranks: Ranks,
    check: Callable[[PreTrainedModel], None] = lambda lm: None,
) -> RolloutEngine:
    """The engine of a generation tree, over the model that it names; `check` sees the loaded model first."""
    config, threads = resolve_threads(config, ranks.local_world_size, tells=ranks.is_first)
    model = config.model
    fix_threads(threads)
    device = pick_device(config.trainer.device, ranks.local_rank)
    dtype = pick_dtype(config.rollout.dtype, device)
    lm = load_causal_lm(model.path, dtype=dtype, device=device)
    check(lm)
    policy = PolicyModel(lm.to(device).eval())
    ends = eos_ids(policy.lm.config, policy.lm.generation_config, tokenizer)
    if model.lora_adapter_path:
        policy.lm = wrap_lora(
            policy.lm,
            rank=0,
            alpha=0.0,
            dropout=0.0,
            target_modules=(),
            exclude_modules=None,
            adapter_path=model.lora_adapter_path,
        )
    policy.requires_grad_(False).eval()
    return build_rollout(
        RolloutSpec(
            config.rollout,
            model_path=model.path,
            load_policy=lambda: policy,
            dtype=dtype,
            device=device,
            tokenizer=tokenizer,
            eos_ids=tuple(ends),
        )
    )


_DECIDES = [
    *("name", "exact", "dtype", "calculate_log_probs"),
    *("prompt_length", "response_length", "max_model_len"),
]
"""Keys of the rollout block, beside the sampling's, on which the output depends."""
_DECIDES_NOTHING = ("path", "output_path", "overwrite", "batch_size", "max_samples")
"""Keys of the data block on which it does not: the rows themselves are told by a hash."""


class _Meter:
    """Tokens a second beside the bar."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._tokens = 0
        self._started = time.perf_counter()

    def row(self, tokens: int) -> None:
        self._tokens += tokens
        rate = self._tokens / max(time.perf_counter() - self._started, 1e-9)
        self._bar.advance(note=f"{rate:,.0f} tokens/s")
