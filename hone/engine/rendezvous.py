"""Rendezvous of ranks through a file of the launcher, at MASTER_ADDR, or by torchrun."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

STORE_FILE = "HONE_RENDEZVOUS_FILE"
"""Environment variable with the rendezvous file of one machine; a file needs no open port."""


class MeetingPlace(TypedDict, total=False):
    """Arguments of `init_process_group`."""

    store: Store


def meeting_place(world_size: int, timeout: timedelta) -> MeetingPlace:
    """Returns the arguments of `init_process_group` besides rank and world size."""
    from torch._C._distributed_c10d import FileStore

    if file := os.environ.get(STORE_FILE):
        store = FileStore(file, world_size)
        store.set_timeout(timeout)
        return {"store": store}
    if "TORCHELASTIC_RUN_ID" in os.environ or "MASTER_ADDR" not in os.environ:
        return {}
    return {"store": _store_at_address(world_size, timeout)}


def _store_at_address(world_size: int, timeout: timedelta) -> TCPStore:
    """Opens a store that listens on MASTER_ADDR only; torch's default listens on every interface."""
    from torch._C._distributed_c10d import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    first = os.environ["RANK"] == "0"
    listener: int | None = None
    if first:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=1024).detach()
    return TCPStore(
        address,
        port,
        world_size,
        is_master=first,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
