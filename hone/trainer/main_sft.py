"""`python -m hone.trainer.main_sft key=value …`: supervised fine-tuning from the command line.

One process, or as many as torchrun or `trainer.n_gpus_per_node` start.
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
    """Train as configured, as this rank."""
    from hone.trainer.sft.order import refuse_uneven

    ranks = Ranks.here()
    if ":" not in config.engine.strategy:  # the mesh of another engine is known when it is built
        refuse_uneven(config.data.train_batch_size, ranks.world_size)
    require_folder(config.trainer.default_local_dir, "trainer.default_local_dir")
    # The first rank holds the folder for all: they live and die together.
    with lock_folder(config.trainer.default_local_dir) if ranks.is_first else nullcontext():
        from hone.trainer.sft.run import SFTRun

        try:
            SFTRun(config, ranks, origins).fit()
        finally:
            ranks.leave()


if __name__ == "__main__":
    sys.exit(run_module(main, "sft_trainer", MODULE))
