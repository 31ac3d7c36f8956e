"""Terminal output during a run: a live line, progress bars and plain text.

On a terminal, the live region (the live line and the bars) is below all other text. Elsewhere (a file, a
pipe, CI), a step is one short line (`trainer.console=full`: every metric), and long waits are reported.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import shlex
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hone.text import printable
from hone.tracking.contract import Number, RunInfo, Tracker

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress

SECONDS_BETWEEN_PLAIN_REPORTS = 15.0
STEPS_FOR_ETA = 20
LIVE_LINE_METRICS = {
    "reward": ("reward/mean", "critic/rewards/mean", "critic/score/mean"),
    "accuracy": ("accuracy",),
    "loss": ("train/loss",),
    "KL": ("actor/kl_loss", "actor/reward_kl_penalty"),  # to the reference model
    "length": ("response_length/mean",),
    "tokens/s": ("perf/throughput", "train/throughput"),
}
"""Names of metrics by label; the live line has the first metric that the step has."""
PERMANENT_PREFIXES = ("val-core/", "val/")
"""Metrics with these prefixes get a line of their own, which stays above the live line."""


class Bar:
    """A progress bar: the amount done, the total, and a note; only the bars of `progress` are shown.

    `advance` and `update` call `report`; code that needs no report may set the attributes.
    """

    def __init__(
        self,
        description: str,
        total: float | None = None,
        report: Callable[[Bar], None] | None = None,
    ) -> None:
        self.description, self.total, self.done, self.note = description, total, 0.0, ""
        self._report = report

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        self.update(self.done + amount, note=note)

    def update(self, done: float, *, total: float | None = None, note: str | None = None) -> None:
        self.done = done
        self.total = self.total if total is None else total
        self.note = self.note if note is None else note
        if self._report is not None:
            self._report(self)


class Screen:
    """All output of a process: bars and the live line on a terminal, plain lines elsewhere."""

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if console is None:
            from rich.console import Console

            console = Console()
        self.console = console
        self.clock = clock
        self._live: Progress | None = None
        self._open_bars = 0
        self._status: str | None = None
        self._lock = threading.RLock()

    @property
    def is_terminal(self) -> bool:
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def line(self, text: str) -> None:
        """Writes one line of plain text, unwrapped and uncoloured, above the live region if any."""
        text = printable(text, self.console.encoding)
        with self._lock:  # another thread may end the live region
            if self._live is not None:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
                return
            try:
                self.console.file.write(text + "\n")
                self.console.file.flush()
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EIO):
                    raise
                # The reader has ended, as `head` does after ten lines. The run continues; its later output
                # goes to the null device, also what Python flushes at exit.
                with open(os.devnull, "w") as null_device:
                    os.dup2(null_device.fileno(), self.console.file.fileno())

    def print(self, *renderables: RenderableType) -> None:
        """Writes tables, panels and text, above the live region if any."""
        for item in renderables:
            text = printable(item, self.console.encoding) if isinstance(item, str) else item
            self.console.print(text, markup=False)

    def status(self, text: str | None) -> None:
        """Sets the live line (terminals only); None removes it."""
        with self._lock:
            self._status = text
            self._update_live_region()

    @contextlib.contextmanager
    def bar(
        self, description: str, total: float | None, *, has_step_line: bool = False
    ) -> Iterator[Bar]:
        """Yields a progress bar.

        `has_step_line`: the run prints a line per step with the count and the ETA. The bar then has no ETA on
        a terminal, and is not shown elsewhere.
        """
        if not self.is_terminal:
            yield Bar(description, total, None if has_step_line else self._throttled_reporter())
            return
        with self._lock:
            self._open_bars += 1
            live = self._update_live_region()
            assert live is not None
            bar = Bar(description, total)
            task = live.add_task(description, total=total, bar=bar, shows_eta=not has_step_line)
        try:
            yield bar
        finally:
            with self._lock:
                live.remove_task(task)
                self._open_bars -= 1
                self._update_live_region()

    def _throttled_reporter(self) -> Callable[[Bar], None]:
        """Returns a function that writes the state of a bar, at most every SECONDS_BETWEEN_PLAIN_REPORTS."""
        start = last_report = self.clock()

        def report(bar: Bar) -> None:
            nonlocal last_report
            now = self.clock()
            if now - last_report < SECONDS_BETWEEN_PLAIN_REPORTS:
                return
            last_report, elapsed_s = now, now - start
            count = f"{bar.done:g}/{bar.total:g}" if bar.total else f"{bar.done:g}"
            parts = [f"{bar.description} {count}", bar.note, f"{duration(elapsed_s)} so far"]
            if bar.total and 0 < bar.done < bar.total:
                eta_s = elapsed_s / bar.done * (bar.total - bar.done)
                parts.append(f"ETA {duration(eta_s)}")
            self.line(" · ".join(filter(None, parts)))

        return report

    def _update_live_region(self) -> Progress | None:
        is_needed = self.is_terminal and (self._open_bars > 0 or self._status is not None)
        if is_needed and self._live is None:
            self._live = _create_live_region(self)
            self._live.start()
            atexit.register(self._live.stop)  # restores the terminal's cursor
        elif not is_needed and self._live is not None:
            self._live.stop()
            atexit.unregister(self._live.stop)
            self._live = None
        elif self._live is not None:
            self._live.refresh()
        return self._live


def _create_live_region(screen: Screen) -> Progress:
    from rich import progress as rich_progress
    from rich.text import Text

    class Region(rich_progress.Progress):
        def get_renderables(self) -> Iterator[RenderableType]:
            if screen._status is not None:
                yield Text(screen._status, overflow="ellipsis", no_wrap=True)
            for task in self.tasks:
                bar: Bar = task.fields["bar"]
                self.update(task.id, completed=bar.done, total=bar.total)
            if self.tasks:
                yield self.make_tasks_table(self.tasks)

    class EtaColumn(rich_progress.TimeRemainingColumn):
        def render(self, task: rich_progress.Task) -> Text:
            is_known = task.fields["shows_eta"] and task.time_remaining is not None
            return super().render(task) if is_known else Text()

    class CountColumn(rich_progress.MofNCompleteColumn):
        def render(self, task: rich_progress.Task) -> Text:
            return super().render(task) if task.total is not None else Text()

    return Region(
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        CountColumn(),
        rich_progress.TextColumn("{task.fields[bar].note}", markup=False),
        rich_progress.TimeElapsedColumn(),
        EtaColumn(),
        console=screen.console,
        transient=True,
        refresh_per_second=4,
    )


@functools.cache
def screen() -> Screen:
    """Returns the screen of this process."""
    return Screen()


def progress(
    description: str, total: float | None = None, *, has_step_line: bool = False
) -> contextlib.AbstractContextManager[Bar]:
    """Shows a progress bar: `with progress("generate", 128) as bar: ...; bar.advance()`."""
    return screen().bar(description, total, has_step_line=has_step_line)


def hone_command(*words: str) -> str:
    """Returns a command for the user's shell: of `hone`, or else of the path of this program."""
    program, found = sys.argv[0], shutil.which("hone")
    if Path(program).name != "hone" or (found and os.path.samefile(found, program)):
        program = "hone"
    return shlex.join([program, *words])


