"""The steps that verl's `ray_trainer` offers to a custom trainer, with verl's arguments.

They read and write a DataProto in place. The loop of this package has its own in credit.py.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from hone.algorithms import advantages
from hone.algorithms import kl as kl_terms
from hone.algorithms.advantages.estimator import TRAJECTORY, Trajectories
from hone.algorithms.core_algos import compute_pf_ppo_reweight_data
from hone.columns import REWARD_PREFIX, require
from hone.config.algorithm import AlgorithmConfig
from hone.plugins import plain_name
from hone.protocol import DataProto
from hone.types import Row, Settings


def compute_response_mask(data: DataProto) -> Tensor:
    """[B, T] the part of `attention_mask` over the responses."""
    width = data.batch["responses"].shape[1]
    mask: Tensor = data.batch["attention_mask"]
    return mask[:, mask.shape[1] - width :]


def apply_kl_penalty(
    data: DataProto, kl_ctrl: kl_terms.FixedKLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Write `token_level_rewards` = scores − coefficient · KL, and move the controller."""
    coefficient = kl_ctrl.value
    rewards, current = kl_terms.apply_kl_penalty(
        require(data, "token_level_scores"),
        require(data, "old_log_probs"),
        require(data, "ref_log_prob"),
        require(data, "response_mask"),
        coefficient,
        kl_penalty,
    )
    data.batch["token_level_rewards"] = rewards
    kl_ctrl.update(current_kl=float(current), n_steps=len(data))
    return data, {
        "actor/reward_kl_penalty": float(current),
        "actor/reward_kl_penalty_coeff": coefficient,
    }


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgorithmConfig | None = None,
) -> DataProto:
    """Write `advantages` and `returns` with any estimator of the table.

    `gamma` and `lam` are gae's, `norm_adv_by_std_in_grpo` is grpo's; other estimators follow
    `config`. `num_repeat` enters nothing, as in verl: groups are the rows of one `uid`.
    """
    name = plain_name(adv_estimator)
    if not data.has_column("response_mask"):
        data.batch["response_mask"] = compute_response_mask(data)
    options: Settings = {}
    if name == "gae":
        options = {"gamma": gamma, "lam": lam}
    elif name == "grpo":
        options = {"norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo}
    estimator = advantages.get_estimator(name, config, **options)
    columns: Row = {"non_tensor_batch": data.non_tensor_batch}
    for column in estimator.requires:
        # A reward part may also be a number that the score function gave per row.
        if data.has_column(column) or not column.startswith(REWARD_PREFIX):
            columns[column] = require(data, column)
    for column in (TRAJECTORY, *estimator.uses):
        if data.has_column(column):
            columns[column] = data.column(column)
    data.batch["advantages"], data.batch["returns"] = estimator(
        Trajectories(
            require(data, "token_level_rewards"),
            data.batch["response_mask"],
            data.non_tensor_batch.get("uid"),
            columns,
        )
    )
    if name == "gae" and config is not None and config.get("use_pf_ppo", False):
        pf_ppo = config["pf_ppo"]
        return compute_pf_ppo_reweight_data(data, pf_ppo["reweight_method"], pf_ppo["weight_pow"])
    return data


def reduce_metrics(metrics: Row) -> Row:
    """Lists to numbers, in place: the largest where the name holds `max`, the smallest for `min`,
    else the mean. A metric without values is left out.
    """
    for name in list(metrics):
        values = np.asarray(metrics[name], dtype=np.float64)
        if not values.size:
            del metrics[name]
            continue
        reduce = np.max if "max" in name else np.min if "min" in name else np.mean
        metrics[name] = float(reduce(values))
    return metrics
