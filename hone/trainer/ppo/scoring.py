"""Writes the scores of every source to separate columns, and their configured sum.

Extras, which a scorer returns next to its score, are columns too; they override a row's column of that name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hone.agents.collate import LOOP_SCORE, trajectory_rewards, turn_rewards
from hone.agents.contract import LOOPS
from hone.agents.loops.listing import LoopNames
from hone.agents.trajectory_rows import is_last_row, of_trajectories
from hone.columns import COLUMNS, REWARD_PREFIX, declared, reward_column, row_may_bring, write
from hone.config import PPOTrainerConfig, replace
from hone.config.reward import RewardModelConfig
from hone.controller import Role, WorkerGroup
from hone.data.dataset import SINGLE_TURN_AGENT, RLHFDataset
from hone.data.loader import Dataset
from hone.data.rows import DataError, RowStore
from hone.plugins import PluginError
from hone.protocol import DataProto
from hone.protocol.rows import object_array
from hone.rewards.failures import NO_GROUND_TRUTH, RewardError
from hone.rewards.loading import load_reward_manager
from hone.rewards.managers.abstract import AbstractRewardManager
from hone.rewards.managers.blank import BlankRewardManager
from hone.rewards.managers.rule import RuleRewardManager
from hone.rewards.places import unbound
from hone.rewards.scores.table import UnknownSourceError
from hone.rollout.build import ENGINES
from hone.tokenizer import Tokenizer
from hone.trainer.ppo.plan import Plan
from hone.trainer.ppo.roles import AnyGroup
from hone.types import Function, JsonValue, Row
from hone.workers.reward_model import RewardModelWorker

AGENT, RULE, MODEL, PROCESS = "agent", "rule", "model", "process"
STYLE = "reward_model.style=model"
if TYPE_CHECKING:
    from hone.rewards.managers.model import ModelRewardManager
    from hone.workers.judge import JudgeWorker

Extras: TypeAlias = Mapping[str, Sequence[JsonValue]]
"""Values that a score function returned next to its score: by name, one value per row."""
RewardModel: TypeAlias = WorkerGroup[RewardModelWorker] | RuleRewardManager
"""The workers of a reward model, or the manager of one that a server runs."""
FAILURE = "reward_failure"
"""The extra with the reason why a row could not be scored; None for a scored row."""
SCORED_BY_TABLE = (
    ". Validation rows are scored by the configured rules, since val_reward_fn was not given with "
    "reward_fn: pass val_reward_fn as well, or data.val_files=[]"
)
_NEEDS_NO_RULE = {"reward_model": {"style": "model"}}


def check_rows(
    reward_fn: Function, dataset: Dataset | None, config: PPOTrainerConfig, by_table: bool = False
) -> None:
    """Raise an error for reserved columns, images, unknown agent loops, or data sources without a score.

    `by_table` means that the caller passed `reward_fn` but no `val_reward_fn`.
    """
    if not isinstance(dataset, RLHFDataset):
        return  # also without validation
    loops = LoopNames(config.actor_rollout_ref.rollout)
    check_columns(dataset.store, config.data.prompt_key)
    known: set[str | None] = {None}
    for position, row in _used_rows(dataset, ("agent_name",)):
        name = row.get("agent_name")
        if isinstance(name, str | None) and name in known:
            continue
        try:  # rows may only name configured loops, never an import path
            loops.of_row(name)
            known.add(name)
        except PluginError as error:
            raise DataError(f"{dataset.store.where(position)}: {error}") from error
    check_media(dataset, config, default_loop=loops.default)
    try:
        has_model = config.reward_model.enable
        check_sources(reward_fn, dataset, default_loop=loops.default, has_model=has_model)
    except UnknownSourceError as error:
        raise UnknownSourceError(f"{error}{SCORED_BY_TABLE if by_table else ''}") from error


def _used_rows(dataset: RLHFDataset, columns: Sequence[str]) -> Iterator[tuple[int, Row]]:
    """Yield the position and these columns of each row that the data set uses."""
    positions = set(dataset.positions)
    return (pair for pair in enumerate(dataset.store.scan(columns)) if pair[0] in positions)


def check_media(dataset: RLHFDataset, config: PPOTrainerConfig, *, default_loop: str) -> None:
    """Raise an error for rows with images, videos or audio: engines and agent loops only support text."""
    keys = (config.data.image_key, config.data.video_key, config.data.audio_key)
    own_engine = not ENGINES.is_built_in(config.actor_rollout_ref.rollout.name)
    for position, row in _used_rows(dataset, (*keys, "agent_name")):
        media = [key for key in keys if _is_filled(row.get(key))]
        own_loop = not LOOPS.is_built_in(row.get("agent_name") or default_loop)
        if media and not (own_engine and own_loop):
            raise DataError(
                f"{dataset.store.where(position)}: column {media[0]!r} is filled, and no vision model "
                "is built here; leave such rows or the column out, or name an agent loop and a rollout "
                "engine of your own that read it"
            )


def _is_filled(value: object) -> bool:
    return value is not None and (not isinstance(value, Sized) or len(value) > 0)


def check_columns(store: RowStore, prompt_key: str) -> None:
    """Raise an error if the data have a column that the training loop writes."""
    parts = [reward_column(part) for part in (AGENT, RULE, MODEL, PROCESS)]
    reserved = [n for n in (*COLUMNS, *parts) if not row_may_bring(n) and n != prompt_key]
    for file in store.files:
        for index, row in enumerate(file.scan(reserved)):
            if row:
                name = next(iter(row))
                column = declared(name)
                assert column is not None
                raise DataError(
                    f"{file.where(index)}: column {name!r} has the name of what step "
                    f"{column.step!r} writes ({column.meaning}); rename it in the file, or move "
                    "it into extra_info"
                )


def check_sources(
    reward_fn: Function, dataset: RLHFDataset, *, default_loop: str, has_model: bool
) -> None:
    """Raise an error if a row has no score; rows of other agent loops may have their own."""
    if not isinstance(reward_fn, RuleRewardManager):
        return
    columns, used = (reward_fn.reward_fn_key, "reward_model", "agent_name"), set(dataset.positions)

    def rows() -> Iterator[Row]:
        for position, row in enumerate(dataset.store.scan(columns)):
            loop = row.get("agent_name") or default_loop
            if position not in used or loop != SINGLE_TURN_AGENT:
                yield _NEEDS_NO_RULE
                continue
            if is_for_model(row.get("reward_model")) and reward_fn.uses_table and not has_model:
                raise DataError(
                    f"{dataset.store.where(position)}: {STYLE}, and this run has no reward model; use "
                    "reward_model.enable=true with a reward_model.model.path or reward_model.server.url, "
                    "a score function of your own, or style rule"
                )
            yield row

    reward_fn.check_rows(rows(), dataset.store.where)


def is_for_model(reward_model: object) -> bool:
    """Return whether a row's `reward_model` column names the reward model as its scorer."""
    return isinstance(reward_model, Mapping) and reward_model.get("style") == MODEL


