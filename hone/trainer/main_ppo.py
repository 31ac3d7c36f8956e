"""`python -m hone.trainer.main_ppo key=value …`: RL training from the command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hone.config import PPOTrainerConfig
from hone.tracking.console import screen
from hone.trainer.command_line import announce, composed_of, finish


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    composed = composed_of(given, tree="ppo_trainer", program="hone.trainer.main_ppo")
    announce(composed)
    run(composed.config, composed.origins)


def train(arguments: Sequence[str]) -> None:
    """`hone train`: the same program, with starting values for what the command line leaves out."""
    from hone.trainer.starting_values import announcement, starting_values

    composed = composed_of(
        arguments, tree="ppo_trainer", program="hone train", starting=starting_values
    )
    for line in announcement(composed):
        screen().line(line)
    announce(composed)
    run(composed.config, composed.origins)


def run(config: PPOTrainerConfig, origins: Mapping[str, str] | None = None) -> None:
    """Train as configured, in this process or on Ray; `origins` say where values came from."""
    from hone.tracking.lock import lock_folder

    with lock_folder(
        config.trainer.default_local_dir
    ):  # before the imports and models take minutes
        from hone.models.from_config import build_tokenizer
        from hone.trainer.ppo.trainer import PPOTrainer

        model = config.actor_rollout_ref.model
        tokenizer = build_tokenizer(replace(model, trust_remote_code=config.data.trust_remote_code))
        trainer = PPOTrainer(config, tokenizer)
        try:
            trainer.init_workers()
            trainer.fit(origins)
        finally:
            trainer.shutdown()


if __name__ == "__main__":
    sys.exit(finish(main))
