"""Fixtures of the rollout tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .contract_server import ContractServer


@pytest.fixture
def servers() -> Iterator[list[ContractServer]]:
    """Servers that a test starts; they are closed after it."""
    started: list[ContractServer] = []
    yield started
    for server in started:
        server.close()
