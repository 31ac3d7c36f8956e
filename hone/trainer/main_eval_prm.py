"""`python -m hone.trainer.main_eval_prm … key=value …` evaluates a process reward model.

`--processbench FILE` evaluates first wrong steps, `--best-of-n FILE` a ranking of responses, and
`data.val_files` labelled steps. `--baseline MODEL` is evaluated, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hone.config import ConfigError, replace
from hone.config.sft import PRMConfig
from hone.trainer.command_line import compose_arguments, require_file, require_keys, run_module
from hone.types import Fields

MODULE = "hone.trainer.main_eval_prm"


def main(arguments: Sequence[str] | None = None) -> None:
    options, overrides = parser().parse_known_args(arguments)
    composed = compose_arguments(overrides, schema="prm_trainer", program="hone eval-prm")
    require_keys(composed, {"model.path": "the process reward model"})
    config: PRMConfig = composed.config
    if not (options.processbench or options.best_of_n or config.data.val_files):
        raise ConfigError(
            "nothing to evaluate on; give --processbench FILE, --best-of-n FILE or data.val_files=FILE"
        )
    check_single_rank(config.world_size, "hone eval-prm")
    if options.out:
        require_file(options.out, "--out")
    paths = {"model": config.model.path}
    if options.baseline:
        paths["baseline"] = options.baseline
    results = {
        name: evaluate_model(replace(config, "model.path", path), options)
        for name, path in paths.items()
    }
    show(results)
    write_json(results, options.out)


def parser() -> argparse.ArgumentParser:
    from hone.trainer.step_scores import AGGREGATES

    commands = argparse.ArgumentParser(
        prog="hone eval-prm",
        usage="hone eval-prm [--processbench FILE …] [--best-of-n FILE] [--baseline MODEL] "
        "[--out FILE] model.path=MODEL [key=value …]",
        allow_abbrev=False,
        description="Evaluate a process reward model on first wrong steps, on a ranking of responses, or "
        "on labelled steps (data.val_files).",
        epilog="`hone config show --tree prm_trainer` lists the keys.",
    )
    add, aggregates = commands.add_argument, list(AGGREGATES)
    add("--processbench", action="append", default=[], metavar="FILE", help="may be repeated")
    add("--best-of-n", metavar="FILE", help="rows of n responses, as hone generate writes them")
    add("--aggregate", choices=aggregates, default="soft_min", help="from steps to a response")
    add("--split", default="\n\n", help="text that ends a step of a response (an empty line)")
    add("--baseline", metavar="MODEL", help="another model to evaluate, such as the untrained base")
    add("--out", metavar="FILE", help="JSON file for the results")
    return commands


def evaluate_model(config: PRMConfig, options: argparse.Namespace) -> Fields:
    """Returns every requested result of one model."""
    from hone.data.steps import typed_text
    from hone.trainer.prm_evaluation import StepScorer, best_of_n, labelled_steps, process_bench

    scorer = StepScorer(config)
    results: Fields = {"path": config.model.path}
    if options.processbench:
        results["processbench"] = process_bench(scorer, options.processbench)
    if options.best_of_n:
        file, split = options.best_of_n, typed_text(options.split)
        results["best_of_n"] = best_of_n(scorer, file, options.aggregate, split)
    if config.data.val_files:
        results["labelled_steps"] = labelled_steps(scorer)
    return results


def check_single_rank(world_size: int, program: str) -> None:
    """Raises an error if several ranks are configured or running."""
    from hone.trainer.ranks import Ranks

    if world_size > 1 or Ranks.from_env().world_size > 1:
        raise ConfigError(
            f"{program} runs as one process; leave trainer.nnodes and n_gpus_per_node at 1"
        )


def write_json(results: Fields, out: str | None) -> None:
    if out:
        from hone.tracking import atomic_write_text

        atomic_write_text(Path(out).expanduser(), json.dumps(results, indent=1) + "\n")


def show(results: Fields) -> None:
    """Prints one table over all models."""
    from rich.table import Table

    from hone.tracking.console import screen

    rows = {name: dict(_numbers(result)) for name, result in results.items()}
    table = Table("metric", *rows)
    for metric in dict.fromkeys(key for values in rows.values() for key in values):
        cells = (values.get(metric) for values in rows.values())
        table.add_row(metric, *("–" if x is None else f"{x:.4g}" for x in cells))
    screen().print(table)


def _numbers(result: Fields, prefix: str = "") -> Iterator[tuple[str, float | None]]:
    """Yields the numbers of a result by dotted name; an estimate is its value."""
    for key, value in result.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{key}.")
        elif value is None or isinstance(value, int | float):
            yield f"{prefix}{key}", value


if __name__ == "__main__":
    sys.exit(run_module(main, "prm_trainer", MODULE))
