"""Weight streams between processes: every transport delivers the same bits; a broken stream raises."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hone.weights.contract import StreamAddress, WeightStreamBroken
from hone.weights.shared_memory import _Connection
from hone.weights.streamed import Location, choose_transport, open_sender, receive, send

CPU = torch.device("cpu")
TRANSPORTS = ("memory_file", "gloo")
CHILD = """
import json, sys, torch
from hone.weights.contract import StreamAddress
from hone.weights.streamed import receive
address = StreamAddress(**json.loads(sys.argv[1]))
weights = dict(receive(address, int(sys.argv[2]), torch.device("cpu"), 60.0))
torch.save(weights, sys.argv[3])
"""


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"model.layers.{i}.weight": torch.randn(5 + i, 33, generator=generator).to(
            torch.bfloat16 if i % 2 else torch.float32
        )
        for i in range(6)
    }


def open_test_sender(transport: str, receivers: int, timeout_s: float = 20.0) -> object:
    return open_sender(
        transport,
        receivers,
        bucket_bytes=1000,
        device=CPU,
        host="127.0.0.1",
        timeout_s=timeout_s,
    )


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("receivers", [1, 3])
def test_every_receiver_gets_every_tensor(transport, receivers):
    sender = open_test_sender(transport, receivers)
    with ThreadPoolExecutor(receivers) as pool:
        results = [
            pool.submit(lambda n=n: dict(receive(sender.address, n, CPU, 20.0)))
            for n in range(receivers)
        ]
        sent = send(sender, weights().items(), 1000)
        assert all(equal(result.result(), weights()) for result in results)
    assert sent == sum(tensor.nbytes for tensor in weights().values())


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_plain_processes(transport, tmp_path):
    sender = open_test_sender(transport, 1, timeout_s=120.0)
    address = json.dumps(asdict(sender.address))
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, address, "0", str(tmp_path / "weights.pt")]
    )
    send(sender, weights().items(), 1000)
    assert child.wait(timeout=60) == 0
    assert equal(torch.load(tmp_path / "weights.pt"), weights())


def test_received_tensors_are_copies_of_the_reused_window():
    sender = open_test_sender("memory_file", 1)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(lambda: list(receive(sender.address, 0, CPU, 20.0)))
        send(sender, weights().items(), 300)  # many buckets: the window is reused
        assert equal(dict(result.result()), weights())


@pytest.mark.parametrize(
    ("transport", "broken"),
    [("memory_file", "the trainer closed the connection"), ("gloo", r"the broadcast failed: .*$")],
)
def test_a_sender_that_fails_midway_raises_in_the_receiver(transport, broken):
    def failing() -> Iterator[tuple[str, Tensor]]:
        yield from list(weights().items())[:3]
        raise RuntimeError("the gather failed")

    sender = open_test_sender(transport, 1)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(lambda: list(receive(sender.address, 0, CPU, 20.0)))
        with pytest.raises(RuntimeError, match=r"^the gather failed"):
            send(sender, failing(), 300)
        with pytest.raises(WeightStreamBroken, match=broken):
            result.result()


def test_a_sender_that_leaves_before_it_shares_its_memory_raises_in_the_receiver(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen(1)
        address = StreamAddress("memory_file", str(tmp_path / "socket"), "token", 1)
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(lambda: list(receive(address, 0, CPU, 20.0)))
            client, _ = listener.accept()
            connection = _Connection(client, "the receiver")
            connection.receive()
            connection.send(b'{"bucket_bytes": 300}')
            client.close()
            with pytest.raises(WeightStreamBroken, match="the trainer closed the connection"):
                result.result()


def test_a_receiver_that_disconnects_raises_in_the_sender():
    sender = open_test_sender("memory_file", 1)

    def leave() -> None:
        stream = receive(sender.address, 5, CPU, 20.0)
        next(stream)
        stream.close()

    leaving = threading.Thread(target=leave)
    leaving.start()
    with pytest.raises(WeightStreamBroken, match="rollout worker 5 closed the connection"):
        send(sender, weights().items(), 300)
    leaving.join()


def test_missing_receivers_raise_after_the_timeout():
    sender = open_test_sender("memory_file", 2, timeout_s=0.2)
    with pytest.raises(WeightStreamBroken, match="0 of 2 rollout workers connected"):
        send(sender, weights().items(), 300)


def test_a_receiver_with_a_wrong_token_gets_no_weights():
    sender = open_test_sender("memory_file", 1)
    wrong_address = replace(sender.address, secret="guessed")
    with ThreadPoolExecutor(2) as pool:
        refused = pool.submit(lambda: list(receive(wrong_address, 0, CPU, 20.0)))
        sending = pool.submit(lambda: send(sender, weights().items(), 300))
        with pytest.raises(WeightStreamBroken):
            refused.result()
        assert equal(dict(receive(sender.address, 0, CPU, 20.0)), weights())
        sending.result()


def test_a_closed_sender_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sender = open_test_sender("memory_file", 1, timeout_s=0.1)
    assert Path(sender.address.endpoint).parent.stat().st_mode & 0o077 == 0
    with pytest.raises(WeightStreamBroken):
        send(sender, weights().items(), 300)
    assert not list(tmp_path.iterdir())


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_broadcast_works_between_ipv6_addresses():
    sender = open_sender("gloo", 1, bucket_bytes=1000, device=CPU, host="::1", timeout_s=20.0)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(lambda: dict(receive(sender.address, 0, CPU, 20.0)))
        send(sender, weights().items(), 1000)
        assert equal(received.result(), weights())


def test_the_folder_for_temporary_files_may_have_a_long_path(tmp_path, monkeypatch):
    """The path of a Unix socket may not; jobs of a cluster have long paths."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 100)))
    Path(tempfile.tempdir).mkdir()
    sender = open_test_sender("memory_file", 1)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(lambda: dict(receive(sender.address, 0, CPU, 20.0)))
        send(sender, weights().items(), 1000)
        assert equal(received.result(), weights())


def test_an_unreachable_socket_raises_with_the_backend_to_use():
    unreachable = StreamAddress("memory_file", "/nowhere/socket", "t", 1)
    with pytest.raises(WeightStreamBroken, match="backend=gloo"):
        list(receive(unreachable, 0, CPU, 1.0))


LOCATIONS: list[tuple[Callable[[], tuple[Location, list[Location]]], str]] = [
    (lambda: (Location("m", "cpu", "a"), [Location("m", "cpu", "a")]), "memory_file"),
    (lambda: (Location("m", "cpu", "a"), [Location("n", "cpu", "b")]), "gloo"),
    (lambda: (Location("m", "gpu-1", "a"), [Location("m", "gpu-1", "a")]), "cuda_ipc"),
    (lambda: (Location("m", "gpu-1", "a"), [Location("m", "gpu-2", "a")]), "nccl"),
    (lambda: (Location("m", "gpu-1", "a"), [Location("m", "cpu", "a")]), "memory_file"),
    (lambda: (Location("m", "gpu-1", "a"), [Location("n", "cpu", "b")]), "gloo"),
]


@pytest.mark.parametrize(("locations", "transport"), LOCATIONS)
def test_the_transport_depends_on_both_locations(locations, transport):
    trainer, rollouts = locations()
    assert choose_transport(trainer, rollouts, "naive") == transport
    assert choose_transport(trainer, rollouts, "gloo") == "gloo"


def test_the_location_of_a_process_is_constant():
    assert Location.of_this_process(CPU, "127.0.0.1") == Location.of_this_process(CPU, "127.0.0.1")
