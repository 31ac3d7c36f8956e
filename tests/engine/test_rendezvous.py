"""The rendezvous store: its address, and that no other interface can reach it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from hone.controller.worker import free_port
from hone.engine.rendezvous import STORE_FILE_VARIABLE, rendezvous_store


def listening_on(port: int) -> set[str]:
    """Returns the addresses (hexadecimal, as in /proc/net) that listen on the port."""
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {
        fields[1].rpartition(":")[0]
        for fields in lines
        if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port
    }


def test_the_store_listens_on_the_master_address_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    monkeypatch.delenv(STORE_FILE_VARIABLE, raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    store = rendezvous_store(1, timedelta(seconds=30))
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert listening_on(port) == {"0100007F"}


def test_torchrun_creates_its_own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STORE_FILE_VARIABLE, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert rendezvous_store(2, timedelta(seconds=1)) is None


def test_a_file_store_needs_no_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(STORE_FILE_VARIABLE, str(tmp_path / "meet"))
    store = rendezvous_store(1, timedelta(seconds=30))
    store.set("key", "value")
    assert store.get("key") == b"value"
