"""Generates responses for a file of prompts, and saves each row when it has finished.

A response depends only on (seed, row, sample), so a resumed run writes the same file. With `search.url`, a
response is a conversation with a retrieval service.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hone.agents.agent_data import AgentData
from hone.agents.contract import default_sampling
from hone.agents.loop_thread import run_with_engine
from hone.agents.loops.search import STOPS, SearchConversation, retrieval_client
from hone.config.generation import GenerationConfig
from hone.config.rollout import SamplingConfig
from hone.controller.threads import set_thread_count
from hone.data.messages import PromptError
from hone.data.prompt_ids import render_prompt
from hone.data.prompts import row_uid
from hone.data.reading import read_rows
from hone.data.rows import BadRowPolicy, DataError, as_table
from hone.event_loop import run_coroutine
from hone.models.from_config import build_tokenizer
from hone.models.load import eos_ids, load_causal_lm
from hone.models.lora import AdapterSettings, merged_weights, wrap_lora
from hone.models.paths import resolve_model_path
from hone.models.policy import PolicyModel
from hone.rollout.build import build_rollout
from hone.rollout.contract import (
    RolloutEngine,
    RolloutError,
    RolloutSpec,
    Sampling,
    StopReason,
    TokenOutput,
    trajectory_seed,
)
from hone.tokenizer import Tokenizer
from hone.tracking import progress
from hone.tracking.console import Bar, screen
from hone.trainer.command_line import check_output_file
from hone.trainer.interrupt import GracefulStop
from hone.trainer.job_files import GenerationError, JobFiles, join_results
from hone.trainer.ranks import Ranks, sum_over_ranks
from hone.trainer.threads import resolve_threads
from hone.types import Fields, Row
from hone.workers.device import pick_device, pick_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HASHED_ROLLOUT_KEYS = (
    *(field.name for field in fields(SamplingConfig) if field.name != "seed"),
    "name", "exact", "dtype", "calculate_log_probs", "prompt_length", "response_length", "max_model_len",
)  # fmt: skip
"""Keys of the rollout block that affect the output."""
UNHASHED_DATA_KEYS = ("path", "output_path", "overwrite", "batch_size", "max_samples")
"""Keys of the data block that do not affect the output; the hash of the job includes the rows themselves."""


def build_engine(
    config: GenerationConfig,
    tokenizer: Tokenizer,
    ranks: Ranks,
    check_model: Callable[[PreTrainedModel], None] = lambda lm: None,
) -> RolloutEngine:
    """Builds the rollout engine of a generation config; `check_model` is called with the loaded model."""
    config, threads = resolve_threads(config, ranks.local_world_size, warn=ranks.is_first)
    model = config.model
    set_thread_count(threads)
    device = pick_device(config.trainer.device, ranks.local_rank)
    dtype = pick_dtype(config.rollout.dtype, device)
    # vLLM and SGLang have their own copy of the weights on the device.
    has_own_weights = config.rollout.name in ("vllm", "sglang")
    lm_device = torch.device("cpu") if has_own_weights else device
    lm = load_causal_lm(model.path, dtype=dtype, device=lm_device)
    check_model(lm)
    policy = PolicyModel(lm.eval())
    eos_token_ids = eos_ids(policy.lm.config, policy.lm.generation_config, tokenizer)
    if model.lora_adapter_path:
        # Rank, alpha, dropout and modules are read from the adapter's folder.
        settings = AdapterSettings(0, 0.0, 0.0, (), adapter_path=model.lora_adapter_path)
        policy.lm = wrap_lora(policy.lm, settings)
    policy.requires_grad_(False).eval()
    spec = RolloutSpec(
        config.rollout,
        model_path=model.path,
        load_policy=lambda: policy.to(device),
        dtype=dtype,
        device=device,
        tokenizer=tokenizer,
        eos_ids=tuple(eos_token_ids),
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    if model.lora_adapter_path:
        spec = replace(spec, current_weights=lambda: merged_weights(policy.lm))
    return build_rollout(spec)


def max_positions(lm: PreTrainedModel) -> int | None:
    """Returns the maximum sequence length of a model; None if the config does not limit the length."""
    config = lm.config.get_text_config()
    max_length: int | None = getattr(config, "max_position_embeddings", None)
    return max_length


def sampling_params(
    params: Fields, n: int, *, seed: int, uid: str, max_tokens: int
) -> list[Sampling]:
    """Returns the sampling parameters of each of the `n` responses to a prompt."""
    seeds = (trajectory_seed(seed, uid, sample) for sample in range(n))
    return [Sampling.from_mapping(params, max_tokens=max_tokens, seed=s) for s in seeds]


async def respond(
    generate: Callable[[list[int], Sampling, str], Awaitable[TokenOutput]],
    prompts: Sequence[list[int]],
    get_sampling_params: Callable[[int], list[Sampling]],
    on_finish: Callable[[int, list[TokenOutput]], None],
    *,
    prompt_name: Callable[[int], str],
    max_in_flight: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Generates the responses to all prompts, at most `max_in_flight` prompts at a time.

    The callbacks receive the index of a prompt. `get_sampling_params` returns one item per response,
    `on_finish` also receives the responses, and `prompt_name` names the prompt in error messages. After
    `should_stop` has returned True, no prompt is started.
    """
    slots = asyncio.Semaphore(max_in_flight)

    async def generate_prompt(index: int, ids: list[int]) -> None:
        async with slots:
            if should_stop():
                return
            requests = enumerate(get_sampling_params(index))
            try:
                outputs = await asyncio.gather(
                    *(generate(ids, sampling, f"{index}/{i}") for i, sampling in requests)
                )
            except RolloutError as error:
                raise RolloutError(f"{prompt_name(index)}: {error}") from error
        on_finish(index, list(outputs))

    tasks = [asyncio.create_task(generate_prompt(index, ids)) for index, ids in enumerate(prompts)]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise


