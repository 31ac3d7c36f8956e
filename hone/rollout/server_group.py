"""The process group in which the trainer broadcasts the weights of one update to its SGLang servers.

Each update opens a new group, so that restarted servers join again.
"""

from __future__ import annotations

import asyncio
import ipaddress
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
from hone.rollout.http_server import HttpServer
from hone.weights.contract import open_store


class UpdateGroup:
    """A process group: rank 0 is this process, the other ranks are the servers' tensor-parallel ranks."""

    def __init__(self, servers: Sequence[HttpServer], device: torch.device) -> None:
        self._servers, self._device = list(servers), device
        self._name = f"hone-{secrets.token_hex(8)}"
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._timeout = timedelta(seconds=servers[0].call_timeout_s)
        self._store: TCPStore | None = None
        self._group: Any = None

    async def open(self) -> None:
        """Creates the group together with all servers."""
        host = _address_reachable_from([server.url for server in self._servers])
        self._store = open_store(host, self._timeout)
        world_size = 1 + sum(server.tensor_parallel_size for server in self._servers)
        calls, rank_offset = [], 1
        for server in self._servers:
            body = {
                "master_address": host,
                "master_port": self._store.port,
                "rank_offset": rank_offset,
                "world_size": world_size,
                "group_name": self._name,
                "backend": self._backend,
            }
            calls.append(server.call_checked("/init_weights_update_group", body))
            rank_offset += server.tensor_parallel_size
        await self._gather(asyncio.to_thread(self._join, world_size), *calls)

    def _join(self, world_size: int) -> None:
        # The servers create the group with the same function, so the keys in the store agree.
        assert self._store is not None
        store = PrefixStore(self._name, self._store)
        create_group: Any = distributed_c10d._new_process_group_helper
        self._group, _ = create_group(
            world_size, 0, [], self._backend, store, self._name, timeout=self._timeout
        )
        distributed_c10d._world.pg_group_ranks[self._group] = {i: i for i in range(world_size)}

    async def send(self, bucket: Mapping[str, Tensor]) -> None:
        """Broadcasts the tensors of a bucket to every server."""
        tensors = {
            name: tensor.detach().to(self._device).contiguous() for name, tensor in bucket.items()
        }
        body = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
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
        """Destroys the group; ignores the errors of lost servers."""
        body = {"group_name": self._name}
        calls = [server.call("/destroy_weights_update_group", body) for server in self._servers]
        await asyncio.gather(*calls, return_exceptions=True)
        if self._group is not None:
            distributed_c10d.destroy_process_group(self._group)
        self._group = self._store = None

    async def _gather(self, *calls: Any) -> None:
        """Waits for all calls; the first is the call of this process. Raises if a call failed.

        If several failed, raises the error of a server, because it causes the error of this process.
        """
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in reversed(results):
            if isinstance(result, BaseException):
                raise RolloutError(
                    f"the broadcast of new weights to the servers failed: {result}"
                ) from result


def _address_reachable_from(urls: Sequence[str]) -> str:
    """Returns this machine's address for all servers; 127.0.0.1 if all servers are on this machine."""
    addresses = map(_address_towards, urls)
    remote = (address for address in addresses if not ipaddress.ip_address(address).is_loopback)
    return next(remote, "127.0.0.1")


def _address_towards(url: str) -> str:
    """Returns the address from which this machine connects to a server."""
    parts = urlsplit(url)
    family = socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        return str(probe.getsockname()[0])
