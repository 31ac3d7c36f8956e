"""`python -m hone.trainer.main_generation_server key=value …` generates with the keys of RL training.

As in verl, it takes the `ppo_trainer` config and `+data.output_path`; it then runs `hone generate`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeVar

from hone.config import PPOTrainerConfig
from hone.config.block import Block
from hone.config.generation import GenerationConfig, GenerationDataConfig, GenerationRolloutConfig
from hone.config.model import ModelSourceConfig
from hone.config.trainer import RunConfig
from hone.trainer.command_line import composed_of, require_given, run_module, run_ranks
from hone.trainer.main_generation import run
from hone.types import JsonValue

_MODULE = "hone.trainer.main_generation_server"
MUST_BE_GIVEN = {
    "actor_rollout_ref.model.path": "the model's folder or hub name",
    "data.train_files": "the files of prompts",
    "data.output_path": "the file to write",
}
B = TypeVar("B", bound=Block)


def main(arguments: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    composed = composed_of(words, tree="ppo_trainer", program="main_generation_server")
    require_given(composed, MUST_BE_GIVEN)
    config = generation_config(composed.config)
    notes = tuple(note for note in composed.notes if not note.startswith("data.output_path="))
    run_ranks(replace(composed, config=config, notes=notes), words, _MODULE, lambda: run(config))


def generation_config(config: PPOTrainerConfig) -> GenerationConfig:
    """Convert the keys of RL training to those of generation."""
    policy, data = config.actor_rollout_ref, config.data
    own: dict[str, JsonValue | tuple[str, ...]] = {
        "path": data.train_files,
        "n_samples": policy.rollout.n,
        "output_path": data.output_path,
        "max_samples": data.train_max_samples,
    }
    return GenerationConfig(
        trainer=_shared(RunConfig, config.trainer),
        data=_shared(GenerationDataConfig, data, **own),
        model=_shared(ModelSourceConfig, policy.model),
        rollout=_shared(GenerationRolloutConfig, policy.rollout),
    )


def _shared(cls: type[B], block: Block, **own: JsonValue | tuple[str, ...]) -> B:
    """Build a config block from the keys that it shares with `block`, plus the `own` values."""
    names = [field.name for field in fields(cls) if field.name in block]
    return cls(**{name: block[name] for name in names} | own)


if __name__ == "__main__":
    sys.exit(run_module(main, "ppo_trainer", _MODULE))
