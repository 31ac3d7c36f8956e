"""verl's `trainer.config`: its config classes, and the rollout defaults in `rollout/rollout.yaml`."""

from hone.config.algorithm import AlgorithmConfig as AlgoConfig
from hone.config.algorithm import (
    FilterGroupsConfig,
    KLControlConfig,
    PFPPOConfig,
    RolloutCorrectionConfig,
)
from hone.config.engine import CheckpointConfig
from hone.config.model import ModelConfig as BaseModelConfig

__all__ = [
    "AlgoConfig",
    "BaseModelConfig",
    "CheckpointConfig",
    "FilterGroupsConfig",
    "KLControlConfig",
    "PFPPOConfig",
    "RolloutCorrectionConfig",
]
