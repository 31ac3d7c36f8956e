"""The process on the other side of `pool.py`: make the callable once, then answer jobs.

Ends when the pool closes its socket. A call that outlives a vanished parent ends by the timer.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from multiprocessing.connection import Connection

from hone.rewards.failures import Failed, SetupError
from hone.types import Function, Row

GRACE_S = 10.0
"""How long after its deadline a call whose parent vanished may still run."""


def serve(link: Connection) -> None:
    """Answer each `(keywords, timeout_s)` message with the return value of the callable."""
    factory, keywords = link.recv()
    module, _, name = factory.partition(":")
    try:
        function: Function = getattr(importlib.import_module(module), name)(**keywords)
    except Exception as error:  # the pool's owner must see why its scorer does not load
        link.send(Failed("start", f"{type(error).__name__}: {error}"))
        return
    link.send("ready")
    while True:
        arguments, timeout_s = link.recv()
        signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)
        answer = _call(function, arguments)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        try:
            link.send(answer)
        except (TypeError, AttributeError, ValueError) as error:
            link.send(Failed("bad_return", f"cannot be sent between processes: {error}"))


def _call(function: Function, arguments: Row) -> object:
    """The result; a SetupError is returned as it is, any other exception as Failed."""
    try:
        return function(**arguments)
    except SetupError as error:
        return error
    except Exception as error:  # a user's code may raise anything; the pool's owner decides
        return Failed("exception", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    with contextlib.suppress(EOFError, OSError):
        serve(Connection(int(sys.argv[1])))
