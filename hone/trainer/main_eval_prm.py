"""`python -m hone.trainer.main_eval_prm … key=value …` evaluates a process reward model.

`--processbench FILE` tests whether the model finds the first wrong step, `--best-of-n FILE` how well the
model selects among n responses, and `data.val_files` how well it classifies labelled steps.
`--baseline MODEL` evaluates another model for comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hone.config import ConfigError, replace
from hone.config.sft import PRMConfig
from hone.trainer.command_line import check_output_file, compose_arguments, require_keys, run_module

MODULE = "hone.trainer.main_eval_prm"


def main(arguments: Sequence[str] | None = None) -> None:
    options, overrides = build_parser().parse_known_args(arguments)
    composed = compose_arguments(overrides, schema="prm_trainer", program="hone eval-prm")
    require_keys(composed, {"model.path": "the process reward model"})
    config: PRMConfig = composed.config
    if not (options.processbench or options.best_of_n or config.data.val_files):
        raise ConfigError(
            "nothing to evaluate on; give --processbench FILE, --best-of-n FILE or data.val_files=FILE"
        )
    if not options.best_of_n and (options.aggregate or options.split):
        raise ConfigError("--aggregate and --split need --best-of-n FILE")
    if options.split == "":
        raise ConfigError("--split is empty; give the text between the steps of a response")
    check_single_rank(config.world_size, "hone eval-prm")
    if options.out:
        check_output_file(options.out, "--out")
    paths = {"model": config.model.path}
    if options.baseline:
        paths["baseline"] = options.baseline
    results = {
        name: evaluate_model(replace(config, "model.path", path), options)
        for name, path in paths.items()
    }
    print_table(results)
    write_json(results, options.out)


def build_parser() -> argparse.ArgumentParser:
    from hone.trainer.prm_metrics import AGGREGATES

    parser = argparse.ArgumentParser(
        prog="hone eval-prm",
        usage="hone eval-prm [--processbench FILE …] [--best-of-n FILE] [--baseline MODEL] "
        "[--out FILE] model.path=MODEL [key=value …]",
        allow_abbrev=False,
        description="Evaluate a process reward model on first wrong steps, on best-of-n selection, or on "
        "labelled steps (data.val_files).",
        epilog="`hone config show --tree prm_trainer` lists the keys.",
    )
    add, aggregates = parser.add_argument, list(AGGREGATES)
    processbench_help = "ProcessBench file; may be repeated"
    add("--processbench", action="append", default=[], metavar="FILE", help=processbench_help)
    add("--best-of-n", metavar="FILE", help="rows of n responses, as hone generate writes them")
    add("--aggregate", choices=aggregates, help="how step scores are combined (default: soft_min)")
    add("--split", help="text between the steps of a response (default: an empty line)")
    add("--baseline", metavar="MODEL", help="another model to evaluate, such as the untrained base")
    add("--out", metavar="FILE", help="JSON file for the results")
    return parser


def evaluate_model(config: PRMConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the results of one model on all files in the options and the config."""
    from hone.data.steps import unescape_newlines
    from hone.trainer.prm_evaluation import (
        StepScorer,
        best_of_n,
        labelled_step_metrics,
        process_bench,
    )

    scorer = StepScorer(config)
    results: dict[str, Any] = {"path": config.model.path}
    if options.processbench:
        results["processbench"] = process_bench(scorer, options.processbench)
    if options.best_of_n:
        aggregate = options.aggregate or "soft_min"
        step_separator = unescape_newlines(options.split or "\n\n")
        results["best_of_n"] = best_of_n(scorer, options.best_of_n, aggregate, step_separator)
    if config.data.val_files:
        results["labelled_steps"] = labelled_step_metrics(scorer)
    return results


def check_single_rank(world_size: int, program: str) -> None:
    """Raises an error if the config or torchrun asks for several ranks."""
    from hone.trainer.ranks import Ranks

    if world_size > 1 or Ranks.from_env().world_size > 1:
        raise ConfigError(
            f"{program} runs as one process; leave trainer.nnodes and n_gpus_per_node at 1"
        )


def write_json(results: dict[str, Any], out: str | None) -> None:
    """Writes the results to the file `out`; does nothing if `out` is None."""
    if out:
        from hone.tracking import atomic_write_text

        atomic_write_text(Path(out).expanduser(), json.dumps(results, indent=1) + "\n")


def print_table(results: dict[str, Any]) -> None:
    """Prints a table of metrics with one column per model."""
    from rich.table import Table

    from hone.tracking.console import screen

    metrics_by_model = {model: dict(_flatten_numbers(result)) for model, result in results.items()}
    table = Table("metric", *metrics_by_model)
    names = dict.fromkeys(name for metrics in metrics_by_model.values() for name in metrics)
    for name in names:
        values = (metrics.get(name) for metrics in metrics_by_model.values())
        table.add_row(name, *("–" if value is None else f"{value:.4g}" for value in values))
    screen().print(table)


def _flatten_numbers(
    result: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, float | None]]:
    """Yields the dotted name and the value of each number in a nested result."""
    for key, value in result.items():
        if isinstance(value, dict):
            yield from _flatten_numbers(value, f"{prefix}{key}.")
        elif value is None or isinstance(value, int | float):
            yield f"{prefix}{key}", value


if __name__ == "__main__":
    sys.exit(run_module(main, "prm_trainer", MODULE))
