"""`python -m hone.trainer.main_ppo key=value …`: RL training from the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hone.config import PPOTrainerConfig
from hone.trainer.command_line import config_of


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    run(config_of(given, config_name="ppo_trainer", program="hone train"))


def run(config: PPOTrainerConfig) -> None:
    """Train as configured, in this process or on Ray."""
    from hone.models.load import load_tokenizer
    from hone.trainer.ppo.trainer import PPOTrainer

    model = config.actor_rollout_ref.model
    tokenizer = load_tokenizer(
        model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code
    )
    if model.custom_chat_template:
        tokenizer.chat_template = model.custom_chat_template
    trainer = PPOTrainer(config, tokenizer)
    trainer.init_workers()
    try:
        trainer.fit()
    finally:
        trainer.shutdown()


if __name__ == "__main__":
    main()
