"""`python -m hone.trainer.main_sft key=value …` runs supervised fine-tuning.

It runs in one process, or in those that torchrun or `trainer.n_gpus_per_node` starts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from hone.config.sft import SFTConfig
from hone.tracking.lock import lock_folder
from hone.trainer.command_line import composed_of, require_folder, run_module, run_ranks
from hone.trainer.ranks import Ranks

MODULE = "hone.trainer.main_sft"


def main(arguments: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    composed = composed_of(words, tree="sft_trainer", program="hone sft")
    run_ranks(composed, words, MODULE, lambda: run(composed.config, composed.origins))


def run(config: SFTConfig, origins: Mapping[str, str] | None = None) -> None:
    """Train as configured, as one rank."""
    from hone.trainer.sft.order import refuse_uneven

    ranks = Ranks.here()
    if ":" not in config.engine.strategy:  # a custom engine's mesh is known only after it is built
        refuse_uneven(config.data.train_batch_size, ranks.world_size)
    require_folder(config.trainer.default_local_dir, "trainer.default_local_dir")
    # The first rank locks the folder for all ranks, since they start and end together.
    with lock_folder(config.trainer.default_local_dir) if ranks.is_first else nullcontext():
        from hone.trainer.sft.run import SFTRun

        try:
            SFTRun(config, ranks, origins).fit()
        finally:
            ranks.leave()


if __name__ == "__main__":
    sys.exit(run_module(main, "sft_trainer", MODULE))
