"""Loads the reward managers of training and validation, and checks that they can score the rows."""

from __future__ import annotations

from functools import partial

from hone.checks.row_checks import check_rows, check_sources
from hone.config import PPOTrainerConfig, replace
from hone.data.dataset import RLHFDataset
from hone.data.loader import Dataset
from hone.rewards.loading import load_reward_manager
from hone.rewards.managers.blank import BlankRewardManager
from hone.rewards.managers.rule import AbstractRewardManager
from hone.rewards.scores.table import UnknownSourceError
from hone.tokenizer import Tokenizer
from hone.types import Function

NO_VAL_REWARD_FN = (
    ". Validation rows are scored by the configured rules, since val_reward_fn was not given with "
    "reward_fn: pass val_reward_fn as well, or data.val_files=[]"
)
"""The end of the error if a validation row has no scorer."""


def load_managers(
    config: PPOTrainerConfig,
    tokenizer: Tokenizer,
    reward_fn: Function | None,
    val_reward_fn: Function | None,
    train_dataset: Dataset,
    val_dataset: Dataset | None,
) -> tuple[Function, Function]:
    """Returns the managers of training and validation; a given function replaces the config's manager."""
    manager = reward_fn or load_reward_manager(config, tokenizer, num_examine=0)
    val_manager = val_reward_fn or load_validation_manager(config, tokenizer, val_dataset)
    check_rows(manager, train_dataset, config)
    hint = NO_VAL_REWARD_FN if reward_fn and not val_reward_fn else ""
    check_rows(val_manager, val_dataset, config, hint)
    return manager, val_manager


def load_validation_manager(
    config: PPOTrainerConfig,
    tokenizer: Tokenizer,
    dataset: Dataset | None,
    compute_score: Function | None = None,
) -> AbstractRewardManager:
    """Returns the manager of validation; as in PURE, `prime` replaces `blank` if all rows have a rule."""
    load = partial(
        load_reward_manager, tokenizer=tokenizer, num_examine=1, compute_score=compute_score
    )
    manager = load(config)
    if not isinstance(manager, BlankRewardManager) or not isinstance(dataset, RLHFDataset):
        return manager
    prime_config = replace(config, "reward_manager.name", "prime")
    prime_manager = load(prime_config)
    try:
        default_loop = config.actor_rollout_ref.rollout.default_loop
        check_sources(prime_manager, dataset, default_loop, has_model=True)
    except UnknownSourceError:
        return manager
    return prime_manager
