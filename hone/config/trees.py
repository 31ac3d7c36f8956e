"""The four trees by name: root class and checks of each.

`compose` knows only this table; a new tree is one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hone.config import aliases, checks
from hone.config.convert import Value
from hone.config.evaluation import EvaluationConfig
from hone.config.generation import GenerationConfig
from hone.config.schema import PPOTrainerConfig
from hone.config.sft import SFTConfig
from hone.config.sources import Setting
from hone.config.states import new_name
from hone.types import JsonValue


@dataclass(frozen=True)
class Tree:
    """One config tree."""

    name: str
    root: type
    purpose: str = ""
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
        return new_name(key, self.name)


_RL = "reinforcement learning: `hone train`, `python -m hone.trainer.main_ppo`"
_SFT = "supervised fine-tuning: `hone sft`, `python -m hone.trainer.main_sft`"
_FILES = "a file of {}: `hone {}`, `python -m hone.trainer.main_{}`"
_PROMPTS = "responses for " + _FILES.format("prompts", "generate", "generation")
_RESPONSES = "scores for " + _FILES.format("responses", "eval", "eval")
_ALL = (
    Tree(
        "ppo_trainer", PPOTrainerConfig, _RL, checks.find_problems, checks.settle, checks.find_idle
    ),
    Tree("sft_trainer", SFTConfig, _SFT, checks.sft_problems, checks.settle_sft),
    Tree("generation", GenerationConfig, _PROMPTS, checks.generation_problems),
    Tree("evaluation", EvaluationConfig, _RESPONSES),
)
TREES: dict[str, Tree] = {tree.name: tree for tree in _ALL}
