"""`python -m hone.trainer.main_eval key=value …` scores a file of responses.

`--model DIR --bench NAME --data DIR` first generates the responses to a benchmark.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hone import program_dialect
from hone.config import load_config
from hone.config.errors import ConfigError
from hone.config.generation import EvaluationConfig
from hone.trainer.command_line import (
    check_output_file,
    check_output_folder,
    compose_arguments,
    path_override,
    require_keys,
    run_module,
)
from hone.trainer.config_notes import print_config_notes
from hone.types import Function

if TYPE_CHECKING:
    from hone.trainer.evaluation import Evaluation

NO_INTERVAL = "–"


def main(arguments: Sequence[str] | None = None) -> None:
    options, overrides = _build_parser().parse_known_args(arguments)
    if options.bench or options.model or options.data or options.out:
        run_benchmarks(options, overrides)
        return
    composed = compose_arguments(overrides, schema="evaluation", program="hone eval")
    require_keys(composed, {"data.path": "the file of responses"})
    print_config_notes(composed)
    run(composed.config)


def _build_parser() -> argparse.ArgumentParser:
    from hone.trainer.benchmarks import BENCHMARKS

    parser = argparse.ArgumentParser(
        prog="hone eval",
        usage="hone eval key=value … | hone eval --model DIR --bench NAME --data DIR [--out DIR] "
        "[key=value …]",
        allow_abbrev=False,
        description="Score a file of responses (key=value overrides of the evaluation tree), or "
        "generate and score a benchmark. With --bench, overrides of trainer, data, model, rollout "
        "and search configure generation.",
        epilog="`hone config show --tree evaluation` lists the keys.",
    )
    bench_help = f"benchmark, may be repeated: {', '.join(BENCHMARKS)}"
    parser.add_argument("--model", help="model folder or training checkpoint")
    parser.add_argument("--bench", action="append", default=[], metavar="NAME", help=bench_help)
    parser.add_argument("--data", metavar="DIR", help="folder with the benchmarks' files")
    parser.add_argument("--out", metavar="DIR", help="output folder (default: eval)")
    return parser


def run(
    config: EvaluationConfig, title: str = "scores", compute_score: Function | None = None
) -> Evaluation:
    """Scores responses as configured, prints tables and writes the output files.

    `compute_score` replaces the configured scorer; `title` begins the heading of each table.
    """
    from hone.data.rows import expand_files
    from hone.trainer.evaluation import evaluate

    output = config.output
    for name in ("json_path", "plot_path", "scores_path"):
        if path := output[name]:
            # The file of scores may replace the responses, because it keeps all of their columns.
            inputs = [] if name == "scores_path" else expand_files(config.data.path, "data.path")
            check_output_file(path, f"output.{name}", inputs)
    if Path(output.scores_path or "").suffix not in ("", ".parquet"):
        raise ConfigError(f"output.scores_path={output.scores_path} must end in .parquet")
    result = evaluate(config, compute_score)
    print_tables(result, config, title)
    if output.json_path:
        from hone.tracking import atomic_write_text

        text = json.dumps(result.as_dict(), indent=1) + "\n"
        atomic_write_text(Path(output.json_path).expanduser(), text)
    if output.plot_path:
        draw_chart(result, Path(output.plot_path).expanduser(), title)
    if output.scores_path:
        from hone.data.rows import write_parquet

        write_parquet(result.rows, output.scores_path)
    return result


def run_benchmarks(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Generates and scores the responses to each benchmark, and writes all files to `--out`."""
    from hone.tracking.lock import lock_folder
    from hone.trainer.benchmarks import RAW_PROMPT_BENCHMARKS, benchmark_file, split_overrides
    from hone.trainer.main_generation import main as generate
    from hone.trainer.ranks import Ranks

    for name in ("model", "bench", "data"):
        if not getattr(options, name):
            raise ConfigError(f"--{name} is missing: hone eval --model DIR --bench NAME --data DIR")
    if Ranks.from_env().world_size > 1:
        raise ConfigError(
            "hone eval --bench starts its own ranks: run it without torchrun, with "
            "trainer.n_gpus_per_node=N"
        )
    out = Path(options.out or "eval").expanduser()
    check_output_folder(str(out), "--out")
    generation_overrides, scoring_overrides = split_overrides(overrides)
    # Errors of the scoring config are found now, because generation may take hours.
    load_config(scoring_overrides, config_name="evaluation", dialect=program_dialect())
    with lock_folder(out):
        data = Path(options.data).expanduser()
        files = {bench: benchmark_file(bench, data, out / "data") for bench in options.bench}
        for bench, file in files.items():
            responses = out / f"{bench}.parquet"
            defaults = ["data.n_samples=1", "rollout.do_sample=false", "data.overwrite=true"]
            defaults += ["data.prompt_format=raw"] if bench in RAW_PROMPT_BENCHMARKS else []
            paths = {"data.path": file, "data.output_path": responses, "model.path": options.model}
            path_overrides = [path_override(key, path) for key, path in paths.items()]
            generate([*defaults, *generation_overrides, *path_overrides])
            settings = [
                path_override("output.json_path", out / f"{bench}.json"),
                path_override("output.plot_path", out / f"{bench}.png"),
                *scoring_overrides,
                path_override("data.path", responses),
            ]
            run(
                load_config(settings, config_name="evaluation", dialect=program_dialect()),
                title=bench,
            )


def print_tables(result: Evaluation, config: EvaluationConfig, title: str) -> None:
    """Prints one table of metrics per data source, and the failures."""
    from rich.table import Table

    from hone.tracking.console import screen

    print_line = screen().line
    for name, source in result.sources.items():
        heading = f"{title}: {name} ({source.num_rows} rows, {source.num_responses} responses)"
        print_line(heading)  # rich would wrap a table's title to the width of the table
        table = Table("metric", "value", f"{config.metrics.confidence:.0%} interval")
        for metric, estimate in source.metrics.items():
            interval = NO_INTERVAL
            if estimate.low is not None:
                interval = f"{estimate.low:.4f} to {estimate.high:.4f}"
            table.add_row(metric, f"{estimate.value:.4f}", interval)
        screen().print(table)
        if any(estimate.low is None for estimate in source.metrics.values()):
            print_line(f"{NO_INTERVAL}: all rows have the same value, so there is no interval")
        for reason, count in source.failures.items():
            print_line(f"{name}: {count} responses could not be scored ({reason}); they count as 0")
    for reason, message in result.first_failures.items():
        print_line(f"first {reason}: {message}")


def draw_chart(result: Evaluation, path: Path, title: str) -> None:
    """Draws one panel per data source, with a bar and an interval for each metric."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from hone.tracking import atomic_path

    figure = Figure(figsize=(7.0, 1.0 + 2.4 * len(result.sources)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(result.sources), 1, squeeze=False)[:, 0]
    for panel, (name, source) in zip(panels, result.sources.items(), strict=True):
        values, lower_errors, upper_errors = [], [], []
        for estimate in source.metrics.values():
            low = estimate.value if estimate.low is None else estimate.low
            high = estimate.value if estimate.high is None else estimate.high
            values.append(estimate.value)
            lower_errors.append(max(estimate.value - low, 0.0))
            upper_errors.append(max(high - estimate.value, 0.0))
        panel.bar(
            list(source.metrics), values, yerr=[lower_errors, upper_errors], capsize=4, width=0.6
        )
        panel.set_ylabel(name)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


if __name__ == "__main__":
    sys.exit(run_module(main, "evaluation", "hone.trainer.main_eval"))