class Generation:
    """Generates the rows of one rank of `hone generate`."""

    def __init__(self, config: GenerationConfig, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        data, seed = config.data, config.rollout.seed
        self.output = Path(data.output_path).expanduser()
        if self.output.suffix not in (".parquet", ".jsonl"):
            raise GenerationError(
                f"data.output_path={data.output_path} must end in .parquet or .jsonl"
            )
        self.rows = read_rows(data.path, BadRowPolicy("raise", policy_key=None), "data.path")
        inputs = [file.path for file in self.rows.files]
        check_output_file(data.output_path, "data.output_path", inputs)
        self.num_rows = len(self.rows)
        if data.max_samples > 0:
            self.num_rows = min(self.num_rows, data.max_samples)
        if self.output.suffix == ".parquet":
            self._check_columns()
        self.tokenizer = build_tokenizer(config.model)
        self._seed = config.trainer.seed if seed is None else seed
        self.files = JobFiles(self.output, self._job_hash(), ranks.rank)

    def _check_columns(self) -> None:
        """Raises an error before generation if the rows have columns that parquet cannot store."""
        rows = islice(self.rows.scan(), self.num_rows)
        try:
            as_table([join_results(row, {}) for row in rows])
        except DataError as error:
            jsonl_file = self.output.with_suffix(".jsonl")
            raise DataError(
                f"{error}, or write a JSONL file: data.output_path={jsonl_file}"
            ) from error

    def run(self) -> Path:
        """Generates the missing rows, then writes the output in row order."""
        files = self.files
        print_line = screen().line if self.ranks.is_first else lambda line: None
        if files.is_done(overwrite=self.config.data.overwrite):
            print_line(f"{self.output} is already complete; delete it to generate it again")
            return self.output
        if self.output.exists():
            print_line(f"{self.output} is not from this job; it will be replaced (data.overwrite)")
        if self.ranks.is_first:
            files.warn_about_other_jobs()
        self.ranks.barrier()
        columns_by_row = files.finished_columns()
        self.ranks.barrier()  # no rank may write before all have read the same list
        missing_indices = [index for index in range(self.num_rows) if index not in columns_by_row]
        rank_indices = missing_indices[self.ranks.rank :: self.ranks.world_size]
        with GracefulStop("stopping when the started responses have ended; all are kept") as stop:
            if rank_indices:
                self._generate_rows(rank_indices, stop)
            stop.sync_ranks(sum_over_ranks)
            stop.raise_if_requested(len(columns_by_row))
        if self.ranks.is_first:
            columns_by_row = files.finished_columns()
            indices = range(self.num_rows)
            files.write([join_results(self.rows[i], columns_by_row[i]) for i in indices])
        print_line(f"wrote {self.output}")
        return self.output

    def _generate_rows(self, indices: list[int], stop: GracefulStop) -> None:
        """Generates the rows of these indices, and saves each row when it has finished."""
        config, is_only_rank = self.config, self.ranks.world_size == 1
        prompts = [self._prompt_ids(index) for index in indices]

        def check_model(lm: PreTrainedModel) -> None:
            self._check_max_length(indices, prompts, max_positions(lm))

        engine = build_engine(config, self.tokenizer, self.ranks, check_model)
        # A single rank also shows the rows that an earlier run has finished.
        num_bar_rows = self.num_rows if is_only_rank else len(indices)
        bar = progress("generate", num_bar_rows)
        num_tokens, start = 0, time.perf_counter()
        with bar if self.ranks.is_first else nullcontext(Bar("generate")) as rank_bar:
            rank_bar.update(num_bar_rows - len(indices))

            def on_finish(prompt_index: int, outputs: list[TokenOutput]) -> None:
                nonlocal num_tokens
                self.files.append(indices[prompt_index], self._output_columns(outputs))
                num_tokens += sum(len(output.token_ids) for output in outputs)
                rate = num_tokens / max(time.perf_counter() - start, 1e-9)
                rank_bar.advance(note=f"{rate:,.0f} tokens/s")

            generation = respond(
                partial(self._generate_response, engine),
                prompts,
                lambda i: self._sampling_params(indices[i], len(prompts[i])),
                on_finish,
                prompt_name=lambda i: self.rows.where(indices[i]),
                max_in_flight=config.data.batch_size,
                should_stop=lambda: stop.is_requested,
            )
            try:
                run_with_engine(engine, generation)
            finally:
                run_coroutine(engine.close())

    async def _generate_response(
        self, engine: RolloutEngine, ids: list[int], sampling: Sampling, request_id: str
    ) -> TokenOutput:
        """Generates one response; with `search.url`, all turns of a conversation and their search results."""
        search, rollout = self.config.search, self.config.rollout
        if search.url is None:
            return await engine.generate(ids, sampling, request_id)
        agent_data = AgentData([], list(ids), request_id, {})
        stop_strings = (*sampling.stop, *STOPS)

        async def generate(prompt_ids: list[int], max_tokens: int) -> TokenOutput:
            max_tokens = min(sampling.max_tokens, max_tokens)
            turn_sampling = replace(sampling, max_tokens=max_tokens, stop=stop_strings)
            return await engine.generate(prompt_ids, turn_sampling, request_id)

        await SearchConversation(
            self.tokenizer,
            retrieval_client(search.url, search.topk, search.timeout_s, search.retries),
            rollout.response_limit(len(ids)),
            search.max_turns + 1,  # the answer follows the last search
            search.max_obs_length,
        ).run(agent_data, generate)
        response_ids = agent_data.prompt_ids[len(ids) :]
        stop_reason = StopReason(agent_data.stop_reason)
        return TokenOutput(
            response_ids, agent_data.response_logprobs, agent_data.versions, stop_reason
        )

    def _prompt_ids(self, index: int) -> list[int]:
        """Returns the prompt of a row as token ids; raises an error if the prompt is too long."""
        row, data = self.rows[index], self.config.data
        max_tokens = self.config.rollout.prompt_length
        if data.prompt_key not in row:
            raise DataError(
                f"{self.rows.where(index)} has no column {data.prompt_key!r} "
                f"(data.prompt_key); it has {', '.join(row)}"
            )
        try:
            ids = render_prompt(
                row[data.prompt_key],
                self.tokenizer,
                data.prompt_format,
                template_kwargs=data.apply_chat_template_kwargs,
                max_tokens=max_tokens,
            )
        except PromptError as error:
            raise DataError(f"{self.rows.where(index)}: {error}") from error
        if not 0 < len(ids) <= max_tokens or len(ids) >= self.config.rollout.max_total_tokens:
            raise DataError(
                f"{self.rows.where(index)} has {len(ids)} prompt tokens; it must have 1 to {max_tokens} "
                "(rollout.prompt_length), and fewer than rollout.max_model_len if that is set"
            )
        return ids

    def _check_max_length(
        self, indices: Sequence[int], prompts: Sequence[list[int]], max_length: int | None
    ) -> None:
        """Raises an error if the longest prompt and its response exceed the model's maximum length."""
        index, ids = max(zip(indices, prompts, strict=True), key=lambda pair: len(pair[1]))
        response_tokens = self._sampling_params(index, len(ids))[0].max_tokens
        if self.config.search.url:  # all turns of a search share the response limit
            response_tokens = self.config.rollout.response_limit(len(ids))
        total_tokens = len(ids) + response_tokens
        if max_length is None or total_tokens <= max_length:
            return
        prefix = f"{self.rows.where(index)} has {len(ids)} prompt tokens"
        remaining_tokens = max_length - len(ids)
        if remaining_tokens <= 0:
            raise GenerationError(
                f"{prefix}, but the model has {max_length} positions; leave this row out, or take "
                "another model"
            )
        raise GenerationError(
            f"{prefix} and may reach {total_tokens} with "
            f"rollout.response_length={self.config.rollout.response_length}, but the model has "
            f"{max_length} positions; set rollout.response_length={remaining_tokens}, or "
            f"rollout.max_model_len={max_length} to truncate only the responses to long prompts"
        )

    def _sampling_params(self, index: int, prompt_tokens: int) -> list[Sampling]:
        """Returns the sampling parameters of each response to the prompt of a row."""
        rollout = self.config.rollout
        return sampling_params(
            default_sampling(rollout),
            self.config.data.n_samples,
            seed=self._seed,
            uid=row_uid(*self.rows.key(index), 0, 0),
            max_tokens=rollout.response_limit(prompt_tokens),
        )

    def _output_columns(self, outputs: Sequence[TokenOutput]) -> Row:
        """Returns the columns that the responses add to a row."""
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

    def _job_hash(self) -> str:
        """Returns a hash of everything that affects the responses: rows, model and sampling."""
        model, rollout, data = self.config.model, self.config.rollout, asdict(self.config.data)
        folders = [resolve_model_path(path) for path in (model.path, model.tokenizer_path) if path]
        settings = {
            "rows": [self.rows.fingerprint, self.num_rows],
            "model": [asdict(model), *map(_file_stats, (*folders, model.lora_adapter_path))],
            "sampling": {name: getattr(rollout, name) for name in HASHED_ROLLOUT_KEYS},
            "data": {name: value for name, value in data.items() if name not in UNHASHED_DATA_KEYS},
            "seed": self._seed,
        }
        if self.config.search.url is not None:
            settings["search"] = asdict(self.config.search)
        if engine_kwargs := rollout.engine_kwargs.get(rollout.name):  # such as quantization
            settings["engine_kwargs"] = dict(engine_kwargs)
        text = json.dumps(settings, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _file_stats(path: str | None) -> tuple[str | None, list[tuple[str, int, int]]]:
    """Returns the path of a folder, and the name, size and modification time of each file in it.

    These values stand for the content of the files, which would take minutes to hash.
    """
    if path is None or not Path(path).is_dir():
        return path, []
    files = [(file.name, file.stat()) for file in Path(path).iterdir() if file.is_file()]
    stats = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)
    return str(Path(path).resolve()), stats
