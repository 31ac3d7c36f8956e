"""A process group of trainer and SGLang servers, through which one update's weights are broadcast.

Each update has a group of its own, so that a server that was restarted is a member again.
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
    """Rank 0 is this process; every tensor-parallel rank of a server is one more."""

    def __init__(self, servers: Sequence[SGLangServer], device: torch.device) -> None:
        self._servers, self._device = list(servers), device
        self._name = f"hone-{secrets.token_hex(8)}"
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._timeout = timedelta(seconds=servers[0].limits.call_s)
        self._store: TCPStore | None = None
        self._group: Any = None

    async def open(self) -> None:
        """Joins the group together with all servers."""
        host = _address_towards(self._servers[0].url)
        listening = socket.create_server((host, 0))  # torch's default listens on every interface
        self._store = TCPStore(
            host,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listening.detach(),
        )
        world = 1 + sum(server.tensor_parallel for server in self._servers)
        calls, offset = [], 1
        for server in self._servers:
            body = {
                "master_address": host,
                "master_port": self._store.port,
                "rank_offset": offset,
                "world_size": world,
                "group_name": self._name,
                "backend": self._backend,
            }
            calls.append(server.succeeded("/init_weights_update_group", body))
            offset += server.tensor_parallel
        await self._together(asyncio.to_thread(self._join, world), *calls)

    def _join(self, world: int) -> None:
        # The same keys as those of torch's own groups, which the servers use.
        assert self._store is not None
        store = PrefixStore(self._name, self._store)
        join: Any = distributed_c10d._new_process_group_helper
        self._group, _ = join(world, 0, [], self._backend, store, self._name, timeout=self._timeout)
        distributed_c10d._world.pg_group_ranks[self._group] = {i: i for i in range(world)}

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
            server.succeeded("/update_weights_from_distributed", body) for server in self._servers
        ]
        await self._together(asyncio.to_thread(self._broadcast, list(tensors.values())), *calls)

    def _broadcast(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self._group.broadcast(tensor, 0).wait()

    async def close(self) -> None:
        """Leaves the group; a server that was lost has left it already."""
        body = {"group_name": self._name}
        calls = [server.call("/destroy_weights_update_group", body) for server in self._servers]
        await asyncio.gather(*calls, return_exceptions=True)
        if self._group is not None:
            distributed_c10d.destroy_process_group(self._group)
        self._group = self._store = None

    async def _together(self, *works: Any) -> None:
        """Waits for both sides; the first error of a server is the cause of the others."""
        outcomes = await asyncio.gather(*works, return_exceptions=True)
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
