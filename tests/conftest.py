"""What holds for every test: its outcome does not hang on how busy the machine is."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

RECIPES = str(Path(__file__).resolve().parents[1] / "recipes") + os.sep

# One thread each, before torch is loaded: threads that wait for each other on busy cores cost minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background hands down an ignored SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What programs remember between runs stays with the tests.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="hone-test-cache-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# Ray gives its workers a low priority, and ends some when the whole machine is short of memory:
# beside other programs they would hardly start, or be taken away.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

if importlib.util.find_spec("hypothesis"):  # the GPU lane does without
    from hypothesis import HealthCheck, settings

    # The same examples everywhere, and no clock on any of them.
    settings.register_profile(
        "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("steady")


@pytest.fixture(autouse=True, scope="module")
def _names_stay_in_their_file() -> Iterator[None]:
    """Names that a file of tests registers, and modules of recipes/, are unknown to the next file."""
    from hone.agents.contract import LOOPS
    from hone.agents.parsers.contract import PARSERS
    from hone.algorithms import advantages, policy_losses
    from hone.rewards.managers.registry import MANAGERS
    from hone.rewards.scores.table import registered_scores, restore_scores

    tables = (LOOPS, PARSERS, MANAGERS, advantages.TABLE, policy_losses.TABLE)
    entries, scores = [dict(table.entries) for table in tables], registered_scores()
    yield
    for table, before in zip(tables, entries, strict=True):
        table.entries.clear()
        table.entries.update(before)
    restore_scores(scores)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(RECIPES):
            del sys.modules[name]
