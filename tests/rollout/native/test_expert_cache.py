"""Experts recorded in the rollout, replayed in the trainer's forward: its log-probs are the rollout's."""

from __future__ import annotations

import torch

from hone.agents.collate import collate_outputs
from hone.agents.contract import AgentLoopOutput
from hone.models.policy import PolicyModel
from hone.ops.packing import pack_rows
from hone.protocol import DataProto
from hone.rollout.requests import Request
from tests.models.test_routing import moe_policy, tie_experts

from ..models import prompts
from .paged import ask, finish, paged_core


def rolled_out(policy: PolicyModel, **options: int) -> list[Request]:
    """Two groups, of which one has a second turn that finds its first in the prefix cache."""
    core = paged_core(policy, record_experts=True, max_model_len=128, **options)
    short, long = prompts(2, 20, 40)
    first = [ask([t % 90 + 3 for t in p], 18, seed=i) for i, p in enumerate((short, short, long))]
    finish(core, first)
    turns = [
        ask([*r.prompt_ids, *r.token_ids, 5, 6, 7], 10, seed=9 + i) for i, r in enumerate(first)
    ]
    finish(core, turns)
    return [*first, *turns]


def collated(requests: list[Request]) -> DataProto:
    rows = [
        AgentLoopOutput(
            r.prompt_ids, r.token_ids, [1] * len(r.token_ids), r.log_probs,
            routed_experts=r.output().routed_experts,
        )
        for r in requests
    ]  # fmt: skip
    return collate_outputs(rows, pad_token_id=0)


def gaps(policy: PolicyModel, batch: DataProto, *, replayed: bool) -> tuple[float, float]:
    """The largest difference of log-probs, and the smallest agreement of routers."""
    b = batch.batch
    names = ("prompts", "responses", "attention_mask", "response_mask")
    packed = pack_rows(*(b[name] for name in names), share_prompts=True, with_packed_positions=True)
    if replayed:
        packed = packed.with_experts(b["routed_experts"])
    with torch.no_grad():
        out = policy(packed, temperature=1.0)
    gap = float((out["log_probs"] - b["rollout_log_probs"]).abs().max())
    mask = b["response_mask"].bool()
    return gap, float(out["routing_agreement"][mask].min()) if replayed else 1.0


def test_a_replay_gives_the_log_probs_of_a_rollout_that_chose_other_experts() -> None:
    rollout, trainer = moe_policy("qwen3_moe"), moe_policy("qwen3_moe")
    tie_experts(rollout, seed=1)
    tie_experts(trainer, seed=2)
    batch = collated(rolled_out(rollout))
    assert batch.batch["routed_experts"].dtype == torch.int16
    assert batch.batch["routed_experts"].shape[1:] == (batch.batch["attention_mask"].shape[1], 2, 2)
    trainer.enable_routing()
    apart, _ = gaps(trainer, batch, replayed=False)
    together, agreement = gaps(trainer, batch, replayed=True)
    assert apart > 1e-2
    assert together < 1e-5
    assert agreement < 1.0


def test_preempted_and_aborted_requests_keep_the_experts_of_their_tokens() -> None:
    policy = moe_policy("qwen3_moe")
    tight = rolled_out(policy, blocks=9)
    assert gaps(policy, collated(tight), replayed=True)[0] < 1e-5
    core = paged_core(policy, record_experts=True)
    request = ask(list(range(5, 25)), 60)
    core.add(request)
    core.step(lambda: True)
    core.abort()
    experts = request.output().routed_experts
    assert experts is not None
    assert len(experts) == request.length - 1
    assert gaps(policy, collated([request]), replayed=True)[0] < 1e-5


def test_a_plain_engine_records_nothing() -> None:
    (request,) = (ask(list(range(5, 25)), 4),)
    finish(paged_core(moe_policy("qwen3_moe")), [request])
    assert request.output().routed_experts is None
