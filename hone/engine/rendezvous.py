"""How ranks find each other: through a file that their launcher names, at an address, or as torchrun says."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

STORE_FILE = "HONE_RENDEZVOUS_FILE"
"""Environment variable of the ranks of one machine: a file needs no port that others could reach."""


def meeting_place(world_size: int, timeout: timedelta) -> dict[str, Any]:
    """Arguments of `init_process_group` beside rank and size."""
    import torch.distributed as dist

    if file := os.environ.get(STORE_FILE):
        store = dist.FileStore(file, world_size)
        store.set_timeout(timeout)
        return {"store": store}
    if "TORCHELASTIC_RUN_ID" in os.environ or "MASTER_ADDR" not in os.environ:
        return {}
    return {"store": _store_at_address(world_size, timeout)}


def _store_at_address(world_size: int, timeout: timedelta) -> Any:
    """A store that listens on MASTER_ADDR alone; torch's own would listen on every interface."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    first = os.environ["RANK"] == "0"
    listener: int | None = None
    if first:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=1024).detach()
    return dist.TCPStore(
        address,
        port,
        world_size,
        is_master=first,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
