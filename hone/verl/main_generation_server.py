"""`python -m hone.trainer.main_generation_server key=value …` generates with the keys of RL training.

As in verl, the keys are those of `ppo_trainer` and `+data.output_path`. The program runs `hone generate`.
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
from hone.trainer.command_line import compose_arguments, require_keys, run_module, run_ranks
from hone.trainer.main_generation import run
from hone.types import JsonValue

_MODULE = "hone.trainer.main_generation_server"
REQUIRED_KEYS = {
    "actor_rollout_ref.model.path": "the model's folder or hub name",
    "data.train_files": "the files of prompts",
    "data.output_path": "the file to write",
}
ConfigBlock = TypeVar("ConfigBlock", bound=Block)


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    composed = compose_arguments(arguments, schema="ppo_trainer", program="main_generation_server")
    require_keys(composed, REQUIRED_KEYS)
    config = generation_config(composed.config)
    notes = tuple(note for note in composed.notes if not note.startswith("data.output_path="))
    composed = replace(composed, config=config, notes=notes)
    run_ranks(composed, arguments, _MODULE, lambda: run(config))


def generation_config(config: PPOTrainerConfig) -> GenerationConfig:
    """Converts the config of RL training to a config of generation."""
    policy, data = config.actor_rollout_ref, config.data
    data_values: dict[str, JsonValue | tuple[str, ...]] = {
        "path": data.train_files,
        "n_samples": policy.rollout.n,
        "output_path": data.output_path,
        "max_samples": data.train_max_samples,
    }
    return GenerationConfig(
        trainer=_convert_block(RunConfig, config.trainer),
        data=_convert_block(GenerationDataConfig, data, **data_values),
        model=_convert_block(ModelSourceConfig, policy.model),
        rollout=_convert_block(GenerationRolloutConfig, policy.rollout),
    )


def _convert_block(
    block_class: type[ConfigBlock], block: Block, **values: JsonValue | tuple[str, ...]
) -> ConfigBlock:
    """Builds a block of `block_class` from `values`, and from the values of `block` for keys of both."""
    names = [field.name for field in fields(block_class) if field.name in block]
    return block_class(**{name: block[name] for name in names} | values)


if __name__ == "__main__":
    sys.exit(run_module(main, "ppo_trainer", _MODULE))
