"""The process group of the trainer and its SGLang servers, which broadcasts the weights of one update.

Each update opens a new group, so that restarted servers are members again.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from hone.rollout.contract import RolloutError
from hone.rollout.sglang_server import SGLangServer


class UpdateGroup:
    """A process group: rank 0 is this process, the other ranks are the servers' tensor-parallel ranks."""

    def __init__(self, servers: Sequence[SGLangServer], device: torch.device) -> None:
        self._servers, self._device = list(servers), device
        self._name = f"hone-{secrets.token_hex(8)}"
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._timeout = timedelta(seconds=servers[0].timeouts.call_timeout_s)
        self._store: TCPStore | None = None
        self._group: Any = None

    async def open(self) -> None:
        """Joins the group together with all servers."""
        host = _address_towards(self._servers[0].url)
        listener = socket.create_server((host, 0))  # torch's default listens on every interface
        self._store = TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener.detach(),
        )
        world_size = 1 + sum(server.tensor_parallel for server in self._servers)
        calls, offset = [], 1
        for server in self._servers:
            body = {
                "master_address": host,
                "master_port": self._store.port,
                "rank_offset": offset,
                "world_size": world_size,
                "group_name": self._name,
                "backend": self._backend,
            }
            calls.append(server.call_checked("/init_weights_update_group", body))
            offset += server.tensor_parallel
        await self._gather(asyncio.to_thread(self._join, world_size), *calls)

    def _join(self, world_size: int) -> None:
        # The servers use torch's own groups, so the keys in the store must be the same.
        assert self._store is not None
        store = PrefixStore(self._name, self._store)
        join: Any = distributed_c10d._new_process_group_helper
        self._group, _ = join(
            world_size, 0, [], self._backend, store, self._name, timeout=self._timeout
        )
        distributed_c10d._world.pg_group_ranks[self._group] = {i: i for i in range(world_size)}

    async def send(self, bucket: Mapping[str, Tensor]) -> None:
        """Broadcasts tensors to every server."""
        tensors = {name: t.detach().to(self._device).contiguous() for name, t in bucket.items()}
        body = {
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": self._name,
            "flush_cache": False,
        }
        calls = [
            server.call_checked("/update_weights_from_distributed", body)
            for server in self._servers
        ]
        await self._gather(asyncio.to_thread(self._broadcast, list(tensors.values())), *calls)

    def _broadcast(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self._group.broadcast(tensor, 0).wait()

    async def close(self) -> None:
        """Leaves the group; errors of lost servers are ignored."""
        body = {"group_name": self._name}
        calls = [server.call("/destroy_weights_update_group", body) for server in self._servers]
        await asyncio.gather(*calls, return_exceptions=True)
        if self._group is not None:
            distributed_c10d.destroy_process_group(self._group)
        self._group = self._store = None

    async def _gather(self, *calls: Any) -> None:
        """Waits for all calls; raises an error of a server rather than of this process, which it causes."""
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in reversed(outcomes):
            if isinstance(outcome, BaseException):
                raise RolloutError(
                    f"the broadcast of new weights to the servers failed: {outcome}"
                ) from outcome


def _address_towards(url: str) -> str:
    """Returns the address of this machine that a server can reach; 127.0.0.1 on the same machine."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        return str(probe.getsockname()[0])
