"""The config trees by name; a new tree is one more entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hone.config import states
from hone.config.evaluation import EvaluationConfig
from hone.config.generation import GenerationConfig
from hone.config.reward_training import PRMConfig, RMConfig
from hone.config.schema import PPOTrainerConfig
from hone.config.sft import SFTConfig
from hone.config.sources import Setting


@dataclass(frozen=True)
class Tree:
    """A config tree with its root class and purpose."""

    name: str
    root: type
    purpose: str = ""

    def translate(self, settings: Sequence[Setting], problems: list[str]) -> list[Setting]:
        """Renames the settings to the key names of this tree."""
        return states.translate(settings, problems, self.name)


_PURPOSES = {
    "ppo_trainer": "reinforcement learning: `hone train`, `python -m hone.trainer.main_ppo`",
    "sft_trainer": "supervised fine-tuning: `hone sft`, `python -m hone.trainer.main_sft`",
    "prm_trainer": "process reward models: `hone train-prm`, `python -m hone.trainer.main_prm`",
    "rm_trainer": "outcome reward models: `hone train-rm`, `python -m hone.trainer.main_rm`",
    "generation": "responses for a file of prompts: `hone generate`, "
    "`python -m hone.trainer.main_generation`",
    "evaluation": "scores for a file of responses: `hone eval`, `python -m hone.trainer.main_eval`",
}
_ROOTS = (PPOTrainerConfig, SFTConfig, PRMConfig, RMConfig, GenerationConfig, EvaluationConfig)
TREES: dict[str, Tree] = {
    name: Tree(name, root, purpose)
    for (name, purpose), root in zip(_PURPOSES.items(), _ROOTS, strict=True)
}
