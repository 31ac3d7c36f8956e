"""Declares `hone report`, which shows runs on a page, and `hone runs`, which lists them."""

from __future__ import annotations

from pathlib import Path

from hone.trainer.subcommands import Options, Subcommands, add_subcommand, print_text

_MAX_PIPE_COLUMNS = 10_000


def add_run_subcommands(subcommands: Subcommands) -> None:
    """Declares `hone report` and `hone runs`."""
    report = add_subcommand(
        subcommands, "report", _report, "write an HTML page about one run, or several overlaid"
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help="run folder")
    output = report.add_mutually_exclusive_group()
    output.add_argument("--out", default="report.html", help="file to write (default: report.html)")
    output.add_argument(
        "--follow",
        action="store_true",
        help="serve the page on this machine instead, and update it while the run goes on",
    )
    report.add_argument("--port", type=int, default=0, help="of --follow (default: a free one)")
    runs = add_subcommand(
        subcommands, "runs", _runs, "list the runs below a folder: state, step, best metric, age"
    )
    runs.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help="default: .")


def _report(options: Options, extra_arguments: list[str]) -> None:
    from hone.config import ConfigError
    from hone.tracking.live_page import report_server
    from hone.tracking.report import write_report

    runs = [Path(run).expanduser() for run in options.runs]
    if options.follow:
        server = report_server(runs, options.port)
        print_text(f"the report is at {server.address} (Ctrl+C ends it)")
        server.serve_until_interrupted()
        return
    out = Path(options.out).expanduser()
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name the file, as in {out / 'report.html'}")
    print_text(f"wrote {write_report(runs, out)}")


def _runs(options: Options, extra_arguments: list[str]) -> None:
    from rich.console import Console

    from hone.tracking.console import screen
    from hone.trainer.run_list import run_table

    table = run_table(Path(options.folder).expanduser())
    if table is None:
        print_text(f"no run below {options.folder}: no folder has a metrics.jsonl")
        return
    # A file or a pipe has no width; each run stays in one line.
    console = screen().console if screen().is_terminal else Console(width=_MAX_PIPE_COLUMNS)
    console.print(table)
