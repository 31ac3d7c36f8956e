from __future__ import annotations

import io
import os
import re
import shlex
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from hone.tracking import RunInfo, progress
from hone.tracking.console import ConsoleTracker, Screen, duration, full_line, hone_command


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_screen(terminal: bool) -> tuple[Screen, Clock]:
    console = Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=120,
        color_system=None,
        legacy_windows=False,
        _environ={"TERM": "xterm"},
    )
    clock = Clock()
    return Screen(console, clock), clock


def output_of(screen: Screen) -> str:
    """Returns the output without cursor control codes."""
    text = screen.console.file.getvalue()  # type: ignore[attr-defined]
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def make_tracker(screen: Screen, **run_info: int | None) -> ConsoleTracker:
    return ConsoleTracker(RunInfo("p", "e", **run_info), output=screen)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("started_as", "on_path", "command"),
    [
        ("my venv/bin/hone", False, "my venv/bin/hone"),  # nobody has activated the environment
        ("my venv/bin/hone", True, "hone"),
        ("/usr/lib/python3/pytest.py", False, "hone"),
    ],
)
def test_a_printed_command_starts_as_it_is_pasted(
    started_as: str, on_path: bool, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "my venv" / "bin" / "hone"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(program.parent) if on_path else "/nowhere")
    monkeypatch.setattr(sys, "argv", [started_as])
    assert shlex.split(hone_command()) == [command]


def test_without_a_terminal_a_step_is_one_short_line() -> None:
    screen, clock = make_screen(terminal=False)
    tracker = make_tracker(screen, total_steps=4)
    tracker.log({"val-core/sums/acc/mean@1": 0.25, "val-core/sums/acc/best@2/std": 0.0}, 0)
    clock.now += 10
    tracker.log({"reward/mean": 0.5, "actor/lr": 1e-06, "actor/ppo_kl": 0.0, "accuracy": 0.25}, 1)
    tracker.log({f"key{i}": i for i in range(200)}, 1)
    tracker.finish()
    first, second, third = output_of(screen).splitlines()
    assert first == "step 0/4 · val-core/sums/acc/mean@1 0.25"
    assert second == "step 1/4 · reward 0.5 · accuracy 0.25 · ETA 0:30"
    assert third == "step 1/4 · ETA 0:30"


def test_console_full_prints_every_metric_in_verls_form() -> None:
    screen, _ = make_screen(terminal=False)
    tracker = ConsoleTracker(RunInfo("p", "e", prints_every_metric=True), output=screen)
    tracker.log({"reward/mean": 0.5, "actor/lr": 1e-06, "x": float("nan")}, 3)
    assert output_of(screen) == "step:3 - reward/mean:0.5 - actor/lr:1e-06 - x:nan\n"


def test_markup_in_a_key_is_printed_as_text() -> None:
    for terminal in (False, True):
        screen, _ = make_screen(terminal)
        screen.line("[bold]val-core/[red]x:1")
        assert "[bold]val-core/[red]x:1" in output_of(screen)


def test_on_a_terminal_the_live_line_shows_reward_kl_length_speed_and_time_left() -> None:
    screen, clock = make_screen(terminal=True)
    tracker = make_tracker(screen, total_steps=10)
    metrics = {
        "critic/score/mean": 0.25,
        "actor/kl_loss": 0.0021,
        "response_length/mean": 88.2,
        "perf/throughput": 1234.4,
        "actor/pg_loss": 7.7,
    }
    clock.now += 30
    tracker.log(metrics, 1)
    clock.now += 50
    tracker.log(metrics, 2)
    tracker.finish()
    last = output_of(screen).strip().splitlines()[-1].split("\r")[0].strip()
    assert last.startswith(
        "step 2/10 · reward 0.25 · KL 0.0021 · length 88.2 · tokens/s 1,234 · ETA 5:20"
    )


def test_the_eta_of_a_resumed_run_counts_from_its_first_step() -> None:
    screen, clock = make_screen(terminal=True)
    tracker = make_tracker(screen, total_steps=100, resumed_from=90)
    clock.now += 10
    tracker.log({"reward/mean": 1.0}, 91)
    tracker.finish()
    assert "ETA 1:30" in output_of(screen)


def test_validation_results_stay_above_the_live_line() -> None:
    screen, _ = make_screen(terminal=True)
    tracker = make_tracker(screen)
    tracker.log({"reward/mean": 0.5}, 1)
    tracker.log({"val-core/gsm8k/acc/mean@1": 0.75}, 1)
    tracker.finish()
    assert "step 1 · val-core/gsm8k/acc/mean@1 0.75\n" in output_of(screen)
    assert "reward 0.5" in output_of(screen).strip().splitlines()[-1]


