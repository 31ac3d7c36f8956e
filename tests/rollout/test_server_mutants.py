"""Each mutant breaks the server engine in one way, and the contract tests name the broken clause."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import pytest

from hone.rollout import streaming_engine
from hone.rollout.contract import Sampling
from hone.rollout.requests import Chunk, Request
from hone.rollout.server import ServerRollout
from hone.rollout.sglang_server import SGLangServer
from hone.rollout.streaming_engine import StreamingEngine

from . import (
    clauses_control,
    clauses_failure,
    clauses_kept,
    clauses_lifecycle,
    clauses_model,
    clauses_sampling,
)
from . import engine_contract as contract
from .factories import SGLangFactory

_ = (
    clauses_control,
    clauses_failure,
    clauses_kept,
    clauses_lifecycle,
    clauses_model,
    clauses_sampling,
)
STREAM = SGLangServer.stream


def stream_with(**changes: Any) -> Callable[..., AsyncGenerator[Chunk, None]]:
    """A stream with other sampling parameters than those of the request."""
    return lambda self, request, sampling: STREAM(self, request, replace(sampling, **changes))


def without_tokens(
    self: SGLangServer, request: Request, sampling: Sampling
) -> AsyncGenerator[Chunk, None]:
    return STREAM(self, replace(request, token_ids=[]), sampling)


def append_with_next_version(self: StreamingEngine, request: Request, chunk: Chunk) -> None:
    APPEND(self, request, chunk)
    request.versions[-1] += 1


def without_priority(
    self: SGLangServer, request: Request, sampling: Sampling
) -> AsyncGenerator[Chunk, None]:
    return STREAM(self, replace(request, priority=0), sampling)


async def pause_without_hold(self: StreamingEngine, keep: bool = False) -> None:
    await PAUSE(self, keep)
    self._paused = False
    self._not_paused.set()


async def abort_nothing(self: StreamingEngine, request_ids: Any = None) -> None:
    """`abort` ends no request."""


async def publish_nothing(self: ServerRollout, server: Any, version: str) -> None:
    """The folder is written, but no server loads it."""


APPEND, PAUSE = StreamingEngine._append, StreamingEngine.pause
MUTANTS: list[tuple[type, str, Any, str]] = [
    (
        SGLangServer,
        "stream",
        stream_with(seed=0),
        "different seeds differ and the same seed repeats",
    ),
    (SGLangServer, "stream", stream_with(top_k=-1), "top k keeps the k likeliest"),
    (
        SGLangServer,
        "stream",
        stream_with(min_p=0.0),
        "min p keeps what is likely beside the likeliest",
    ),
    (SGLangServer, "stream", without_tokens, "pause with keep goes on where it stood"),
    (
        SGLangServer,
        "stream",
        without_priority,
        "the lowest priority starts first and ties by arrival",
    ),
    (
        StreamingEngine,
        "_append",
        append_with_next_version,
        "every token carries the version it was drawn with",
    ),
    (StreamingEngine, "pause", pause_without_hold, "pause ends what runs and holds what comes"),
    (ServerRollout, "_publish", publish_nothing, "new weights are used from the next token"),
    (
        streaming_engine,
        "check_name_and_shape",
        lambda *_: None,
        "weights with unknown names are refused",
    ),
    (StreamingEngine, "abort", abort_nothing, "abort ends the named requests alone"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "method", "mutant", "name"), MUTANTS, ids=[f"{m[1]}-{m[3]}" for m in MUTANTS]
)
def test_the_contract_names_the_clause_a_broken_server_engine_breaks(
    owner: Any, method: str, mutant: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "DEADLINE_S", 10.0)
    monkeypatch.setattr(owner, method, mutant)
    with pytest.raises(contract.Violation, match=f"^{name}: "):
        contract.verify(name, SGLangFactory())
