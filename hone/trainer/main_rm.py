"""`python -m hone.trainer.main_rm key=value …` trains a reward model on pairs of responses.

The loss is Bradley–Terry's; the result is a Hugging Face sequence classifier with one label.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from hone.config import ConfigError
from hone.config.sft import RMConfig
from hone.trainer.command_line import compose_arguments, require_keys, run_module, run_ranks
from hone.trainer.main_sft import run_stages

MODULE = "hone.trainer.main_rm"


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    composed = compose_arguments(arguments, schema="rm_trainer", program="hone train-rm")
    require_keys(composed, {"data.train_files": "the files of pairs"})
    run_ranks(composed, arguments, MODULE, lambda: run(composed.config, composed.origins))


def run(config: RMConfig, origins: Mapping[str, str] | None = None) -> None:
    """Runs this rank's part of the configured training."""
    from hone.trainer.sft.tasks import PairTask

    if "hf_model" not in config.checkpoint.save_contents:
        raise ConfigError("checkpoint.save_contents needs hf_model: RL starts from the export")
    run_stages([(config, PairTask())], origins)


if __name__ == "__main__":
    sys.exit(run_module(main, "rm_trainer", MODULE))
