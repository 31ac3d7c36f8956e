"""`python -m hone.trainer.main_generation key=value …` generates responses for a file of prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from hone.config.errors import ConfigError
from hone.config.generation import GenerationConfig
from hone.tracking.lock import lock_target
from hone.trainer.command_line import (
    composed_of,
    require_file,
    require_given,
    run_module,
    run_ranks,
)
from hone.trainer.ranks import Ranks

_MODULE = "hone.trainer.main_generation"
MUST_BE_GIVEN = {
    "model.path": "the model's folder or hub name",
    "data.path": "the file of prompts",
    "data.output_path": "the file to write",
}


def main(arguments: Sequence[str] | None = None) -> None:
    words = _with_search(list(sys.argv[1:] if arguments is None else arguments))
    composed = composed_of(words, tree="generation", program="hone generate")
    require_given(composed, MUST_BE_GIVEN)
    run_ranks(composed, words, _MODULE, lambda: run(composed.config))


def _with_search(words: list[str]) -> list[str]:
    """Replace `--search URL` by the config key it abbreviates."""
    if "--search" not in words:
        return words
    at = words.index("--search")
    if len(words) == at + 1:
        raise ConfigError(
            "--search needs the URL of a retrieval service; `hone serve-retriever` is one"
        )
    return [*words[:at], f"search.url={words[at + 1]}", *words[at + 2 :]]


def run(config: GenerationConfig) -> Path:
    """Generate this rank's rows as configured and return the output file."""
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
    sys.exit(run_module(main, "generation", _MODULE))
