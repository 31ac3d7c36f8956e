"""Derives which computations a run needs from the columns that its algorithm reads (see `columns.py`).

A column that is read but never written is a configuration error, reported before any model is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from hone.agents.contract import LOOPS
from hone.agents.parsers.contract import PARSERS
from hone.algorithms.advantages import TABLE, get_estimator
from hone.algorithms.advantages.estimator import (
    CALL_ONLY,
    Estimator,
    EstimatorFunction,
)
from hone.algorithms.credit import STRICT_MIN
from hone.algorithms.kl import get_kl_estimator
from hone.algorithms.policy_losses import get_policy_loss_fn
from hone.columns import COLUMNS, declaration
from hone.config import ConfigError, PPOTrainerConfig, replace
from hone.config.algorithm import AlgorithmConfig
from hone.config.block import Block
from hone.config.checks import mesh_problems
from hone.config.conditions import lines_per_sentence
from hone.config.keys import get
from hone.models.from_config import import_external
from hone.plugins import PluginError, Table, needed_columns
from hone.rewards.managers.registry import MANAGERS
from hone.rollout.build import ENGINES
from hone.suggestions import suggestion
from hone.types import Function

T = TypeVar("T")

_LOG_PROB_COLUMNS = ("old_log_probs", "entropys", "sum_pi_squared")
"""The columns for which the actor runs a log-prob pass before the update."""


def set_schedule_lengths(config: PPOTrainerConfig, total_steps: int) -> PPOTrainerConfig:
    """Returns the config in which learning-rate schedules without a length have the run's length.

    The actor's schedule excludes `trainer.critic_warmup`.
    """
    actor_steps = max(total_steps - config.trainer.critic_warmup, 1)
    for block, steps in (
        ("actor_rollout_ref.actor", actor_steps),
        ("critic", total_steps),
        ("reward_model.model", total_steps),
    ):
        key = f"{block}.optim.total_training_steps"
        config = replace(config, key, steps) if get(config, key) <= 0 else config
    return config


@dataclass(frozen=True)
class Reader:
    """A part of the algorithm that reads columns, named after the setting that enables it."""

    setting: str
    columns: tuple[str, ...]
    in_update: bool = False
    """Whether the part reads the columns during the update, when advantages exist."""


@dataclass(frozen=True)
class Plan:
    """The computations of each step, besides generation and scoring."""

    estimator: Estimator
    columns: frozenset[str]
    """All columns that the readers of this run need."""
    reward_model: Literal["orm", "prm", "prime", "judge"] | None
    rows_per_update: tuple[int, ...]
    """Rows per mini-batch, for each trained role."""
    has_reward_server: bool
    """Whether the reward model runs on a server instead of in workers."""
    log_prob_columns: tuple[str, ...]
    """The columns of the actor's log-prob pass before the update; empty if there is no pass.

    With one update per batch, the forward pass of the update computes the old log-probs.
    """
    corrects_for_rollout: bool
    """Whether rollout correction writes importance weights or a loss mask before the update."""
    needs_reference: bool
    needs_critic: bool
    needs_implicit_rewards: bool
    needs_greedy_baselines: bool
    logs_response_metrics: bool

    @property
    def compares_scores_only(self) -> bool:
        """Whether responses of equal score teach nothing; implicit rewards differ between such responses."""
        return self.estimator.group_use != "ignored" and not self.needs_implicit_rewards

    @property
    def has_external_reward_model(self) -> bool:
        """Whether a reward manager calls the reward model, which is a judge or runs on a server."""
        return self.has_reward_server or self.reward_model == "judge"

    @property
    def has_reward_engine(self) -> bool:
        """Whether the reward model runs on a training engine."""
        return self.reward_model in ("prm", "prime") and not self.has_reward_server

    @staticmethod
    def of(config: PPOTrainerConfig) -> Plan:
        """Returns the plan, or raises a ConfigError that lists every problem."""
        plan, problems = _build_plan(config)
        if plan is not None:
            problems += _plan_problems(config, plan)
        if problems or plan is None:
            raise ConfigError(problems)
        return plan


def find_problems_and_notes(
    config: Block, origins: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Returns the problems of a config's plan, and notes on given keys without effect."""
    if not isinstance(config, PPOTrainerConfig):
        return [], []
    plan, problems = _build_plan(config)
    rollout = config.actor_rollout_ref.rollout
    lookups: dict[str, tuple[Table[Function], str]] = {
        "actor_rollout_ref.rollout.name": (ENGINES, rollout.name),
        "actor_rollout_ref.rollout.multi_turn.format": (PARSERS, rollout.multi_turn.format),
    }
    if config.reward_manager.source == "register":
        lookups["reward_manager.name"] = (MANAGERS, config.reward_manager.name)
    if not rollout.agent.agent_loop_config_path:
        key = "actor_rollout_ref.rollout.agent.default_agent_loop"
        lookups[key] = (LOOPS, rollout.default_loop)
    for key, (table, name) in lookups.items():
        if name not in table and ":" not in name:
            hint = suggestion(name, table.names())
            known_names = ", ".join(table.names())
            problems.append(f"{key}={name}: unknown {table.kind}.{hint} Known: {known_names}")
    if plan is None:
        return problems, []
    problems += _plan_problems(config, plan)
    return problems, lines_per_sentence(_keys_without_effect(config, plan, origins))


def _build_plan(config: PPOTrainerConfig) -> tuple[Plan | None, list[str]]:
    """Returns the plan, which is None without a valid estimator, and the problems in the config."""
    algorithm, actor, model = config.algorithm, config.actor_rollout_ref.actor, config.reward_model
    reward_model_type = model.type if model.enable else None
    problems: list[str] = []

    def try_build(build: Callable[[], T], key: str = "") -> T | None:
        try:
            return build()
        except ValueError as error:  # an unknown name, or options that do not fit
            prefix = f"{key}: " if key and isinstance(error, PluginError) else ""
            problems.append(f"{prefix}{error}")
            return None

    # A user's module may register the estimator or the loss that the configuration names.
    try_build(lambda: import_external(config.actor_rollout_ref.model.external_lib))
    credit_assignment = model.credit_assignment if reward_model_type == "prm" else None
    estimator_name = algorithm.adv_estimator
    if reward_model_type == "prime" and estimator_name == "rloo":
        estimator_name = "prime_rloo"
    estimator = try_build(
        lambda: get_estimator(estimator_name, algorithm, credit_assignment=credit_assignment),
        f"algorithm.adv_estimator={estimator_name}",
    )
    loss_mode = actor.policy_loss.loss_mode
    key = f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}"
    loss = try_build(lambda: get_policy_loss_fn(loss_mode), key)
    for key in ("algorithm.kl_penalty", "actor_rollout_ref.actor.kl_loss_type"):
        try_build(partial(get_kl_estimator, get(config, key), key))
    if estimator is None:
        return None, problems
    readers = list(_readers(config, estimator, loss))
    for reader in readers:
        for column in reader.columns:
            problem = _missing_column_problem(column, reader, config)
            problems += [problem] if problem else []
    columns = frozenset(column for reader in readers for column in reader.columns)
    needs_critic = "values" in columns
    critic_rows_per_update = (config.critic.sequences_per_update,) if needs_critic else ()
    return Plan(
        estimator=estimator,
        columns=columns,
        reward_model=reward_model_type,
        rows_per_update=(actor.sequences_per_update, *critic_rows_per_update),
        has_reward_server=bool(reward_model_type and model.server.url),
        log_prob_columns=_log_prob_columns(config, columns),
        corrects_for_rollout=algorithm.rollout_correction.applies_before_update,
        needs_reference="ref_log_prob" in columns,
        needs_critic=needs_critic,
        needs_implicit_rewards="reward/implicit" in columns,
        needs_greedy_baselines="reward_baselines" in columns,
        logs_response_metrics=config.logs_response_metrics,
    ), problems