def routes_by_style(config: PPOTrainerConfig, train: Dataset, val: Dataset | None) -> bool:
    """Return whether rows of another style than `model` are scored by the rule alone."""
    model = config.reward_model
    if not model.enable or model.type in ("prm", "prime") or model.route_by_style is False:
        return False
    datasets = [dataset for dataset in (train, val) if dataset is not None]
    known = [dataset for dataset in datasets if isinstance(dataset, RLHFDataset)]
    rows = (row for dataset in known for _, row in _used_rows(dataset, ("reward_model",)))
    if any(is_for_model(row.get("reward_model")) for row in rows):
        return True
    if model.route_by_style and len(known) == len(datasets):
        raise DataError(
            f"reward_model.route_by_style=true, and no row has {STYLE}: the reward model would score "
            "nothing; write the style into the rows, or use route_by_style=null"
        )
    return bool(model.route_by_style)


def load_validation_manager(
    config: PPOTrainerConfig,
    tokenizer: Tokenizer,
    dataset: Dataset | None,
    compute_score: Function | None = None,
) -> AbstractRewardManager:
    """Return the manager of validation. As in PURE, `blank` is for training only: validation rows are scored
    by the rules as `prime` does, if each has one."""
    manager = load_reward_manager(config, tokenizer, 1, compute_score=compute_score)
    if not isinstance(manager, BlankRewardManager) or not isinstance(dataset, RLHFDataset):
        return manager
    by_prime = replace(config, "reward_manager.name", "prime")
    by_rule = load_reward_manager(by_prime, tokenizer, 1, compute_score=compute_score)
    try:
        default = config.actor_rollout_ref.rollout.default_loop
        check_sources(by_rule, dataset, default_loop=default, has_model=True)
    except UnknownSourceError:
        return manager
    return by_rule


