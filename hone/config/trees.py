"""The four trees by name: root class, aliases and checks of each.

`compose` knows only this table; a new tree is one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hone.config import aliases, checks, conditions
from hone.config.block import Value
from hone.config.evaluation import EvaluationConfig
from hone.config.generation import GenerationConfig
from hone.config.schema import PPOTrainerConfig
from hone.config.sft import SFTConfig
from hone.config.sources import Setting
from hone.types import JsonValue


@dataclass(frozen=True)
class Tree:
    """One config tree."""

    name: str
    root: type
    purpose: str
    find_problems: Callable[[Value], Iterable[str]] = lambda config: ()
    """One sentence per defect that needs more than one key."""
    settle: Callable[[Value], Iterable[tuple[str, JsonValue, str]]] = lambda config: ()
    """Keys whose value cannot stand beside the others, the value that can, and a sentence."""
    find_idle: Callable[[Value], Iterable[tuple[str, str]]] = lambda config: ()
    """Keys or blocks that have no effect beside the others, and why."""

    def translate(self, settings: Sequence[Setting], problems: list[str]) -> list[Setting]:
        """The settings under the names that keys have in this tree."""
        return aliases.translate(settings, problems, self.name)

    def new_name(self, key: str) -> str:
        """The name that a key has in this tree."""
        return aliases.new_name(key, self.name)


TREES: dict[str, Tree] = {
    tree.name: tree
    for tree in (
        Tree(
            "ppo_trainer",
            PPOTrainerConfig,
            "reinforcement learning: `hone train`, `python -m hone.trainer.main_ppo`",
            checks.find_problems,
            checks.settle,
            conditions.find_idle,
        ),
        Tree(
            "sft_trainer",
            SFTConfig,
            "supervised fine-tuning: `hone sft`, `python -m hone.trainer.main_sft`",
            checks.sft_problems,
            checks.settle_sft,
        ),
        Tree(
            "generation",
            GenerationConfig,
            "responses for a file of prompts: `hone generate`, `python -m hone.trainer.main_generation`",
            checks.generation_problems,
        ),
        Tree(
            "evaluation",
            EvaluationConfig,
            "scores for a file of responses: `hone eval`, `python -m hone.trainer.main_eval`",
        ),
    )
}