def duration(seconds: float) -> str:
    """Formats seconds as `0:43`, `12:05` or `3:20:00`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def full_line(metrics: Mapping[str, Number], step: int) -> str:
    """Formats all metrics of a step as verl's log line."""
    return " - ".join([f"step:{step}", *(f"{key}:{value:.6g}" for key, value in metrics.items())])


class ConsoleTracker(Tracker):
    """Shows the live line of a run on a terminal, and plain lines elsewhere."""

    def __init__(self, run: RunInfo, output: Screen | None = None) -> None:
        super().__init__(run)
        self.screen = output or screen()
        start = (run.resumed_from or 0, self.screen.clock())
        self._step_times: deque[tuple[int, float]] = deque([start], maxlen=STEPS_FOR_ETA)
        self._live_values: dict[str, Number] = {}

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        if step > self._step_times[-1][0]:
            self._step_times.append((step, self.screen.clock()))
        permanent_values = {
            key: value
            for key, value in metrics.items()
            if key.startswith(PERMANENT_PREFIXES) and not key.endswith("/std")
        }
        live_values: dict[str, Number] = {}
        for label, keys in LIVE_LINE_METRICS.items():
            if values := [metrics[key] for key in keys if key in metrics]:
                live_values[label] = values[0]
        if self.run.prints_every_metric:
            self.screen.line(full_line(metrics, step))
        elif not self.screen.is_terminal:
            self.screen.line(self._short_line(step, live_values | permanent_values))
        elif permanent_values:
            self.screen.line(self._short_line(step, permanent_values, with_eta=False))
        self._live_values |= live_values  # a validation step keeps the last reward and length
        if self.screen.is_terminal:
            self.screen.status(self._short_line(step, self._live_values))

    def finish(self) -> None:
        if self.screen.is_terminal:
            if self._live_values:
                self.screen.line(self._short_line(self._step_times[-1][0], self._live_values))
            self.screen.status(None)

    def _short_line(self, step: int, values: Mapping[str, Number], *, with_eta: bool = True) -> str:
        total = self.run.total_steps
        parts = [f"step {step}/{total}" if total else f"step {step}"]
        for label, value in values.items():
            parts.append(f"{label} {value:,.0f}" if abs(value) >= 1000 else f"{label} {value:.3g}")
        (first_step, first_time), (last_step, last_time) = self._step_times[0], self._step_times[-1]
        if with_eta and total and first_step < last_step < total and last_time > first_time:
            elapsed_s, elapsed_steps = last_time - first_time, last_step - first_step
            parts.append(f"ETA {duration((total - last_step) * elapsed_s / elapsed_steps)}")
        return " · ".join(parts)
