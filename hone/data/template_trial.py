"""One rendering of a chat template in a process of its own, which limits of time and memory may end.

Reads the task as JSON from standard input. Exit status: 0 the template ends (with text or an error),
TOO_LARGE it asks for too much memory or text; the process timer ends the process itself.
Runs as a script: it imports Jinja and nothing of this package.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from datetime import datetime
from importlib import import_module
from typing import Any

TOO_LARGE = 3


def render(template: str, variables: dict[str, Any]) -> str:
    """The text, by an environment like the one that `transformers` renders with."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` blocks are rendered as they stand."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda x, indent=None, **_: json.dumps(x, indent=indent)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template).render(**variables)


def main() -> int:
    task = json.load(sys.stdin)
    sys.path[:] = task["path"]
    import_module("jinja2.sandbox")  # before the limits: only the template's own work counts
    with contextlib.suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(resource.RLIMIT_AS, (task["bytes"], task["bytes"]))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    signal.setitimer(signal.ITIMER_PROF, task["seconds"])
    try:
        text = render(task["template"], task["variables"])
    except MemoryError:
        return TOO_LARGE
    except Exception:  # the rendering that counts will raise it again
        return 0
    return TOO_LARGE if len(text) > task["characters"] else 0


if __name__ == "__main__":
    sys.exit(main())
