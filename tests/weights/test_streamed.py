"""Weights between processes: every transport delivers the same bits, and a broken stream says so."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hone.weights.contract import StreamAddress, WeightStreamBroken
from hone.weights.streamed import Standing, open_sender, received, send, transport_between

CPU = torch.device("cpu")
TRANSPORTS = ("memory_file", "gloo")
CHILD = """
import json, sys, torch
from hone.weights.contract import StreamAddress
from hone.weights.streamed import received
address = StreamAddress(**json.loads(sys.argv[1]))
got = dict(received(address, int(sys.argv[2]), torch.device("cpu"), 60.0))
torch.save(got, sys.argv[3])
"""


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"model.layers.{i}.weight": torch.randn(5 + i, 33, generator=generator).to(
            torch.bfloat16 if i % 2 else torch.float32
        )
        for i in range(6)
    }


def opened(transport: str, receivers: int, timeout_s: float = 20.0) -> object:
    return open_sender(
        transport,
        receivers,
        bucket_bytes=1000,
        device=CPU,
        host="127.0.0.1",
        timeout_s=timeout_s,
    )


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("receivers", [1, 3])
def test_every_receiver_gets_every_tensor(transport, receivers):
    sender = opened(transport, receivers)
    with ThreadPoolExecutor(receivers) as pool:
        results = [
            pool.submit(lambda n=n: dict(received(sender.address, n, CPU, 20.0)))
            for n in range(receivers)
        ]
        sent = send(sender, weights().items(), 1000)
        assert all(same(result.result(), weights()) for result in results)
    assert sent == sum(tensor.nbytes for tensor in weights().values())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_plain_processes(transport, tmp_path):
    sender = opened(transport, 1, timeout_s=120.0)
    place = json.dumps(asdict(sender.address))
    child = subprocess.Popen([sys.executable, "-c", CHILD, place, "0", str(tmp_path / "got.pt")])
    send(sender, weights().items(), 1000)
    assert child.wait(timeout=60) == 0
    assert same(torch.load(tmp_path / "got.pt"), weights())


def test_tensors_stay_the_receivers_own_while_the_stream_goes_on():
    sender = opened("memory_file", 1)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(lambda: list(received(sender.address, 0, CPU, 20.0)))
        send(sender, weights().items(), 300)  # many buckets: the window is written over again
        assert same(dict(result.result()), weights())


def test_a_sender_that_fails_midway_breaks_the_stream():
    def failing() -> Iterator[tuple[str, Tensor]]:
        yield from list(weights().items())[:3]
        raise RuntimeError("the gather failed")

    sender = opened("memory_file", 1)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(lambda: list(received(sender.address, 0, CPU, 20.0)))
        with pytest.raises(RuntimeError, match="the gather failed"):
            send(sender, failing(), 300)
        with pytest.raises(WeightStreamBroken, match="the trainer has gone"):
            result.result()


def test_a_receiver_that_leaves_breaks_the_stream():
    sender = opened("memory_file", 1)

    def leave() -> None:
        stream = received(sender.address, 0, CPU, 20.0)
        next(stream)
        stream.close()

    leaving = threading.Thread(target=leave)
    leaving.start()
    with pytest.raises(WeightStreamBroken, match="rollout worker 0 has gone"):
        send(sender, weights().items(), 300)
    leaving.join()


def test_a_receiver_that_never_comes_is_named_after_the_deadline():
    sender = opened("memory_file", 2, timeout_s=0.2)
    with pytest.raises(WeightStreamBroken, match="0 of 2 rollout workers came"):
        send(sender, weights().items(), 300)


def test_a_stranger_is_not_given_the_weights():
    sender = opened("memory_file", 1)
    stranger = replace(sender.address, token="guessed")
    with ThreadPoolExecutor(2) as pool:
        refused = pool.submit(lambda: list(received(stranger, 0, CPU, 20.0)))
        sending = pool.submit(lambda: send(sender, weights().items(), 300))
        with pytest.raises(WeightStreamBroken):
            refused.result()
        assert same(dict(received(sender.address, 0, CPU, 20.0)), weights())
        sending.result()


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sender = opened("memory_file", 1, timeout_s=0.1)
    assert Path(sender.address.place).parent.stat().st_mode & 0o077 == 0
    with pytest.raises(WeightStreamBroken):
        send(sender, weights().items(), 300)
    assert not list(tmp_path.iterdir())


def test_a_socket_out_of_reach_names_the_way_out():
    away = StreamAddress("memory_file", "/nowhere/socket", "t", 1)
    with pytest.raises(WeightStreamBroken, match="backend=gloo"):
        list(received(away, 0, CPU, 1.0))


STANDS: list[tuple[Callable[[], tuple[Standing, list[Standing]]], str]] = [
    (lambda: (Standing("m", "cpu", "a"), [Standing("m", "cpu", "a")]), "memory_file"),
    (lambda: (Standing("m", "cpu", "a"), [Standing("n", "cpu", "b")]), "gloo"),
    (lambda: (Standing("m", "gpu-1", "a"), [Standing("m", "gpu-1", "a")]), "cuda_ipc"),
    (lambda: (Standing("m", "gpu-1", "a"), [Standing("m", "gpu-2", "a")]), "nccl"),
    (lambda: (Standing("m", "gpu-1", "a"), [Standing("m", "cpu", "a")]), "memory_file"),
    (lambda: (Standing("m", "gpu-1", "a"), [Standing("n", "cpu", "b")]), "gloo"),
]


@pytest.mark.parametrize(("sides", "transport"), STANDS)
def test_the_transport_follows_from_where_both_stand(sides, transport):
    trainer, rollouts = sides()
    assert transport_between(trainer, rollouts, "naive") == transport
    assert transport_between(trainer, rollouts, "gloo") == "gloo"


def test_this_process_stands_where_itself_stands():
    assert Standing.here(CPU, "127.0.0.1") == Standing.here(CPU, "127.0.0.1")
