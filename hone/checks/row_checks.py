"""Checks the columns, scorers and prompt lengths of a run's rows before models load."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hone.agents.contract import LOOPS
from hone.agents.loop_names import LoopNames
from hone.columns import COLUMNS, REWARD_PARTS, declaration, is_data_column, reward_column
from hone.config import PPOTrainerConfig
from hone.data.dataset import RLHFDataset
from hone.data.loader import Dataset
from hone.data.messages import PromptError, PromptTooLong
from hone.data.prompts import SINGLE_TURN_AGENT
from hone.data.rows import DataError
from hone.plugins import PluginError
from hone.rewards.managers.rule import AbstractRewardManager, RuleRewardManager
from hone.rewards.scores.table import UnknownSourceError
from hone.rewards.trial import TrialRow, Verdict, try_scorer
from hone.rollout.build import ENGINES
from hone.tracking import atomic_write_text
from hone.types import Function, Row

MODEL_STYLE = "reward_model.style=model"
MAX_SOURCES = 16
"""Scorers are tried for at most this many data sources, on three rows of each source."""
PROMPTS_PER_PROGRESS_UPDATE = 256
"""The number of prompts between two updates of the progress bar."""
MAX_OVERLONG_PROMPTS = 256
"""With `data.truncation=error`, measuring ends after so many prompts that stop the run."""


def check_rows(
    reward_fn: Function, dataset: Dataset | None, config: PPOTrainerConfig, hint: str = ""
) -> None:
    """Checks columns, media, agent loops and scorers of rows; `hint` ends the error of a missing scorer."""
    if not isinstance(dataset, RLHFDataset):
        return
    loops = LoopNames(config.actor_rollout_ref.rollout)
    check_columns(dataset, config.data.prompt_key)
    valid_names: set[str | None] = set()
    for position, kind in dataset.facts.first_of_each_kind(dataset.positions):
        if kind.agent_name in valid_names:
            continue
        try:  # a row may name a configured loop, never an import path
            loops.name_of_row(kind.agent_name)
        except PluginError as error:
            raise DataError(f"{dataset.store.where(position)}: {error}") from error
        valid_names.add(kind.agent_name)
    check_media(dataset, config, default_loop=loops.default)
    try:
        check_sources(reward_fn, dataset, loops.default, has_model=config.reward_model.enable)
    except UnknownSourceError as error:
        raise UnknownSourceError(f"{error}{hint}") from error


def check_media(dataset: RLHFDataset, config: PPOTrainerConfig, *, default_loop: str) -> None:
    """Raises an error for rows with images, videos or audio, which built-in engines and loops do not read."""
    custom_engine = not ENGINES.is_built_in(config.actor_rollout_ref.rollout.name)
    for position, kind in dataset.facts.first_of_each_kind(dataset.positions):
        custom_loop = not LOOPS.is_built_in(kind.agent_name or default_loop)
        if kind.media is not None and not (custom_engine and custom_loop):
            raise DataError(
                f"{dataset.store.where(position)}: column {kind.media!r} is not empty, but the built-in "
                "rollout engines and agent loops only read text; remove such rows or the column, or "
                "configure your own agent loop and rollout engine"
            )


def check_columns(dataset: RLHFDataset, prompt_key: str) -> None:
    """Raises an error if the data have a column that the training loop writes."""
    parts = map(reward_column, REWARD_PARTS)
    names = [name for name in (*COLUMNS, *parts) if name != prompt_key]
    reserved_columns = [name for name in names if not is_data_column(name)]
    for file, first_rows in zip(dataset.store.files, dataset.facts.first_rows, strict=True):
        found = [(first_rows[name], name) for name in reserved_columns if name in first_rows]
        if found:
            index, name = min(found, key=lambda item: item[0])
            column = declaration(name)
            assert column is not None
            raise DataError(
                f"{file.where(index)}: column {name!r} is reserved: phase {column.phase!r} writes it "
                f"({column.meaning}); rename it in the file, or move it into extra_info"
            )


def check_sources(
    reward_fn: Function, dataset: RLHFDataset, default_loop: str, *, has_model: bool
) -> None:
    """Raises an error if a row of the single-turn agent loop has no scorer."""
    if not isinstance(reward_fn, RuleRewardManager):
        return
    facts = dataset.facts_by_source(reward_fn.reward_fn_key)
    checked_positions: list[int] = []

    def rows() -> Iterator[Row]:
        for position, kind in facts.first_of_each_kind(dataset.positions):
            if (kind.agent_name or default_loop) != SINGLE_TURN_AGENT:
                continue  # no rule scores this row
            if kind.has_model_style and reward_fn.uses_table and not has_model:
                raise DataError(
                    f"{dataset.store.where(position)}: {MODEL_STYLE}, but this run has no reward model; "
                    "use reward_model.enable=true with a reward_model.model.path or "
                    "reward_model.server.url, your own score function, or style rule"
                )
            checked_positions.append(position)
            yield dataset.store[position]

    reward_fn.check_rows(rows(), lambda index: dataset.store.where(checked_positions[index]))


def routes_by_style(config: PPOTrainerConfig, train: Dataset, val: Dataset | None) -> bool:
    """Returns whether the reward model scores only the rows of style `model`, and the rule the others."""
    model = config.reward_model
    if not model.enable or model.type in ("prm", "prime") or model.route_by_style is False:
        return False
    datasets = [dataset for dataset in (train, val) if dataset is not None]
    rl_datasets = [dataset for dataset in datasets if isinstance(dataset, RLHFDataset)]
    for dataset in rl_datasets:
        kinds = dataset.facts.first_of_each_kind(dataset.positions)
        if any(kind.has_model_style for _, kind in kinds):
            return True
    if model.route_by_style and len(rl_datasets) == len(datasets):
        raise DataError(
            f"reward_model.route_by_style=true, but no row has {MODEL_STYLE}, so the reward model would "
            "score nothing; write the style into the rows, or use route_by_style=null"
        )
    return bool(model.route_by_style)


def try_scorers(
    manager: AbstractRewardManager, dataset: Dataset, config: PPOTrainerConfig
) -> Iterator[Verdict]:
    """Calls each scorer on a few rows, and yields verdicts on the scorers and on missing ground truths."""
    if not isinstance(manager, RuleRewardManager) or not isinstance(dataset, RLHFDataset):
        return
    source_key, default_loop = manager.reward_fn_key, config.actor_rollout_ref.rollout.default_loop
    candidate_positions: dict[str, list[int]] = {}
    positions_without_truth: dict[str, list[int]] = {}
    unscorable_positions: list[int] = []
    store, num_rows = dataset.store, 0
    for position, kind in dataset.facts_by_source(source_key).of_rows(dataset.positions):
        is_single_turn = (kind.agent_name or default_loop) == SINGLE_TURN_AGENT
        if is_single_turn and not kind.has_model_style and manager.has_scorer_for(kind.source):
            if not kind.has_truth and manager.lacks_ground_truth(kind.source, None):
                unscorable_positions.append(position)
            num_rows += 1
            by_source = candidate_positions if kind.has_truth else positions_without_truth
            by_source.setdefault(kind.source, []).append(position)
    for source, positions in positions_without_truth.items():
        # With a reward model, rows without a ground truth are tried only if no row of the source has one.
        if not manager.skips_rows_without_truth:
            candidate_positions[source] = sorted([*candidate_positions.get(source, ()), *positions])
        elif not manager.lacks_ground_truth(source, None):
            candidate_positions.setdefault(source, positions)
    keys = source_key, config.data.prompt_key
    for positions in list(candidate_positions.values())[:MAX_SOURCES]:
        trial_positions = {positions[0], positions[len(positions) // 2], positions[-1]}
        rows = [
            TrialRow.of(store[position], store.where(position), *keys)
            for position in sorted(trial_positions)
        ]
        yield try_scorer(manager, rows)
    if unscorable_positions:
        problem = (
            f"{len(unscorable_positions):,} of {num_rows:,} rows have no reward_model.ground_truth to "
            f"compare with (the first: {store.where(unscorable_positions[0])})"
        )
        policy = manager.failure_policy
        if manager.skips_rows_without_truth:
            yield Verdict(warning=f"{problem}: only the reward model scores them")
        elif policy.on_failure == "raise":
            yield Verdict(problem=f"{problem}; write them, or leave these rows out")
        else:
            yield Verdict(warning=f"{problem}: each scores {policy.failure_score:g}")


@dataclass(frozen=True)
class PromptLengths:
    """Prompt lengths in tokens, over the rows of a data set."""

    rows: int
    """The number of measured rows: all, unless so many prompts were too long that measuring ended."""
    shortest: int
    longest: int
    """A lower bound if the prompt is far above the limit."""
    too_long: int
    """The number of prompts longer than `data.max_prompt_length`."""
    where: str
    """The file and row of the longest prompt."""


def measure_prompts(dataset: RLHFDataset, *, advance: Callable[[int], None]) -> PromptLengths:
    """Measures the length of every prompt, or reads the cached result; `advance` moves the progress bar."""
    cache_file = _cache_file(dataset)
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        cached = json.loads(cache_file.read_text())
        # The file may have moved, so the cache has the position of the longest prompt.
        return PromptLengths(**cached["lengths"], where=dataset.where(cached["longest_position"]))
    max_length = dataset.settings.max_prompt_length
    refuses_overlong = dataset.settings.truncation == "error"
    lengths: list[int] = []
    too_long = 0
    for index, length in enumerate(dataset.prompt_lengths()):
        if isinstance(length, PromptTooLong):
            length = 2 * max_length + 65  # a lower bound: `truncate` tokenises no further
        elif isinstance(length, PromptError):
            raise DataError(f"{dataset.where(index)}: {length}") from length
        lengths.append(length)
        too_long += length > max_length
        if refuses_overlong and too_long == MAX_OVERLONG_PROMPTS:
            break
        if index % PROMPTS_PER_PROGRESS_UPDATE == PROMPTS_PER_PROGRESS_UPDATE - 1:
            advance(PROMPTS_PER_PROGRESS_UPDATE)
    statistics = {
        "rows": len(lengths),
        "shortest": min(lengths),
        "longest": max(lengths),
        "too_long": too_long,
    }
    longest_position = lengths.index(max(lengths))
    if len(lengths) == len(dataset):
        with contextlib.suppress(OSError):  # without the cache the next run is only slower
            content = {"lengths": statistics, "longest_position": longest_position}
            atomic_write_text(cache_file, json.dumps(content))
    return PromptLengths(**statistics, where=dataset.where(longest_position))


def _cache_file(dataset: RLHFDataset) -> Path:
    """Returns the cache file, named by a hash of rows, tokenizer and all settings that affect lengths."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    tokenizer, config = dataset.tokenizer, dataset.settings
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added_text = ""  # changes with what tool agent loops add to prompts
    if dataset.prompt_builder is not None:
        loop_names = sorted(name for name in dataset.facts.agent_names() if name is not None)
        rows = ({"agent_name": name, dataset.prompt_key: "a"} for name in (None, *loop_names))
        added_text = repr([dataset.prompt_builder(row) for row in rows])
    parts = (
        dataset.fingerprint,
        backend.to_str() if backend is not None else repr(tokenizer),
        str(getattr(tokenizer, "chat_template", None)),
        repr(config.apply_chat_template_kwargs),
        json.dumps(dataset.tools, sort_keys=True, default=str),
        added_text,
        config.prompt_key,
        config.prompt_format,
        str(config.max_prompt_length),
    )
    digest = hashlib.blake2b("\0".join(parts).encode("utf-8", "replace"), digest_size=16)
    return Path(root) / "hone" / "prompt_lengths" / f"{digest.hexdigest()}.json"
