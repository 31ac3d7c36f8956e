"""The worker process of `pool.py`: creates the callable once, then runs jobs until the pool ends it.

Workers ignore SIGTERM, which a scheduler may send to every process: a trainer needs scores to end its step.
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
"""How long a call that no thread can end may run beyond its deadline if the parent has died."""


def serve(connection: Connection) -> None:
    """Answers each `(arguments, timeout_s)` message with the return value of the callable."""
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
        except Exception as error:  # an object of the user may fail with any error
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
    except Exception as error:  # an object of the user may fail to be pickled with any error
        detail = f"cannot be sent between processes: {error_text(error)}"
        message = pickle.dumps(Failed("bad_return", detail))
    connection.send_bytes(message)


def _end_with_parent(descriptor: int) -> None:
    """Kills this process and its children when the parent has closed the other end of the socket."""
    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is always reported
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
