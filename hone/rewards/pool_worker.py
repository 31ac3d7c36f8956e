"""A worker process of `pool.py`: creates the scorer once, then answers jobs until the pool kills the process.

A worker ignores SIGTERM, which a scheduler may send to every process: the trainer still needs scores then.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection

from hone.rewards.failures import Failed, SetupError
from hone.text import error_text
from hone.types import Function

GRACE_S = 10.0
"""Time beyond the deadline after which SIGALRM ends a call, if the parent process has died."""


def serve(connection: Connection) -> None:
    """Answers each message `(arguments, timeout_s)` with the return value of the scorer."""
    factory, keywords = connection.recv()
    module, _, name = factory.partition(":")
    try:
        function: Function = getattr(importlib.import_module(module), name)(**keywords)
    except Exception as error:  # the parent must see why its scorer does not load
        _send(connection, Failed("start", error_text(error)))
        return
    _send(connection, "ready")
    while True:
        try:
            arguments, timeout_s = connection.recv()
        except (EOFError, OSError):
            raise  # the parent has ended
        except Exception as error:  # unpickling an object of the user may raise anything
            _send(connection, Failed("bad_row", f"cannot be read here: {error_text(error)}"))
            continue
        signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)
        try:
            answer = function(**arguments)
        except SetupError as error:  # the parent raises this error
            answer = error
        except Exception as error:  # user code may raise anything; the parent applies the policy
            answer = Failed("exception", error_text(error))
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _send(connection, answer)


def _send(connection: Connection, answer: object) -> None:
    try:
        message = pickle.dumps(answer)
    except Exception as error:  # pickling an object of the user may raise anything
        detail = f"cannot be sent between processes: {error_text(error)}"
        message = pickle.dumps(Failed("bad_return", detail))
    connection.send_bytes(message)


def _end_with_parent(descriptor: int) -> None:
    """Waits until the parent has closed its end of the socket, then kills this process and its children."""
    poll = select.poll()
    poll.register(descriptor, 0)  # poll() reports a hang-up without being asked
    poll.poll()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    # Programs and forks that the callable starts do not ignore SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    socket_fd = int(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=[socket_fd], daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        serve(Connection(socket_fd))
