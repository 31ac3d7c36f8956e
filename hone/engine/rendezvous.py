"""The rendezvous of ranks: through a file of the launcher, a TCP store at MASTER_ADDR, or torchrun."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

STORE_FILE_VARIABLE = "HONE_RENDEZVOUS_FILE"
"""Name of the environment variable with the path of the rendezvous file; a file needs no open port."""


def rendezvous_store(world_size: int, timeout: timedelta) -> Store | None:
    """Returns the store for `init_process_group`, or None if torch creates it (torchrun)."""
    from torch._C._distributed_c10d import FileStore

    if path := os.environ.get(STORE_FILE_VARIABLE):
        store = FileStore(path, world_size)
        store.set_timeout(timeout)
        return store
    if "TORCHELASTIC_RUN_ID" in os.environ or "MASTER_ADDR" not in os.environ:
        return None
    return _open_tcp_store(world_size, timeout)


def _open_tcp_store(world_size: int, timeout: timedelta) -> TCPStore:
    """Opens a store that listens on MASTER_ADDR only; torch's default listens on every interface."""
    from torch._C._distributed_c10d import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_master = os.environ["RANK"] == "0"
    listen_fd: int | None = None
    if is_master:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listen_fd = socket.create_server((address, port), family=family, backlog=1024).detach()
    return TCPStore(
        address,
        port,
        world_size,
        is_master=is_master,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )
