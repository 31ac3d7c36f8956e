"""Builds the reward manager from the config: its class, its scorer and its failure policy."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from typing import Any
from urllib.parse import urlsplit

import torch

from hone.config.generation import EvaluationConfig
from hone.config.keys import replace
from hone.config.reward import RewardKwargs, RewardModelConfig
from hone.config.trees import PPOTrainerConfig
from hone.plugins import PluginError, load_extern_object, load_object
from hone.protocol import DataProto
from hone.rewards.failures import FailurePolicy, WrongSetting
from hone.rewards.judge import CLASSIFIER_SETTINGS, CompletionClient, Judge
from hone.rewards.managers.registry import get_reward_manager_cls
from hone.rewards.managers.reward_loop import RateLimitedRewardManager, RewardManagerBase
from hone.rewards.managers.rule import AbstractRewardManager, RuleRewardManager
from hone.rewards.scorer import FORMAT_ARGUMENTS, ROW_ARGUMENTS, accepted_names
from hone.rewards.scores.table import default_compute_score, register_score
from hone.rewards.served import ModelRewardManager, ModelScorer, ServedClassifier
from hone.rewards.signature import check_signature
from hone.tokenizer import Tokenizer
from hone.types import Fields, Function

logger = logging.getLogger(__name__)

_KWARGS_FIELDS = {field.name for field in dataclasses.fields(RewardKwargs)}


def load_reward_manager(
    config: PPOTrainerConfig,
    tokenizer: Tokenizer,
    num_examine: int,
    *,
    compute_score: Function | None = None,
    **reward_kwargs: Any,
) -> AbstractRewardManager:
    """Returns the reward manager that the config selects.

    `compute_score` replaces the configured score function. `reward_kwargs` override keys of
    `reward_model.reward_kwargs`. A name that the config does not declare is an argument of the manager;
    a rule manager passes unknown arguments to its scorer.
    """
    reward_model = config.reward_model
    for source, target in reward_model.scores.items():
        register_score(source, target)
        # Only row arguments are checked: a key of `score_kwargs` may belong to another scorer.
        check_signature(load_object(target), ROW_ARGUMENTS, {})
    if reward_model.score_observations:
        _warn_about_observations()
    manager_config = config.reward_manager
    cls: type[AbstractRewardManager]
    if manager_config.source == "importlib":
        cls = load_extern_object(manager_config.module.path or "", manager_config.module.name)
    else:
        cls = get_reward_manager_cls(manager_config.name or reward_model.reward_manager)
    scorer = compute_score or get_custom_reward_fn(config)
    if reward_kwargs:
        overrides = {name: reward_kwargs.pop(name) for name in _KWARGS_FIELDS & {*reward_kwargs}}
        overrides["extra"] = {
            **overrides.get("extra", reward_model.reward_kwargs.extra),
            **reward_kwargs,
        }
        kwargs = dataclasses.replace(reward_model.reward_kwargs, **overrides)
        config = replace(config, "reward_model.reward_kwargs", kwargs)
    if issubclass(cls, RewardManagerBase):
        return _reward_loop_manager(cls, config, tokenizer, scorer)
    manager = cls(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=scorer,
        reward_fn_key=config.data.reward_fn_key,
        **_manager_settings(cls, config, scorer),
    )
    if isinstance(manager, RuleRewardManager):
        manager.check_scorer()
    return manager


def _manager_settings(
    cls: type[AbstractRewardManager], config: PPOTrainerConfig, scorer: Function | None
) -> Fields:
    """Returns the settings that the class of a manager takes as arguments; a default replaces None."""
    reward_model, sandbox = config.reward_model, config.reward_model.sandbox_fusion
    kwargs = reward_model.reward_kwargs
    settings: Fields = {name: getattr(kwargs, name) for name in _KWARGS_FIELDS - {"extra"}}
    settings["score_observations"] = reward_model.score_observations
    if settings["max_resp_len"] is None:
        settings["max_resp_len"] = config.data.max_response_length
    if settings["num_processes"] is None and sandbox.url:
        # A process per slot of the service, not per core, because the processes only wait.
        settings["num_processes"] = sandbox.max_concurrent
    if not issubclass(cls, RuleRewardManager):
        names = accepted_names(cls)
        if names is None:
            return {**settings, **kwargs.extra}
        unknown_names = sorted({*kwargs.extra} - names)
        if unknown_names:
            raise WrongSetting(
                f"reward manager {cls.__name__} takes no argument {', '.join(unknown_names)}; check "
                "reward_model.reward_kwargs"
            )
        settings = {name: value for name, value in settings.items() if name in names}
        return {**settings, **kwargs.extra}
    inits = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)]
    names = frozenset(name for init in inits for name in inspect.signature(init).parameters)
    settings = {name: value for name, value in settings.items() if name in names}
    # With type=prime, every row needs a ground truth, because rule scores train the reward model.
    if reward_model.enable and reward_model.type != "prime":
        settings["skips_rows_without_truth"] = True
    if reward_model.repeatness_punishment:
        settings["repeat_threshold"] = reward_model.high_repeat_threshold
    policy = FailurePolicy.of(kwargs)
    return {**_score_options(config, scorer), "policy": policy, **settings, **kwargs.extra}


def _reward_loop_manager(
    cls: type[RewardManagerBase],
    config: PPOTrainerConfig,
    tokenizer: Tokenizer,
    scorer: Function | None,
) -> RewardManagerBase:
    """Returns a manager with verl's `run_single`, whose scorer gets the score options."""
    options, url = _score_options(config, scorer), config.reward_model.server.url
    if scorer is None and config.reward_model.score_observations:
        options["score_observations"] = True
    if scorer is not None and issubclass(cls, RateLimitedRewardManager):
        check_signature(scorer, ROW_ARGUMENTS, options)
    return cls(
        config=config,
        tokenizer=tokenizer,
        compute_score=functools.partial(scorer or default_compute_score, **options),
        reward_router_address=_router_address(url) if url else None,
    )