def _parts(
    batch: DataProto, reward_fn: Function, model: RewardModel | None, routed: bool, by_step: bool
) -> tuple[dict[str, Tensor], Extras]:
    """Return token scores [B, T] by part, and extras. An agent loop's score replaces the rule's.

    With a reward model, no rule scores rows of style `model`. If `routed`, an outcome reward model scores
    only these. Of a trajectory of several rows, both score the last row; a process reward model (`by_step`)
    scores the steps of all rows.
    """
    parts: dict[str, Tensor] = {}
    extras: Extras = {}
    final = is_last_row(batch)
    for_model = np.zeros(len(batch), dtype=bool)
    if model is not None:
        styles = batch.non_tensor_batch.get("reward_model", [None] * len(batch))
        for_model = np.array([is_for_model(value) for value in styles], dtype=bool)
    if batch.has_column(LOOP_SCORE):
        parts[AGENT] = batch.batch[LOOP_SCORE]
    else:
        parts[RULE], extras = _of_rows(batch, final & ~for_model, reward_fn)
        _check_extras(extras, reward_fn)
    if model is not None:
        rows = final & for_model if routed else final | by_step
        if isinstance(model, RuleRewardManager):
            parts[MODEL], of_model = _of_rows(batch, rows, model)
            extras = _joined(extras, of_model)
        elif not rows.any():
            parts[MODEL] = torch.zeros(batch.batch["responses"].shape)
        else:
            some = batch if rows.all() else batch[rows]
            scored = model.call(RewardModelWorker.compute_rm_score, some)
            if scored.has_column("step_mask"):
                write(batch, "step_mask", _spread(scored.batch["step_mask"], rows))
                parts[PROCESS] = _spread(scored.batch["process_scores"], rows)
            else:
                parts[MODEL] = _spread(scored.batch["rm_scores"], rows)
        if MODEL in parts:
            write(batch, "rm_scores", parts[MODEL])
    return parts, extras


def _joined(extras: Extras, of_model: Extras) -> Extras:
    """Return the extras of rule and reward model; a row that either could not score has failed."""
    joined = {**{name: v for name, v in of_model.items() if name != "score"}, **extras}
    if FAILURE in extras and FAILURE in of_model:
        pairs = zip(extras[FAILURE], of_model[FAILURE], strict=True)
        joined[FAILURE] = [rule or model for rule, model in pairs]
    return joined


def _of_rows(batch: DataProto, rows: np.ndarray, reward_fn: Function) -> tuple[Tensor, Extras]:
    """Return the manager's scores [B, T] and extras of some rows; other rows have 0 and None."""
    if not rows.any() and len(batch):
        return torch.zeros(batch.batch["responses"].shape), {}
    result = reward_fn(batch if rows.all() else batch[rows], return_dict=True)
    extras: dict[str, list[JsonValue]] = {}
    for name, values in result.get("reward_extra_info", {}).items():
        some = iter(values)
        extras[name] = [next(some) if of_row else None for of_row in rows]
    return _spread(result["reward_tensor"], rows), extras


def _spread(scores: Tensor, rows: np.ndarray) -> Tensor:
    """Return scores [B, T] with those of the selected rows in their places."""
    if rows.all():
        return scores
    spread = torch.zeros((len(rows), *scores.shape[1:]), dtype=scores.dtype)
    spread[torch.from_numpy(rows)] = scores
    return spread


def _check_extras(extras: Extras, reward_fn: Function) -> None:
    """Raise an error if an extra has the name of a column of the training loop."""
    for name in extras:
        column = declared(name)
        if column is not None and name != FAILURE:
            scorer = unbound(getattr(reward_fn, "compute_score", None) or reward_fn)
            scorer_name = getattr(scorer, "__name__", type(scorer).__name__)
            raise RewardError(
                f"the score function {scorer_name} returns {name!r}, which is a column of step "
                f"{column.step!r} ({column.meaning}); return it under another name"
            )


def numbers_of(batch: DataProto, name: str, failure_score: float) -> list[float]:
    """Return the scorer's extra `name` per row; a failed row has `failure_score`, a row that is not its
    trajectory's last has 0."""
    facts, nothing = batch.non_tensor_batch, [None] * len(batch)
    final = is_last_row(batch)
    numbers = []
    for row, (value, failure) in enumerate(
        zip(facts.get(name, nothing), facts.get(FAILURE, nothing), strict=True)
    ):
        if value is None and (failure is not None or not final[row]):
            value = failure_score if final[row] else 0.0
        try:
            numbers.append(float(value))
        except (TypeError, ValueError, OverflowError) as error:
            source = facts.get("data_source", nothing)[row]
            raise RewardError(
                f"row {row} (data_source {source!r}) has no number under {name!r}, got {value!r}; "
                "the score function must return one for every row that it scores"
            ) from error
    return numbers


