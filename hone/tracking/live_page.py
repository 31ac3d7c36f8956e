"""`hone report --follow RUN…`: a server of this machine's pages, which change while the run goes on.

The server listens on loopback only, and has no authentication: every user of this machine can read the page.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from hone.services.json_server import JsonServer
from hone.tracking.metrics_file import find_metrics_file
from hone.tracking.report import load_runs, render

LOOPBACK = "127.0.0.1"
REPORT_PATH = "/"


class LiveReport:
    """The report of runs that may still go on; the page is made anew after a file of the runs has changed."""

    def __init__(self, runs: Sequence[str | os.PathLike[str]]) -> None:
        self._runs = list(runs)
        self._lock = threading.Lock()
        self._state: object = None
        self._page = ""

    def page(self) -> str:
        with self._lock:  # requests come in threads
            state = [list(_file_states(find_metrics_file(run))) for run in self._runs]
            if state != self._state:
                self._page, self._state = render(load_runs(self._runs), is_live=True), state
            return self._page


def report_server(runs: Sequence[str | os.PathLike[str]], port: int = 0) -> JsonServer:
    """Returns a server of the report of runs, which must have a `metrics.jsonl`; port 0 is any free one."""
    report = LiveReport(runs)
    report.page()  # raises for a folder without a run before the server starts
    return JsonServer(LOOPBACK, port, posts={}, gets={REPORT_PATH: report.page}, max_body_bytes=0)


def _file_states(metrics_file: Path) -> Iterator[tuple[str, int, int]]:
    """Yields the name, time and size of the files and folders that the report reads."""
    folder = metrics_file.parent
    names = ("config.yaml", "config_origins.json", "rollouts", "validation")
    for path in (metrics_file, *(folder / name for name in names)):
        if path.exists():
            stat = path.stat()
            yield path.name, stat.st_mtime_ns, stat.st_size