def load_model_manager(
    config: PPOTrainerConfig,
    tokenizer: Tokenizer,
    model_tokenizer: Tokenizer | None,
    client: CompletionClient | None = None,
) -> ModelRewardManager:
    """Returns the manager of a served classifier or a judge; `client` replaces the judge's server."""
    reward_model = config.reward_model
    scorer: ModelScorer
    if reward_model.type == "judge":
        items = reward_model.server.items()
        server = {name: value for name, value in items if name not in CLASSIFIER_SETTINGS}
        scorer = Judge(client, **server, **reward_model.judge)
    else:
        is_chat = config.data.prompt_format == "chat"
        scorer = ServedClassifier(reward_model.server, model_tokenizer, is_chat=is_chat)
    return ModelRewardManager(
        tokenizer,
        scorer=scorer,
        reward_fn_key=config.data.reward_fn_key,
        policy=FailurePolicy.of(reward_model.reward_kwargs),
        score_observations=reward_model.type != "judge" or reward_model.score_observations,
    )


@functools.cache
def _warn_about_observations() -> None:
    logger.warning(
        "reward_model.score_observations=true: scores are computed from the whole response, with "
        "the output of tools and searches, so a retrieved passage can earn a reward"
    )


def get_custom_reward_fn(config: PPOTrainerConfig | EvaluationConfig) -> Function | None:
    """Returns the user's scorer with its `reward_kwargs`, or None if the config names no scorer."""
    custom = config.custom_reward_function
    if not custom.path:
        return None
    try:
        function: Function = load_extern_object(custom.path, custom.name)
    except PluginError as error:
        raise PluginError(f"custom_reward_function.path={custom.path}: {error}") from error
    kwargs = dict(custom.reward_kwargs)
    return functools.partial(function, **kwargs) if kwargs else function


def compute_reward(data: DataProto, reward_fn: Function) -> tuple[torch.Tensor, Fields]:
    """Returns the rewards [B, T] and the extra columns of a manager."""
    result = reward_fn(data, return_dict=True)
    return result["reward_tensor"], result.get("reward_extra_info", {})


def _router_address(url: str | tuple[str, ...]) -> str:
    """Returns `host:port` of the reward model's server, an argument of verl's score functions."""
    return urlsplit(url if isinstance(url, str) else url[0]).netloc


def _score_options(config: PPOTrainerConfig, scorer: Function | None) -> Fields:
    """Returns options for the scorer: those that a user's scorer declares, and all `score_kwargs`."""
    reward_model = config.reward_model
    options = {
        name: getattr(reward_model, name)
        for name in FORMAT_ARGUMENTS
        if getattr(reward_model, name) != getattr(RewardModelConfig, name)
    }
    options["memory_limit_mb"] = reward_model.sandbox_fusion.memory_limit_mb
    if reward_model.sandbox_fusion.url:
        options["sandbox_fusion_url"] = reward_model.sandbox_fusion.url
    if reward_model.server.url:
        options["reward_router_address"] = _router_address(reward_model.server.url)
    if scorer is not None:
        names = accepted_names(scorer) or frozenset()
        options = {name: value for name, value in options.items() if name in names}
    return {**options, **reward_model.score_kwargs}
