"""A wait for ranks tells how far it is, to the one that listens in its own context."""

from __future__ import annotations

import threading

from hone.controller.waiting import listening, tell


def test_a_listener_hears_the_waits_inside_and_no_others() -> None:
    heard: list[tuple[int, int]] = []
    tell(1, 2)
    with listening(lambda done, ranks: heard.append((done, ranks))):
        tell(1, 2)
        other = threading.Thread(target=tell, args=(7, 7))
        other.start()
        other.join()
        tell(2, 2)
    tell(9, 9)
    assert heard == [(1, 2), (2, 2)]
