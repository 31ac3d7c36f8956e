"""`python -m hone.trainer.main_sft key=value …` runs supervised fine-tuning.

torchrun or `trainer.n_gpus_per_node` starts several ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from hone.config.sft import SFTConfig, SupervisedConfig
from hone.tracking.lock import lock_folder
from hone.trainer.command_line import check_output_folder, compose_arguments, run_module, run_ranks
from hone.trainer.ppo.remote_checkpoints import check_store
from hone.trainer.ranks import Ranks

if TYPE_CHECKING:
    from hone.trainer.sft.tasks import Task

MODULE = "hone.trainer.main_sft"


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    composed = compose_arguments(arguments, schema="sft_trainer", program="hone sft")
    run_ranks(composed, arguments, MODULE, lambda: run(composed.config, composed.origins))


def run(config: SFTConfig, origins: Mapping[str, str] | None = None) -> None:
    """Runs this rank's part of the configured training."""
    run_stages([(config, None)], origins)


def run_stages(
    stages: Sequence[tuple[SupervisedConfig, Task | None]], origins: Mapping[str, str] | None = None
) -> None:
    """Runs this rank's part of each stage, in order; a finished stage of a resumed run is skipped."""
    from hone.trainer.sft.order import check_divisible, data_parallel_slots

    ranks = Ranks.from_env()
    try:
        for config, task in stages:
            if ":" not in config.engine.strategy:  # the mesh of a custom engine is not known yet
                slots = data_parallel_slots(config, ranks.world_size)
                check_divisible(config.data.train_batch_size, slots)
            folder = config.trainer.default_local_dir
            check_output_folder(folder, "trainer.default_local_dir")
            check_store(config.trainer.default_hdfs_dir)
            # The first rank locks the folder for all ranks, since they start and end together.
            with lock_folder(folder) if ranks.is_first else nullcontext():
                from hone.trainer.sft.run import SFTRun

                SFTRun(config, ranks, origins, task).fit()
    finally:
        ranks.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run_module(main, "sft_trainer", MODULE))
