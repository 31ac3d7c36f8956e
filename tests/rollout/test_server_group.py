"""New weights by broadcast in a process group of trainer and servers."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from hone.rollout import server_group
from hone.rollout.build import build_rollout

from .models import policy, trainer_log_probs
from .opened_servers import PROMPT, SHORT, updated
from .test_sglang_process import fake, spec

_ = fake


def test_the_group_listens_where_servers_of_other_machines_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = {"http://localhost:1": "127.0.0.1", "http://gpu2:1": "10.0.0.5"}
    monkeypatch.setattr(server_group, "_address_towards", addresses.__getitem__)
    assert server_group._address_reachable_from(list(addresses)) == "10.0.0.5"
    assert server_group._address_reachable_from(["http://localhost:1"]) == "127.0.0.1"


def test_a_server_at_the_loopback_address_of_ipv6_is_on_this_machine() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert server_group._address_reachable_from(["http://[::1]:1"]) == "127.0.0.1"


@pytest.mark.slow
def test_broadcast_weights_are_those_of_the_next_token(fake: Path) -> None:
    """Two updates, because each update opens a new group."""
    engine: Any = build_rollout(spec(fake, "server.weights=distributed"))

    async def scenario() -> None:
        for version, seed in ((1, 1), (2, 0)):
            await updated(engine, version, seed)
            out = await engine.generate(PROMPT, SHORT, "new")
            assert out.versions == [version] * SHORT.max_tokens
            expected = trainer_log_probs(policy(seed=seed), PROMPT, out.token_ids, 1.0)
            assert out.log_probs == pytest.approx(expected, abs=1e-4)
        assert not engine._stale_servers, "the copy was loaded instead"
        await engine.close()

    asyncio.run(scenario())
