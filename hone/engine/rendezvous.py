"""How ranks find each other: through a file that their launcher names, or as torchrun says."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

STORE_FILE = "HONE_RENDEZVOUS_FILE"
"""Environment variable of the ranks of one machine: a file needs no port that others could reach."""


def meeting_place(world_size: int, timeout: timedelta) -> dict[str, Any]:
    """Arguments of `init_process_group` beside rank and size."""
    file = os.environ.get(STORE_FILE)
    if file is None:
        return {}
    import torch.distributed as dist

    store = dist.FileStore(file, world_size)
    store.set_timeout(timeout)
    return {"store": store}
