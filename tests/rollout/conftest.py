"""Fixtures of the rollout tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import models
from .contract_server import ContractServer
from .vllm_factory import SHAPE


@pytest.fixture
def servers() -> Iterator[list[ContractServer]]:
    """Servers that a test starts; they are closed after it."""
    started: list[ContractServer] = []
    yield started
    for server in started:
        server.close()


@pytest.fixture
def heads_of_32_numbers() -> Iterator[None]:
    """Policies of a shape that vLLM's CPU kernels support."""
    before = dict(models.SHAPE)
    models.SHAPE.update(SHAPE)
    models.sharp_lm.cache_clear()
    yield
    models.SHAPE.clear()
    models.SHAPE.update(before)
    models.sharp_lm.cache_clear()