def _log_prob_columns(config: PPOTrainerConfig, columns: Set[str]) -> tuple[str, ...]:
    """Returns the columns that the log-prob pass writes; entropies are always among them."""
    if config.algorithm.rollout_correction.bypass_mode:  # the rollout's are the old log-probs
        columns = columns - {"old_log_probs"}
    names = tuple(name for name in _LOG_PROB_COLUMNS if name in columns)
    if not names:
        return ()
    records_routing = config.actor_rollout_ref.actor.router_replay.mode == "R2"
    routing = ("routed_experts",) if records_routing else ()
    return tuple(dict.fromkeys((*names, "entropys", *routing)))


def _readers(
    config: PPOTrainerConfig, estimator: Estimator, loss: Function | None
) -> Iterator[Reader]:
    """Yields each part of this run's algorithm that reads columns."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    correction, correction_key = algorithm.rollout_correction, "algorithm.rollout_correction"
    yield Reader(f"algorithm.adv_estimator={algorithm.adv_estimator}", estimator.requires)
    loss_key = f"actor_rollout_ref.actor.policy_loss.loss_mode={actor.policy_loss.loss_mode}"
    yield Reader(loss_key, needed_columns(loss) if loss is not None else (), in_update=True)
    has_one_update = (
        actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= config.data.train_batch_size
    )
    if not has_one_update:
        # Only the first update computes the old log-probs in its own forward pass.
        yield Reader("more than one update per batch", ("old_log_probs",), in_update=True)
    if config.trainer.critic_warmup > 0:
        yield Reader("trainer.critic_warmup", ("old_log_probs",), in_update=True)
    if algorithm.use_kl_in_reward:
        yield Reader("algorithm.use_kl_in_reward=true", ("old_log_probs", "ref_log_prob"))
    if actor.use_kl_loss:
        yield Reader("actor_rollout_ref.actor.use_kl_loss=true", ("ref_log_prob",), in_update=True)
    if correction.bypass_mode:
        yield Reader(f"{correction_key}.bypass_mode=true", ("rollout_log_probs",))
    elif correction.applies_before_update:
        yield Reader(correction_key, ("old_log_probs", "rollout_log_probs"))
    if actor.calculate_sum_pi_squared:
        setting = "actor_rollout_ref.actor.calculate_sum_pi_squared=true"
        yield Reader(setting, ("sum_pi_squared",))
    if config.critic.enable:
        yield Reader("critic.enable=true", ("values",), in_update=True)


def _remedies_by_column(config: PPOTrainerConfig) -> dict[str, str]:
    """Returns the setting that would write a column, for each column that this run does not write."""
    model, correction = config.reward_model, config.algorithm.rollout_correction
    correction_key = "algorithm.rollout_correction"
    remedies: dict[str, str] = {}
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        remedies["rollout_log_probs"] = "actor_rollout_ref.rollout.calculate_log_probs=true"
    if correction.bypass_mode or correction.rollout_is is None:
        remedies["rollout_is_weights"] = f"{correction_key}.rollout_is=token, without bypass_mode"
    if not correction.applies_before_update:
        remedies["loss_mask"] = f"{correction_key}.rollout_rs, without bypass_mode"
    if config.actor_rollout_ref.actor.router_replay.mode == "disabled":
        remedies["routed_experts"] = "actor_rollout_ref.actor.router_replay.mode=R2"
    if config.critic.enable is False:
        remedies["values"] = "critic.enable=null or true"
    for types, type_setting, columns in (
        (("orm", "judge"), "", ("rm_scores", "reward/model")),
        (("prm",), " and reward_model.type=prm", ("step_mask", "reward/process")),
        (("prime",), " and reward_model.type=prime", ("reward/implicit",)),
    ):
        if not (model.enable and model.type in types):
            remedy = f"reward_model.enable=true{type_setting} with a reward_model.model.path"
            remedies |= dict.fromkeys(columns, remedy)
    return remedies


_COLUMNS_AFTER_ESTIMATOR = ("advantages", "returns", "global_row", "padded_row")


def _missing_column_problem(name: str, reader: Reader, config: PPOTrainerConfig) -> str | None:
    """Returns a problem if no phase of the run writes the column before it is read."""
    column = declaration(name)
    if column is None:  # a column of the data, an extra of a score function, or a typing error
        hint = suggestion(name, COLUMNS)
        return f"{reader.setting} reads {name!r}, which no phase writes.{hint}" if hint else None
    if remedy := _remedies_by_column(config).get(name):
        return f"{reader.setting} reads {name}, which this run does not write; use {remedy}"
    if name in _COLUMNS_AFTER_ESTIMATOR and not reader.in_update:
        return (
            f"{reader.setting} reads {name}, which phase {column.phase!r} writes later; "
            "read the columns that it is computed from"
        )
    return None


def _plan_problems(config: PPOTrainerConfig, plan: Plan) -> Iterator[str]:
    """Yields a problem per setting that contradicts the plan."""
    algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
    estimator = f"algorithm.adv_estimator={algorithm.adv_estimator}"
    if plan.estimator.group_use == "required" and rollout.n == 1:
        yield (
            f"{estimator} compares the responses of one prompt, and "
            "actor_rollout_ref.rollout.n=1; use actor_rollout_ref.rollout.n=2 or more"
        )
    if config.trainer.critic_warmup > 0 and not plan.needs_critic:
        yield (
            f"trainer.critic_warmup={config.trainer.critic_warmup} without a critic would train nothing; "
            "use 0, or critic.enable=true"
        )
    options = [field.name for field in dataclasses.fields(plan.estimator)]
    uses_strict_min = config.reward_model.credit_assignment == STRICT_MIN
    if plan.reward_model == "prm" and uses_strict_min and "credit_assignment" not in options:
        yield (
            f"reward_model.credit_assignment={STRICT_MIN} is a token-level return, which "
            f"{estimator} does not compute; use algorithm.adv_estimator=rloo_token, or a "
            "temperature such as 0.1"
        )
    if plan.reward_model == "prime" and not plan.needs_implicit_rewards:
        yield (
            f"reward_model.type=prime writes implicit rewards, which {estimator} does not read; use "
            "algorithm.adv_estimator=rloo"
        )
    ref, critic, reward = config.actor_rollout_ref.ref, config.critic, config.reward_model
    critic_block, reward_block = critic.model.fsdp_config, reward.model.fsdp_config
    reward_ranks = sum(config.reward_pool) or config.world_size
    for is_used, key, role, block, ranks in (
        (plan.needs_reference, "actor_rollout_ref.ref", ref, ref.fsdp_config, config.world_size),
        (plan.needs_critic, "critic", critic, critic_block, config.world_size),
        (plan.has_reward_engine, "reward_model", reward, reward_block, reward_ranks),
    ):
        if is_used:
            yield from mesh_problems(ranks, key, role, f"{key}.fsdp_config", block)


def _keys_without_effect(
    config: PPOTrainerConfig, plan: Plan, origins: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yields each given key that has no effect in this run, with the reason."""
    reasons: dict[str, str] = {}
    name = config.algorithm.adv_estimator
    estimator = f"algorithm.adv_estimator={name}"
    if not plan.needs_critic:
        reason = f"there is no critic ({estimator})"
        reasons |= {f"critic.{key}": reason for key in config.critic if key != "enable"}
    if not plan.needs_reference:
        reasons["actor_rollout_ref.ref"] = "no KL to the reference policy is configured"
    if TABLE.is_built_in(name):
        entries = [TABLE.get(other) for other in TABLE.names() if TABLE.is_built_in(other)]
        functions = [entry for entry in entries if isinstance(entry, EstimatorFunction)]
        options = set().union(*(_algorithm_keys(entry.estimator) for entry in functions))
        unused_keys = options - _algorithm_keys(type(plan.estimator))
        reasons |= {f"algorithm.{key}": estimator for key in unused_keys}
    for prefix, reason in reasons.items():
        for key in origins:
            if key == prefix or key.startswith(prefix + "."):
                yield key, f"no effect while {reason}"


def _algorithm_keys(estimator: type[Estimator]) -> set[str]:
    """Returns the keys of `algorithm` that an estimator reads."""
    keys = {field.name for field in dataclasses.fields(AlgorithmConfig)}
    fields = dataclasses.fields(estimator)
    return {field.name for field in fields if field.metadata != CALL_ONLY} & keys
