"""Renders a chat template once in a subprocess with time and memory limits.

Reads the task as JSON from standard input. Exit status: 0 if the rendering ends, even in an error;
TOO_LARGE beyond the memory or text limit; the CPU timer kills the process with SIGPROF. The script
imports Jinja and nothing of this package.
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
    """Renders the template in a Jinja environment like that of `transformers`."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Renders the body of `{% generation %}` blocks unchanged."""

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
    import_module("jinja2.sandbox")  # before the limits, which apply to the template alone
    with contextlib.suppress(ValueError, OSError):  # not all systems have this limit
        resource.setrlimit(resource.RLIMIT_AS, (task["bytes"], task["bytes"]))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    signal.setitimer(signal.ITIMER_PROF, task["seconds"])
    try:
        text = render(task["template"], task["variables"])
    except MemoryError:
        return TOO_LARGE
    except Exception:  # rendering the prompt in the main process raises it too
        return 0
    return TOO_LARGE if len(text) > task["characters"] else 0


if __name__ == "__main__":
    sys.exit(main())
