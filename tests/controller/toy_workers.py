"""Workers small enough to check by hand, importable in a Ray process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hone.controller import (
    Dispatch,
    Execute,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from hone.protocol import DataProto, real_row_mask, without_padding


def memory_of(values: np.ndarray) -> str:
    """The file that holds the memory of an array: Ray's object store is one in /dev/shm."""
    address = values.__array_interface__["data"][0]
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            first, _, last = line.split()[0].partition("-")
            if int(first, 16) <= address < int(last, 16):
                return " ".join(line.split()[5:])
    raise AssertionError("memory that is not mapped")


class Toy(Worker):
    def __init__(self, factor: float, offset: float = 0.0) -> None:
        self.factor, self.offset = factor, offset
        self.seen: list[int] = []
        self.closed = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.ready = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whereabouts(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "local_rank": self.local_rank,
            "local_world_size": self.local_world_size,
            "role": self.role,
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def echo(self, value: Any, *, named: Any = None) -> tuple[int, Any, Any]:
        return self.rank, value, named

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first_echo(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def zero_echo(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def own(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    @register()
    def by_default(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def own_dp(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def scale(self, data: DataProto, power: int = 1) -> DataProto:
        self.seen.append(len(data))
        scaled = data.batch["x"] ** power * self.factor + self.offset
        real = data.batch["x"][real_row_mask(data)]
        return DataProto.from_dict(
            {"y": scaled},
            {"uid": data.non_tensor_batch["uid"]},
            {"metrics": {"rows": len(real), "sum": float(real.sum())}, "temperature": 0.5},
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def scale_later(self, data: DataProto) -> DataProto:
        return self.scale(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def twice_each(self, data: DataProto) -> DataProto:
        return data.select(batch_keys=["x"]).repeat(2)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def real_only(self, data: DataProto) -> DataProto:
        return without_padding(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def not_a_batch(self, data: DataProto) -> int:
        return len(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def real_sum(self, data: DataProto) -> tuple[float, int]:
        rows = real_row_mask(data)
        return float(data.batch["x"][rows].sum()), int(rows.sum())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def scale_async(self, data: DataProto) -> DataProto:
        await asyncio.sleep(0)
        return self.scale(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, rank: int) -> None:
        if self.rank == rank:
            raise LookupError(f"rank {rank} cannot find it")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def fail_later(self) -> None:
        raise LookupError("too late")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die(self, rank: int, how: str) -> None:
        if self.rank != rank:
            time.sleep(600)  # beyond any deadline
            return
        sys.stderr.write("about to give up the ghost\n")
        sys.stderr.flush()
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hold_interpreter(self, seconds: float) -> None:
        """Calls during which no other thread of this process runs Python."""
        ends = time.monotonic() + seconds
        switch = sys.getswitchinterval()
        sys.setswitchinterval(600.0)
        while time.monotonic() < ends:
            sum(range(10_000_000))
        sys.setswitchinterval(switch)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def all_reduced(self, value: float) -> float:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        total = torch.tensor([value * (self.rank + 1)])
        dist.all_reduce(total)
        return float(total)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def memory_of(self, values: np.ndarray) -> tuple[str, np.ndarray]:
        """Where an array lies that came from another process, and an array to send back."""
        return memory_of(values), values + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reduce_for(self, seconds: float) -> None:
        """Collectives with other ranks; what is logged is the last that is heard of a lost node."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            sys.stderr.write(f"rank {self.rank} reduces {self.all_reduced(1.0)}\n")
            sys.stderr.flush()
            time.sleep(0.5)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def matmul_bits(self) -> bytes:
        generator = torch.Generator().manual_seed(1)
        a = torch.randn(257, 1031, generator=generator)
        b = torch.randn(1031, 129, generator=generator)
        return bytes((torch.log_softmax(a @ b, -1).sum(0)).numpy().tobytes())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def make_mesh(self, name: str, tensor_parallel: int) -> None:
        self.register_mesh(name, self.rank // tensor_parallel, self.rank % tensor_parallel == 0)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("model"))
    def scale_on_mesh(self, data: DataProto) -> DataProto:
        return self.scale(data)

    def unregistered(self) -> None:
        raise AssertionError("a group does not offer this")


class Other(Worker):
    def __init__(self, word: str) -> None:
        self.word = word

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def say(self) -> tuple[str, int, str]:
        return self.word, os.getpid(), self.role
