"""`python -m hone.trainer.main_dpo key=value …` trains a policy on preferences: DPO, SimPO, ORPO, KTO, ….

The reference is the policy as it starts; its log-probabilities are computed before the first update.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from hone.config.preference import DPOConfig
from hone.trainer.command_line import compose_arguments, require_keys, run_module, run_ranks
from hone.trainer.main_sft import run_stages

MODULE = "hone.trainer.main_dpo"


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    composed = compose_arguments(arguments, schema="dpo_trainer", program="hone dpo")
    require_keys(composed, {"data.train_files": "the files of preferences"})
    run_ranks(composed, arguments, MODULE, lambda: run(composed.config, composed.origins))


def run(config: DPOConfig, origins: Mapping[str, str] | None = None) -> None:
    """Runs this rank's part of the configured training."""
    from hone.trainer.sft.preferences import preference_task

    run_stages([(config, preference_task(config.algorithm))], origins)


if __name__ == "__main__":
    sys.exit(run_module(main, "dpo_trainer", MODULE))
