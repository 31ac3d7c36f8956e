"""The test of tensor-parallel decoding in gloo processes; spawned processes can import this file."""

from __future__ import annotations

import asyncio
import os
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hone.agents.loop_thread import run_with_engine
from hone.ops.counter_rng import uniform
from hone.rollout.contract import RolloutEngine, RolloutError, Sampling, TokenOutput
from hone.rollout.native.follower import FollowerRollout
from hone.rollout.native.leader import LeaderRollout
from hone.rollout.native.peers import connect

from ..factories import NativeFactory
from ..models import next_probabilities, policy, prompts
from .slot import cores_of, shards_of

REQUESTS = 2000
TOKENS = 6
NEAR = 1e-4


def sampling_of(number: int) -> Sampling:
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.9}]
    return Sampling(
        **{"max_tokens": TOKENS, "temperature": 1.0, "seed": number} | kinds[number % 4]
    )


def answers(engine: RolloutEngine) -> list[TokenOutput]:
    async def ask_all() -> list[TokenOutput]:
        numbered_prompts = enumerate(prompts(REQUESTS, longest=8, seed=5))
        jobs = (engine.generate(p, sampling_of(i), f"request {i}") for i, p in numbered_prompts)
        return list(await asyncio.gather(*jobs))

    return run_with_engine(engine, ask_all())


def margin(number: int, tokens: list[int], other: list[int]) -> float:
    """How near the first differing token was: the distance of the drawn number from the next token's share
    of the cumulative probabilities, or between the two best logits of a greedy request."""
    same = next(i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b)
    sampling, prompt = sampling_of(number), prompts(REQUESTS, longest=8, seed=5)[number]
    p = next_probabilities(policy(), prompt + tokens[:same], sampling.temperature or 1.0)
    if sampling.temperature == 0:
        best = p.log().topk(2).values
        return float(best[0] - best[1])
    if sampling.top_p < 1:
        ordered, order = p.sort(descending=True)
        included = ordered.cumsum(0) - ordered < sampling.top_p
        p = torch.zeros_like(p).scatter(0, order, ordered * included)
    edges = p.cumsum(0)
    seed, position = torch.tensor([sampling.seed]), torch.tensor([len(prompt) + same])
    return float((edges - uniform(seed, position).double() * edges[-1]).abs().min())


def law(rank: int, size: int) -> dict[str, Any]:
    """Compares both cores with one rank; returns margins of responses that differ, and the worst log-prob."""
    model, results = policy(), {}
    peers = connect(rank, size, size, torch.device("cpu"), 120.0)
    (shard,) = shards_of(model, [peers])
    expected = answers(NativeFactory().build(model, max_num_seqs=256)) if rank == 0 else []
    for name, paged in (("slots", False), ("pages", True)):
        settings = {"max_num_batched_tokens": 4096, "max_model_len": 64, "max_num_seqs": 256}
        (core,) = cores_of([shard], paged=paged, **settings)
        if rank:
            FollowerRollout(core, peers).drive(lambda: False)
            continue
        engine = LeaderRollout(core, peers)
        outputs = answers(engine)
        engine.release()
        pairs = list(enumerate(zip(outputs, expected, strict=True)))
        different = [
            (i, a.token_ids, b.token_ids) for i, (a, b) in pairs if a.token_ids != b.token_ids
        ]
        results[name] = {
            "requests": len(outputs),
            "margins": [margin(*row) for row in different],
            "worst": max(
                abs(x - y)
                for _, (a, b) in pairs
                if a.token_ids == b.token_ids
                for x, y in zip(a.log_probs, b.log_probs, strict=True)
            ),
        }
    results |= exit_of_a_rank(rank, size)
    return results


def exit_of_a_rank(rank: int, size: int) -> dict[str, Any]:
    """A rank exits in the middle of a step; returns the error of rank 0."""
    peers = connect(rank, size, size, torch.device("cpu"), 60.0)
    (shard,) = shards_of(policy(), [peers])
    (core,) = cores_of([shard])
    if rank:
        step, calls = core.step, []

        def ending(should_return: Any) -> Any:
            calls.append(1)
            return step(should_return) if len(calls) < 3 else os._exit(0)

        core.step = ending  # type: ignore[method-assign]
        FollowerRollout(core, peers).drive(lambda: False)
    engine = LeaderRollout(core, peers)
    try:
        run_with_engine(engine, engine.generate([3, 4], Sampling(50, 1.0, 0, ignore_eos=True), "a"))
    except RolloutError as error:
        return {"exit": str(error)}
    return {"exit": "no error"}


def run_rank(rank: int, size: int, port: int, folder: str) -> None:
    place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    try:
        torch.save(law(rank, size), Path(folder) / f"rank{rank}.pt")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # the other rank has exited
