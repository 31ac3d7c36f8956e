"""The four trees by name: root class, aliases and checks of each, and verl's configs by name.

`compose` knows only this table; a new tree is one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hone.config import aliases, checks, idle
from hone.config.evaluation import EvaluationConfig
from hone.config.generation import GenerationConfig
from hone.config.keys import Value
from hone.config.schema import PPOTrainerConfig
from hone.config.sft import SFTConfig
from hone.config.sources import BuiltIn, Setting
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
        if self.name == "ppo_trainer":
            return aliases.translate(settings, problems)
        return [aliases.rename(s, self.name) for s in aliases.least_rates(settings)]

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
            idle.find_idle,
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

_STRATEGY = {"ppo_trainer": "actor_rollout_ref.actor.strategy", "sft_trainer": "engine.strategy"}
_OTHER_NAMES = {
    "ppo": "ppo_trainer",
    "sft": "sft_trainer",
    "sft_trainer_engine": "sft_trainer",
    "_generated_ppo_trainer": "ppo_trainer",
    "fully_async_ppo_trainer": "ppo_trainer",
    "one_step_off_ppo_trainer": "ppo_trainer",
    "transfer_queue_ppo_trainer": "ppo_trainer",
}
BUILT_IN: dict[str, BuiltIn] = {
    **{name: BuiltIn(name) for name in TREES},
    **{name: BuiltIn(tree) for name, tree in _OTHER_NAMES.items()},
    "dapo_trainer": BuiltIn("ppo_trainer", {"reward_model.reward_manager": "dapo"}),
}
"""verl's configs by name."""
BUILT_IN |= {
    name.replace("_trainer", f"_{engine}_trainer"): BuiltIn(
        config.tree, {**config.values, _STRATEGY[config.tree]: engine}
    )
    for name, config in BUILT_IN.items()
    if name.endswith("_trainer")
    for engine in ("megatron", "torchtitan", "veomni")
}
