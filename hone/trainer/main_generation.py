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
    check_output_file,
    compose_arguments,
    path_override,
    require_keys,
    run_module,
    run_ranks,
)
from hone.trainer.ranks import Ranks

_MODULE = "hone.trainer.main_generation"
REQUIRED_KEYS = {
    "model.path": "the model's folder or hub name",
    "data.path": "the file of prompts",
    "data.output_path": "the file to write",
}


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = _expand_search_option(list(sys.argv[1:] if arguments is None else arguments))
    composed = compose_arguments(arguments, schema="generation", program="hone generate")
    require_keys(composed, REQUIRED_KEYS)
    run_ranks(composed, arguments, _MODULE, lambda: run(composed.config))


def _expand_search_option(arguments: list[str]) -> list[str]:
    """Replaces `--search URL` or `--search=URL` with `search.url='URL'`."""
    words: list[str] = []
    for argument in arguments:
        words += argument.split("=", 1) if argument.startswith("--search=") else [argument]
    if "--search" not in words:
        return words
    index = words.index("--search")
    url = "".join(words[index + 1 : index + 2])
    if not url:
        raise ConfigError(
            "--search needs the URL of a retrieval service; `hone serve-retriever` is one"
        )
    return [*words[:index], path_override("search.url", url), *words[index + 2 :]]


def run(config: GenerationConfig) -> Path:
    """Generates this rank's rows as configured, and returns the output file."""
    ranks = Ranks.from_env()
    check_output_file(config.data.output_path, "data.output_path")
    with lock_target(config.data.output_path) if ranks.is_first else nullcontext():
        from hone.trainer.generation import Generation

        ranks.init_process_group()
        try:
            return Generation(config, ranks).run()
        finally:
            ranks.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run_module(main, "generation", _MODULE))