def test_the_cursor_is_restored_when_the_run_ends() -> None:
    screen, _ = make_screen(terminal=True)
    tracker = make_tracker(screen)
    tracker.log({"reward/mean": 0.5}, 1)
    before = screen.console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[?25l" in before
    assert "\x1b[?25h" not in before
    tracker.finish()
    assert "\x1b[?25h" in screen.console.file.getvalue()  # type: ignore[attr-defined]


def test_bars_and_the_live_line_are_shown_together() -> None:
    screen, _ = make_screen(terminal=True)
    tracker = make_tracker(screen)
    tracker.log({"reward/mean": 0.5}, 1)
    with screen.bar("generate [x]", 8) as bar, screen.bar("score", None) as inner:
        bar.advance(3, note="12 tok/s")
        inner.advance()
        screen.status("status while waiting")
    tracker.finish()
    text = output_of(screen)
    assert re.search(r"generate \[x\].*3/8 12 tok/s", text)
    assert "status while waiting" in text
    assert screen._live is None


def test_a_bar_is_removed_after_an_exception() -> None:
    screen, _ = make_screen(terminal=True)

    def fail() -> None:
        with screen.bar("generate", 8):
            raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        fail()
    assert screen._live is None


def test_bars_may_be_updated_from_several_threads() -> None:
    screen, _ = make_screen(terminal=True)

    def wait(name: str) -> None:
        with screen.bar(name, 50) as bar:
            for _ in range(50):
                bar.advance()

    threads = [threading.Thread(target=wait, args=(f"w{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert screen._live is None
    assert screen._open_bars == 0


def test_without_a_terminal_only_a_long_wait_is_reported() -> None:
    screen, clock = make_screen(terminal=False)
    with screen.bar("short", 2) as bar:
        clock.now += 10
        bar.advance(2)
    assert output_of(screen) == ""
    with screen.bar("generate", 8) as bar:
        for _ in range(4):
            clock.now += 8
            bar.advance(2, note="9 tok/s")
    assert output_of(screen).splitlines() == [
        "generate 4/8 · 9 tok/s · 0:16 so far · ETA 0:16",
        "generate 8/8 · 9 tok/s · 0:32 so far",
    ]


def test_a_bar_beside_the_status_is_shown_only_on_terminals() -> None:
    screen, clock = make_screen(terminal=False)
    with screen.bar("step", 8, has_step_line=True) as bar:
        clock.now += 99
        bar.update(3, note="gen")
    assert output_of(screen) == ""
    screen, _ = make_screen(terminal=True)
    with screen.bar("step", 8, has_step_line=True) as bar:
        bar.done, bar.note = 3, "gen"
        assert screen._live is not None
        screen._live.refresh()
    assert re.search(r"step [━╺ ]+3/8 gen 0:00:0\d *\r", output_of(screen))


def test_the_last_line_of_a_run_has_no_eta() -> None:
    screen, clock = make_screen(terminal=False)
    tracker = make_tracker(screen, total_steps=2)
    clock.now += 10
    tracker.log({"reward/mean": 0.5}, 1)
    clock.now += 10
    tracker.log({"reward/mean": 0.5}, 2)
    assert output_of(screen).splitlines() == [
        "step 1/2 · reward 0.5 · ETA 0:10",
        "step 2/2 · reward 0.5",
    ]


def test_a_wait_of_unknown_length_reports_the_amount_done() -> None:
    screen, clock = make_screen(terminal=False)
    with screen.bar("waiting for workers", None) as bar:
        clock.now += 20
        bar.update(3)
    assert output_of(screen) == "waiting for workers 3 · 0:20 so far\n"


def test_progress_draws_on_the_screen_of_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("generate", 2) as bar:
        bar.advance()
    assert bar.done == 1
    assert capsys.readouterr().out == ""


def test_print_writes_tables_and_text() -> None:
    screen, _ = make_screen(terminal=False)
    table = Table("before", "after")
    table.add_row("0.1", "0.9")
    screen.print(table, "and [text]")
    assert "before" in output_of(screen)
    assert "and [text]" in output_of(screen)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (43.4, "0:43"), (725, "12:05"), (12000, "3:20:00")]
)
def test_durations_are_formatted_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_line_without_metrics_is_the_step() -> None:
    assert full_line({}, 5) == "step:5"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_any_text_is_printed_without_control_codes(encoding: str) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    screen = Screen(Console(file=file))
    screen.line("a\ud800\0\x1b[2J é · b")
    screen.print("c\udfff\x1b[H")
    file.seek(0)
    text = file.read()
    assert "\x1b" not in text
    assert text.startswith("a\\ud800\\x00\\x1b[2J ")
    assert "c\\udfff\\x1b[H" in text


def test_a_run_outlives_the_reader_of_its_lines() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as pipe:
        screen = Screen(Console(file=pipe))
        os.close(reader)
        screen.line("step 1")
        screen.line("step 2")
