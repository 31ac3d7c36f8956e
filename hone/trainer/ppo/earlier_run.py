"""Checks, before models load, that the checkpoint to resume from matches this run.

Damaged files are detected later, when the checkpoint is loaded, which may fall back to an earlier one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hone.config import PPOTrainerConfig, config_to_dict
from hone.data.loader import Dataset, Stateful
from hone.tracking import RunFolder
from hone.trainer.ppo import checkpoint
from hone.trainer.ppo.plan import Plan
from hone.types import Settings

MODEL_KEY = "actor_rollout_ref.model.path"


class EarlierRun:
    """The run that wrote the checkpoint to resume from; `checkpoint` is None for a new run."""

    def __init__(self, config: PPOTrainerConfig) -> None:
        self.config, trainer = config, config.trainer
        self.checkpoint: Path | None = None
        self._settings: Settings = {}
        if trainer.resume_mode == "auto":
            newest = RunFolder(trainer.default_local_dir).checkpoints()[-1:]
            self.checkpoint = newest[0][1] if newest else None
        elif trainer.resume_mode != "disable":
            self.checkpoint = checkpoint.checkpoint_from_path(trainer.resume_from_path)[1]
        if self.checkpoint is not None:
            self._settings = RunFolder(self.checkpoint.parent).read_config_or_empty()

    def problems(self, plan: Plan) -> Iterator[str]:
        """Yields the reasons why this run cannot resume from the checkpoint."""
        if self.checkpoint is None:
            return
        has_actor, has_critic, has_reward_model = (
            (self.checkpoint / name).is_dir() for name in ("actor", "critic", "reward")
        )
        if plan.needs_implicit_rewards and has_actor and not has_reward_model:
            yield (
                f"{self.checkpoint} has no reward model: the run that wrote it trained none, but "
                "reward_model.type=prime needs one; start in another trainer.default_local_dir with its "
                f"model ({MODEL_KEY}={self.checkpoint})"
            )
        if plan.needs_critic and has_actor and not has_critic:
            estimator = self._settings.get("algorithm", {}).get("adv_estimator")
            yield (
                f"{self.checkpoint} has no critic: the run that wrote it"
                f"{f' (algorithm.adv_estimator={estimator})' if estimator else ''} trained none, but "
                f"algorithm.adv_estimator={self.config.algorithm.adv_estimator} needs one; keep the "
                "estimator, or start in another trainer.default_local_dir with its model "
                f"({MODEL_KEY}={self.checkpoint})"
            )

    def require_same_data(self, dataset: Dataset | None) -> None:
        """Raises an error if `dataset` is not the data set that the checkpoint was trained on."""
        if self.checkpoint is None or not isinstance(dataset, Stateful):
            return
        with contextlib.suppress(
            checkpoint.CheckpointError
        ):  # reported when the checkpoint is loaded
            state = checkpoint.read_state(self.checkpoint, "loader")["loader"]
            if isinstance(state, dict) and state.get("dataset") is not None:
                dataset.load_state_dict(state["dataset"])

    def changes(self, total_steps: int) -> Iterator[str]:
        """Yields one line per setting that differs from the earlier run."""
        old_config = self._settings
        if self.checkpoint is None or not old_config or self.config.trainer.val_only:
            return
        if checkpoint.checkpoint_from_path(str(self.checkpoint))[0] >= total_steps:
            return
        path = self.config.actor_rollout_ref.model.path
        base_model = old_config.get("actor_rollout_ref", {}).get("model", {}).get("path")
        if base_model is not None and base_model != path:
            yield (
                f"{self.checkpoint} was trained from {MODEL_KEY}={base_model}, not from {path}; to train "
                f"{path}, set another trainer.default_local_dir"
            )
        for change in checkpoint.changed_settings(
            old_config, config_to_dict(self.config), checkpoint.PPO_KEYS
        ):
            yield f"from {self.checkpoint.name} on: {change}"