def has_answer(batch: DataProto) -> Tensor:
    """Return [N] bool per trajectory: whether a rule scores it and has the ground truth that it needs."""
    facts, nothing = batch.non_tensor_batch, object_array([None] * len(batch))
    pairs = zip(facts.get(FAILURE, nothing), facts.get("reward_model", nothing), strict=True)
    rows = [reason != NO_GROUND_TRUTH and not is_for_model(column) for reason, column in pairs]
    return torch.from_numpy(of_trajectories(batch, np.array(rows, dtype=bool)))


def has_extra(batch: DataProto, name: str) -> bool:
    """Return whether the scorer returns `name`; True if it failed on every row, which leaves it unknown."""
    failures = batch.non_tensor_batch.get(FAILURE, np.empty(0, dtype=object))
    scored = failures[is_last_row(batch)] if len(failures) else failures
    all_failed = len(scored) > 0 and all(failure is not None for failure in scored)
    return name in batch.meta_info.get("reward_extra_names", ()) or all_failed


def score(
    batch: DataProto,
    reward_fn: Function,
    reward_model: RewardModel | None,
    config: RewardModelConfig,
    *,
    routed: bool = False,
) -> DataProto:
    """Write `reward/<part>`, their weighted sum, and the extras as columns."""
    parts, extras = _parts(batch, reward_fn, reward_model, routed, config.type == "prm")
    weights = {MODEL: config.modeling_reward_coef, RULE: config.verifiable_reward_coef}
    total: Tensor | None = None
    for part, scores in parts.items():
        if part == PROCESS:
            # Written with its weight, since the strict minimum subtracts it from the sum.
            scores = scores * config.modeling_reward_coef
        if part != AGENT:  # the agent loop has written it
            write(batch, reward_column(part), scores)
        weighted = scores * weights.get(part, 1.0)
        total = weighted if total is None else total + weighted
    assert total is not None
    for kind, coefficients, rewards in (
        ("turn", config.turn_reward_coef, turn_rewards),
        ("trajectory", config.trajectory_reward_coef, trajectory_rewards),
    ):
        for name, weight in coefficients.items():
            scores = rewards(batch, name)
            write(batch, f"{REWARD_PREFIX}{kind}/{name}", scores)
            total = total + scores * weight
    write(batch, "token_level_scores", total)
    # Every batch has the failure column, so that batches of several rounds can be concatenated.
    for name, values in {FAILURE: [None] * len(batch), **extras}.items():
        batch.set_column(name, object_array(list(values)))
    batch.meta_info["reward_extra_names"] = sorted(extras)
    return batch


def pop_metrics(*managers: object) -> dict[str, float]:
    """Return the counts of managers since the last call; a user's manager may have none."""
    return {
        name: value
        for manager in managers
        if hasattr(manager, "pop_metrics")
        for name, value in manager.pop_metrics().items()
    }


def reward_model_of(
    config: PPOTrainerConfig,
    plan: Plan,
    tokenizer: Tokenizer,
    groups: Mapping[Role, AnyGroup],
) -> RewardModel | None:
    """Return the workers of the reward model, or the manager of a served one or a judge."""
    group = None if plan.implicit_rewards else groups.get(Role.RewardModel)
    return outside_model(config, tokenizer, group) if plan.is_outside else group


def outside_model(
    config: PPOTrainerConfig, tokenizer: Tokenizer, group: WorkerGroup[JudgeWorker] | None
) -> ModelRewardManager:
    """Return the manager of a served reward model, or of a judge, for which `group` may generate."""
    from hone.models.load import load_tokenizer
    from hone.rewards.loading import load_model_manager

    model = config.reward_model
    if model.type == "judge":
        from hone.workers.judge import WorkerCompletions

        own = None if model.server.url else WorkerCompletions(group)
        return load_model_manager(config, tokenizer, None, own)
    path, trust = model.model.path, model.model.trust_remote_code
    renderer = load_tokenizer(path, trust_remote_code=trust) if path else None
    return load_model_manager(config, tokenizer, renderer)
