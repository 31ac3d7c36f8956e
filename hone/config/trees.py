"""The config trees by name; a new tree is one more entry."""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.evaluation import EvaluationConfig
from hone.config.generation import GenerationConfig
from hone.config.reward_training import PRMConfig, RMConfig
from hone.config.schema import PPOTrainerConfig
from hone.config.sft import SFTConfig


@dataclass(frozen=True)
class Tree:
    """A config tree with its root class and purpose."""

    name: str
    root: type
    purpose: str = ""


_RUN = "python -m hone.trainer"
_TREES = (
    Tree(
        "ppo_trainer", PPOTrainerConfig, f"reinforcement learning: `hone train`, `{_RUN}.main_ppo`"
    ),
    Tree("sft_trainer", SFTConfig, f"supervised fine-tuning: `hone sft`, `{_RUN}.main_sft`"),
    Tree("prm_trainer", PRMConfig, f"process reward models: `hone train-prm`, `{_RUN}.main_prm`"),
    Tree("rm_trainer", RMConfig, f"outcome reward models: `hone train-rm`, `{_RUN}.main_rm`"),
    Tree("generation", GenerationConfig, f"responses: `hone generate`, `{_RUN}.main_generation`"),
    Tree("evaluation", EvaluationConfig, f"scores of responses: `hone eval`, `{_RUN}.main_eval`"),
)
TREES: dict[str, Tree] = {tree.name: tree for tree in _TREES}
