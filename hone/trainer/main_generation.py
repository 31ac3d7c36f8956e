"""`python -m hone.trainer.main_generation key=value …`: responses for a file of prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from hone.config.errors import ConfigError
from hone.config.generation import GenerationConfig
from hone.tracking.lock import lock_target
from hone.trainer.command_line import announce, composed_of, run_module
from hone.trainer.folders import require_file
from hone.trainer.given import require_given
from hone.trainer.launcher import launch
from hone.trainer.ranks import Ranks, must_launch

_MODULE = "hone.trainer.main_generation"
MUST_BE_GIVEN = {
    "model.path": "the model's folder or hub name",
    "data.path": "the file of prompts",
    "data.output_path": "the file to write",
}


def main(arguments: Sequence[str] | None = None) -> None:
    given = _with_search(list(sys.argv[1:] if arguments is None else arguments))
    composed = composed_of(given, tree="generation", program="hone generate")
    require_given(composed, MUST_BE_GIVEN)
    config: GenerationConfig = composed.config
    if Ranks.here().is_first:
        announce(composed)
    if config.trainer.controller == "ray":
        raise ConfigError(
            "trainer.controller=ray: the ranks of `hone generate` are plain processes; leave it at "
            "auto, or start them on the cluster's machines with torchrun"
        )
    if must_launch(config.world_size, config.trainer.nnodes, _MODULE):
        launch(config.world_size, _MODULE, given)
        return
    run(config)


def _with_search(given: list[str]) -> list[str]:
    """`--search URL` as the key that it stands for."""
    if "--search" not in given:
        return given
    at = given.index("--search")
    if len(given) == at + 1:
        raise ConfigError(
            "--search needs the URL of a retrieval service; `hone serve-retriever` is one"
        )
    return [*given[:at], f"search.url={given[at + 1]}", *given[at + 2 :]]


def run(config: GenerationConfig) -> Path:
    """Generate as configured, as this rank; the file that was written."""
    ranks = Ranks.here()
    require_file(config.data.output_path, "data.output_path")
    with lock_target(config.data.output_path) if ranks.is_first else nullcontext():
        from hone.trainer.generation import Generation

        ranks.join()
        try:
            return Generation(config, ranks).run()
        finally:
            ranks.leave()


if __name__ == "__main__":
    sys.exit(run_module(main, "generation", "hone.trainer.main_generation"))
