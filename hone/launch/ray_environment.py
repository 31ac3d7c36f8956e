"""Environment variables for the Ray processes that hone starts; Ray reads them when it is imported."""

from __future__ import annotations

import os

START_DEADLINE_S = 240
SLOW_START_ENV = {
    "RAY_raylet_start_wait_time_s": str(START_DEADLINE_S),
    "RAY_agent_register_timeout_ms": str(1000 * START_DEADLINE_S),
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(START_DEADLINE_S),
}
LOOPBACK_ENV = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With the value 0, Ray listens on loopback only, as it does by default on Windows and macOS."""


def allow_slow_start() -> None:
    """Lengthens Ray's start deadlines for the raylets that this process starts."""
    for name, value in SLOW_START_ENV.items():
        os.environ.setdefault(name, value)
