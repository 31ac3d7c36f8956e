"""Provides the functions of verl's `main_ppo` and `ray_trainer` for custom programs, with verl's arguments.

Functions that take a DataProto write its columns in place. The training loop itself uses credit.py.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from hone import program_dialect
from hone.algorithms import advantages
from hone.algorithms.kl import FixedKLController
from hone.columns import REWARD_PREFIX, require
from hone.config import PPOTrainerConfig
from hone.config.algorithm import AlgorithmConfig
from hone.config.apply import ComposedConfig, compose_settings
from hone.config.data import DataConfig
from hone.config.keys import plain_containers
from hone.config.sources import flatten
from hone.config.trees import TREES
from hone.controller import Worker
from hone.controller.colocated import unwrap_ray_class
from hone.controller.decorator import Dispatch, register
from hone.data import create
from hone.data.create import create_rl_dataset
from hone.data.loader import Dataset
from hone.data.samplers import Sampler
from hone.plugins import plain_name
from hone.protocol import DataProto
from hone.trainer.ppo import credit
from hone.trainer.ppo.plan import Plan
from hone.types import Fields, JsonValue, Settings
from hone.verl.core_algos import compute_pf_ppo_reweight_data
from hone.verl.profiler import DistProfiler

__all__ = ["create_rl_dataset"]

C = TypeVar("C")

WorkerType = type[Worker]
"""verl's name of a worker class, for annotations."""


def compute_response_mask(data: DataProto) -> Tensor:
    """Returns the response part of `attention_mask` [B, T]."""
    return credit.split_attention_mask(data)[1]


def apply_kl_penalty(
    data: DataProto, kl_ctrl: FixedKLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Writes `token_level_rewards` = scores − coefficient · KL, and updates the KL controller."""
    data.batch["token_level_rewards"], metrics = credit.penalize_kl(data, kl_ctrl, kl_penalty)
    return data, metrics


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgorithmConfig | None = None,
) -> DataProto:
    """Writes `advantages` and `returns` with any registered estimator.

    `gamma` and `lam` apply to gae, `norm_adv_by_std_in_grpo` to grpo; other estimators read `config`.
    `num_repeat` is unused, as in verl: a group is the rows with the same `uid`.
    """
    name = plain_name(adv_estimator)
    if not data.has_column("response_mask"):
        data.batch["response_mask"] = compute_response_mask(data)
    options: dict[str, Settings] = {
        "gae": {"gamma": gamma, "lam": lam},
        "grpo": {"norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo},
    }
    estimator = advantages.get_estimator(name, config, **options.get(name, {}))
    columns: Fields = {"non_tensor_batch": data.non_tensor_batch}
    for column in estimator.requires:
        # If there is no column `reward/PART`, GDPO reads PART from `non_tensor_batch`.
        if data.has_column(column) or not column.startswith(REWARD_PREFIX):
            columns[column] = require(data, column)
    tensors = credit.run_estimator(data, estimator, columns)
    data.batch["advantages"], data.batch["returns"] = tensors
    if name == "gae" and config is not None and config.get("use_pf_ppo", False):
        pf_ppo = config["pf_ppo"]
        return compute_pf_ppo_reweight_data(data, pf_ppo["reweight_method"], pf_ppo["weight_pow"])
    return data


class TaskRunner:
    """Trains as configured; a subclass may extend `run`."""

    def run(self, config: PPOTrainerConfig | Settings) -> None:
        from hone.trainer.main_ppo import run

        composed = compose_config(config)
        run(composed.config, composed.origins)


def run_ppo(
    config: PPOTrainerConfig | Settings, task_runner_class: type[TaskRunner] | None = None
) -> None:
    """Trains as configured; starts Ray if the run needs it."""
    unwrap_ray_class(task_runner_class or TaskRunner)().run(config)


def create_rl_sampler(data_config: DataConfig | Settings, dataset: Dataset) -> Sampler | None:
    """Returns the sampler that `data` configures; None for the loader's default order."""
    config = data_config
    if not isinstance(config, DataConfig):
        config = compose_config({"data": config}).config.data
    return create.create_rl_sampler(config, dataset)


def need_critic(config: PPOTrainerConfig | Settings) -> bool:
    """Returns whether the algorithm reads values, or the critic is enabled."""
    return Plan.of(compose_config(config).config).needs_critic


def need_reference_policy(config: PPOTrainerConfig | Settings) -> bool:
    """Returns whether the algorithm reads the reference policy's log-probs."""
    return Plan.of(compose_config(config).config).needs_reference


def need_reward_model(config: PPOTrainerConfig | Settings) -> bool:
    """Returns whether a reward model scores responses."""
    return bool(compose_config(config).config.reward_model.enable)


def need_teacher_policy(config: PPOTrainerConfig | Settings) -> bool:
    """Checks the config, and returns False, since distillation from a teacher is not supported."""
    compose_config(config)
    return False


def migrate_legacy_reward_impl(config: C) -> C:
    """Returns the config unchanged, since both the old and the new names of reward keys are accepted."""
    return config


def validate_config(
    config: PPOTrainerConfig | Settings, use_reference_policy: bool, use_critic: bool
) -> None:
    """Raises a ConfigError with every problem if a run of this config could not start."""
    compose_config(config)


class DistProfilerExtension:
    """Adds methods to a worker class that start and stop the worker's profiler."""

    def __init__(self, profiler: DistProfiler) -> None:
        self.profiler = profiler

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, **options: JsonValue) -> None:
        self.profiler.start(**options)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> None:
        self.profiler.stop()


def get_ppo_ray_runtime_env(config: PPOTrainerConfig | Settings | None = None) -> Fields:
    """Returns an empty Ray runtime environment, since workers set the variables they need."""
    return {"env_vars": {}}


def compose_config(config: PPOTrainerConfig | Settings) -> ComposedConfig:
    """Checks and composes a config from a PPOTrainerConfig, a dict or an OmegaConf object."""
    if isinstance(config, PPOTrainerConfig):
        return ComposedConfig(config, {})
    settings = list(flatten(plain_containers(config), "", "the given config"))
    return compose_settings(TREES["ppo_trainer"], settings, dialect=program_dialect())
