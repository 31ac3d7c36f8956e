"""Contract servers and an engine over them, for tests of the server engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from hone.rollout.contract import Sampling
from hone.rollout.server import ServerRollout

from .contract_server import ContractServer
from .factories import server_engine
from .models import policy, prompts

PROMPT = prompts(1, 7, 7, seed=9)[0]
SHORT = Sampling(max_tokens=24, temperature=1.0, seed=1, ignore_eos=True)


@asynccontextmanager
async def open_engine(
    servers: list[ContractServer], count: int = 1, *, call_timeout_s: float = 30.0, **options: Any
) -> AsyncIterator[ServerRollout]:
    traits = {k: options.pop(k) for k in ("deterministic", "incremental") if k in options}
    servers += [ContractServer(policy(), **traits) for _ in range(count)]
    engine = await asyncio.to_thread(
        server_engine, servers, call_timeout_s=call_timeout_s, **options
    )
    try:
        yield engine
    finally:
        await engine.close()


async def updated(engine: ServerRollout, version: int, seed: int = 1) -> None:
    await engine.pause(keep=True)
    await engine.begin_update()
    await engine.load(policy(seed=seed).lm.named_parameters())
    await engine.commit(version)
    await engine.resume()
