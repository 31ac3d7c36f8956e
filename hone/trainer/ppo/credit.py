"""Credit on the driver, pure: rewards after KL, correction for the rollout's log-probs, advantages."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from hone.agents.collate import DERIVED
from hone.algorithms.advantages.estimator import TRAJECTORY, Estimator, Trajectories
from hone.algorithms.correction import correct
from hone.algorithms.kl import FixedKLController, apply_kl_penalty
from hone.algorithms.shaping import normalise_advantages, pf_ppo_rows
from hone.columns import REWARD_PREFIX, require, write
from hone.config.algorithm import AlgorithmConfig
from hone.ops.counter_rng import fold_seed
from hone.plugins import PluginError
from hone.protocol import DataProto
from hone.trainer.ppo.scoring import numbers_of, said_of_rows


def reward_after_kl(
    batch: DataProto, algorithm: AlgorithmConfig, controller: FixedKLController
) -> dict[str, float]:
    """Write `token_level_rewards`; where asked, the KL to the reference is subtracted."""
    scores = require(batch, "token_level_scores")
    if not algorithm.use_kl_in_reward:
        write(batch, "token_level_rewards", scores.clone())
        return {}
    rewards, current = apply_kl_penalty(
        scores,
        require(batch, "old_log_probs"),
        require(batch, "ref_log_prob"),
        require(batch, "response_mask"),
        controller.value,
        algorithm.kl_penalty,
    )
    write(batch, "token_level_rewards", rewards)
    measured = {
        "actor/reward_kl_penalty": float(current),
        "actor/reward_kl_penalty_coeff": controller.value,
    }
    controller.update(float(current), n_steps=len(batch))
    return measured


def correct_for_rollout(batch: DataProto, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Write importance weights and the narrowed `loss_mask`, where correction is configured."""
    wanted = algorithm.rollout_correction
    if wanted.bypass_mode or (wanted.rollout_is is None and wanted.rollout_rs is None):
        return {}
    weights, narrowed, measured = correct(
        require(batch, "old_log_probs"),
        require(batch, "rollout_log_probs"),
        require(batch, "response_mask"),
        wanted,
    )
    write(batch, "loss_mask", narrowed)
    if weights is not None:
        write(batch, "rollout_is_weights", weights)
    return measured


def estimate_advantages(
    batch: DataProto, estimator: Estimator, *, whiten: bool, failure_score: float
) -> None:
    """Write `advantages` and `returns`; the estimator gets the columns it declares.

    A row whose score failed has `failure_score` where a reward part is read.
    """
    columns = {c: _required(batch, c, failure_score) for c in estimator.requires}
    for column in (TRAJECTORY, *estimator.uses):
        if batch.has_column(column):
            columns[column] = batch.column(column)
    mask = require(batch, "response_mask")
    rewards = require(batch, "token_level_rewards")
    uid = batch.non_tensor_batch["uid"]
    advantage, returns = estimator(Trajectories(rewards, mask, uid, columns))
    for name, values in (("advantages", advantage), ("returns", returns)):
        if tuple(values.shape) != tuple(mask.shape):
            raise PluginError(
                f"the estimator returned {name} of shape {tuple(values.shape)} for a response mask of "
                f"{tuple(mask.shape)}; give one number per token, 0 outside the mask"
            )
    if whiten:
        advantage = normalise_advantages(advantage, mask)
    write(batch, "advantages", advantage)
    write(batch, "returns", returns)


def _required(batch: DataProto, name: str, failure_score: float) -> Tensor:
    """A column; a reward part may also be a number a row that the score function gave beside it."""
    extra = name.removeprefix(REWARD_PREFIX)
    is_part = name != extra
    if batch.has_column(name) or not (is_part and said_of_rows(batch, extra)):
        return require(batch, name)
    return torch.tensor(numbers_of(batch, extra, failure_score))


def derive(batch: DataProto, names: Set[str]) -> None:
    """Write those of `names` that follow from other columns."""
    for name in names & DERIVED.keys():
        write(batch, name, DERIVED[name](batch))


def greedy_baselines(batch: DataProto, greedy: DataProto) -> torch.Tensor:
    """[B] what the greedy response to each row's prompt scores: ReMax's baseline."""
    totals = require(greedy, "token_level_scores").sum(-1).tolist()
    of_uid = dict(zip(greedy.non_tensor_batch["uid"], totals, strict=True))
    return torch.tensor([of_uid[uid] for uid in batch.non_tensor_batch["uid"]])


def resample(batch: DataProto, algorithm: AlgorithmConfig, *, seed: int, step: int) -> DataProto:
    """PF-PPO: draw the rows again, by their scores; the draw follows from (seed, step)."""
    if not algorithm.use_pf_ppo:
        return batch
    generator = torch.Generator().manual_seed(fold_seed(seed, "pf_ppo", step))
    scores = require(batch, "token_level_scores").sum(-1)
    settings = algorithm.pf_ppo
    rows = pf_ppo_rows(scores, settings.reweight_method, settings.weight_pow, generator)
    return batch.select_idxs(rows)
