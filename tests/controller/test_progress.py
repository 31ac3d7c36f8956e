"""A wait for ranks reports its progress to the listener around it."""

from __future__ import annotations

import threading

from hone.controller.progress import on_wait_progress, report_progress


def test_a_listener_hears_the_waits_inside_and_no_others() -> None:
    heard: list[tuple[int, int]] = []
    report_progress(1, 2)
    with on_wait_progress(lambda done, ranks: heard.append((done, ranks))):
        report_progress(1, 2)
        other = threading.Thread(target=report_progress, args=(7, 7))
        other.start()
        other.join()
        report_progress(2, 2)
    report_progress(9, 9)
    assert heard == [(1, 2), (2, 2)]
