"""`python -m hone.trainer.main_eval key=value …`: score a file of responses.

`--model DIR --bench NAME --data DIR` generates the responses to a benchmark first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hone.config import load_config
from hone.config.errors import ConfigError
from hone.config.evaluation import EvaluationConfig
from hone.trainer.command_line import announce, composed_of, run_module
from hone.trainer.folders import require_file, require_folder
from hone.trainer.given import require_given
from hone.types import Function

if TYPE_CHECKING:
    from hone.trainer.evaluation import Estimate, Evaluation

UNKNOWN = "–"
"""Stands for an interval that the rows cannot give."""


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    chosen, rest = parser.parse_known_args(given)
    if chosen.bench or chosen.model:
        run_benchmarks(chosen, rest)
        return
    composed = composed_of(rest, tree="evaluation", program="hone eval")
    require_given(composed, {"data.path": "the file of responses"})
    announce(composed)
    run(composed.config)


def _parser() -> argparse.ArgumentParser:
    from hone.trainer.benchmarks import NAMES

    parser = argparse.ArgumentParser(
        prog="hone eval",
        usage="hone eval key=value … | hone eval --model DIR --bench NAME --data DIR [--out DIR] "
        "[key=value …]",
        allow_abbrev=False,
        description="Score a file of responses (key=value overrides of the evaluation tree), or "
        "generate and score a benchmark. With --bench, overrides of trainer, data, model and "
        "rollout say how to generate.",
        epilog="`hone config show --tree evaluation` lists the keys.",
    )
    parser.add_argument("--model", help="model folder or training checkpoint")
    parser.add_argument(
        "--bench",
        action="append",
        default=[],
        metavar="NAME",
        help=f"benchmark, may be repeated: {', '.join(NAMES)}",
    )
    parser.add_argument("--data", metavar="DIR", help="folder with the benchmarks' files")
    parser.add_argument("--out", metavar="DIR", default="eval", help="folder to write to")
    return parser


def run(
    config: EvaluationConfig, title: str = "scores", compute_score: Function | None = None
) -> Evaluation:
    """Score as configured, or by the function given; show the table, write what was asked for."""
    from hone.trainer.evaluation import evaluate

    for name in ("json_path", "plot_path", "scores_path"):
        if path := getattr(config.output, name):
            require_file(path, f"output.{name}")
    result = evaluate(config, compute_score)
    show(result, config, title)
    output = config.output
    if output.json_path:
        from hone.tracking import atomic_write_text

        atomic_write_text(
            Path(output.json_path).expanduser(), json.dumps(result.as_dict(), indent=1) + "\n"
        )
    if output.plot_path:
        draw(result, Path(output.plot_path).expanduser(), title)
    if output.scores_path:
        from hone.data.rows import write_parquet

        write_parquet(result.rows, output.scores_path)
    return result


def run_benchmarks(chosen: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Evaluation]:
    """Generate (over several processes where asked) and score each benchmark; files go to `--out`."""
    from hone.tracking.lock import lock_folder
    from hone.trainer.benchmarks import split_overrides
    from hone.trainer.ranks import Ranks

    for name in ("model", "bench", "data"):
        if not getattr(chosen, name):
            raise ConfigError(f"--{name} is missing: hone eval --model DIR --bench NAME --data DIR")
    if Ranks.here().world_size > 1:
        raise ConfigError(
            "hone eval --bench is one process that starts the others itself: run it without torchrun, "
            "with trainer.n_gpus_per_node=N"
        )
    require_folder(chosen.out, "--out")
    with lock_folder(chosen.out):
        return _run_benchmarks(chosen, *split_overrides(overrides))


def _run_benchmarks(
    chosen: argparse.Namespace, generating: Sequence[str], scoring: Sequence[str]
) -> dict[str, Evaluation]:
    from hone.trainer.benchmarks import RAW, benchmark_file
    from hone.trainer.main_generation import main as generate

    out = Path(chosen.out).expanduser()
    results = {}
    for bench in chosen.bench:
        file = benchmark_file(bench, Path(chosen.data).expanduser(), out / "data")
        responses = out / f"{bench}.parquet"
        usual = ["data.n_samples=1", "rollout.do_sample=false", "data.overwrite=true"]
        usual += ["data.prompt_format=raw"] if bench in RAW else []
        generate(
            [
                *usual,
                *generating,
                f"data.path={file}",
                f"model.path={chosen.model}",
                f"data.output_path={responses}",
            ]
        )
        results[bench] = run(
            load_config(
                [
                    f"output.json_path={out / f'{bench}.json'}",
                    f"output.plot_path={out / f'{bench}.png'}",
                    *scoring,
                    f"data.path={responses}",
                ],
                config_name="evaluation",
            ),
            title=bench,
        )
    return results


def show(result: Evaluation, config: EvaluationConfig, title: str) -> None:
    """The table on the console."""
    from rich.table import Table

    from hone.tracking.console import screen

    for name, source in result.sources.items():
        heading = f"{title}: {name} ({source.rows} rows, {source.responses} responses)"
        table = Table(title=heading)
        for column in ("metric", "value", f"{config.metrics.confidence:.0%} interval"):
            table.add_column(column)
        for metric, estimate in source.metrics.items():
            table.add_row(metric, f"{estimate.value:.4f}", interval_in_words(estimate))
        screen().say(table)
        if any(estimate.low is None for estimate in source.metrics.values()):
            screen().line(
                f"{UNKNOWN}: all rows have the same value, which says nothing of its spread"
            )
        for reason, count in source.failures.items():
            screen().line(f"{name}: {count} responses could not be scored ({reason}); they count 0")
    for reason, message in result.first_failures.items():
        screen().line(f"first {reason}: {message}")


def interval_in_words(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return UNKNOWN
    return f"{estimate.low:.4f} to {estimate.high:.4f}"


def draw(result: Evaluation, path: Path, title: str) -> Path:
    """Every metric with its interval, one panel a data source."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from hone.tracking import atomic_path

    figure = Figure(figsize=(7.0, 1.0 + 2.4 * len(result.sources)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(result.sources), 1, squeeze=False)[:, 0]
    for panel, (name, source) in zip(panels, result.sources.items(), strict=True):
        values = [e.value for e in source.metrics.values()]
        below, above = zip(*map(reaches, source.metrics.values()), strict=True)
        panel.bar(list(source.metrics), values, yerr=[below, above], capsize=4, width=0.6)
        panel.set_ylabel(name)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return path


def reaches(estimate: Estimate) -> tuple[float, float]:
    """How far the interval goes below and above the value; none is drawn where it is not known."""
    if estimate.low is None or estimate.high is None:
        return 0.0, 0.0
    return max(estimate.value - estimate.low, 0.0), max(estimate.high - estimate.value, 0.0)


if __name__ == "__main__":
    sys.exit(run_module(main, "evaluation", "hone.trainer.main_eval"))
