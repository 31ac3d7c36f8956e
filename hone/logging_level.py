"""Sets the logging level from `HONE_LOGGING_LEVEL` or verl's `VERL_LOGGING_LEVEL`."""

from __future__ import annotations

import logging
import os

LEVEL_VARIABLES = ("HONE_LOGGING_LEVEL", "VERL_LOGGING_LEVEL")
_FORMAT = "%(levelname)s %(asctime)s %(process)d %(name)s:%(lineno)d: %(message)s"


def level_variables() -> dict[str, str]:
    """Returns the LEVEL_VARIABLES that are set, to pass them to processes that do not inherit them."""
    return {name: os.environ[name] for name in LEVEL_VARIABLES if os.environ.get(name)}


def set_logging_level() -> None:
    """Logs to standard error at the configured level; does nothing if no level is configured."""
    variables = level_variables()
    if not variables:
        return
    name, value = next(iter(variables.items()))
    level = int(value) if value.isdigit() else logging.getLevelName(value.upper())
    log = logging.getLogger("hone")
    if not isinstance(level, int):  # for an unknown name, logging returns a text
        log.warning("%s=%s is not a level; use DEBUG, INFO, WARNING or ERROR", name, value)
        return
    log.setLevel(level)
    if not any(handler.get_name() == name for handler in log.handlers):
        handler = logging.StreamHandler()
        handler.set_name(name)
        handler.setFormatter(logging.Formatter(_FORMAT))
        log.addHandler(handler)
        log.propagate = False
