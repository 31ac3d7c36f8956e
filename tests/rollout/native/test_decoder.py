"""The decoder forward of a CPU against plain transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hone.agents.collate import collate_outputs
from hone.agents.contract import AgentLoopOutput
from hone.models.decoder_layer import fits_decoder_layer
from hone.models.policy import PolicyModel
from hone.models.tiny import tiny_lm
from hone.ops.rows import pack_rows
from hone.protocol import DataProto
from hone.rollout.native.core import PrefillLayout, SlotCache
from hone.rollout.native.decoder import ModuleDecoder, PrepackedDecoder, can_join_parameters
from hone.rollout.requests import Request
from tests.engine.engines import policy
from tests.models.test_routing import moe_policy, tie_experts

from ..models import prompts
from .paged import ask, finish, paged_core

LENGTHS = [7, 3]
KINDS: list[type[PrepackedDecoder] | type[ModuleDecoder]] = [PrepackedDecoder, ModuleDecoder]


def policy_of(family: str) -> PolicyModel:
    return PolicyModel(tiny_lm(30, hidden=32, layers=2, family=family, tie_embeddings=False)).eval()


@torch.no_grad()
def computed(forward: PrepackedDecoder | ModuleDecoder, ids: Tensor) -> Tensor:
    """The logits of two prompts through the cache of the CPU core."""
    cache = SlotCache(num_layers=2, num_slots=2)
    cache.reserve(max(LENGTHS), 0)
    forward.refresh()
    layout = PrefillLayout(cache, [0, 1], LENGTHS)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return forward.logits(forward(ids, positions, layout))


@torch.no_grad()
def expected(policy: PolicyModel, ids: Tensor) -> Tensor:
    """The logits of each prompt alone through plain transformers."""
    policy.lm.set_attn_implementation("eager")
    try:
        return torch.cat([policy.lm(part[None]).logits[0] for part in ids.split(LENGTHS)])
    finally:
        policy.lm.set_attn_implementation("hone")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_these_families_run_without_their_modules(family: str) -> None:
    assert fits_decoder_layer(policy_of(family))


def test_other_families_run_their_modules() -> None:
    assert not fits_decoder_layer(policy_of("gemma"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_plain_transformers(
    family: str, kind: type[PrepackedDecoder] | type[ModuleDecoder]
) -> None:
    policy, ids = policy_of(family), torch.randint(3, 30, (sum(LENGTHS),))
    torch.testing.assert_close(
        computed(kind(policy), ids), expected(policy, ids), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_training_writes_in_place_is_read_at_the_next_refresh(
    kind: type[PrepackedDecoder] | type[ModuleDecoder],
) -> None:
    policy, ids = policy_of("qwen2"), torch.randint(3, 30, (sum(LENGTHS),))
    forward = kind(policy)
    before = computed(forward, ids)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    after = computed(forward, ids)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, expected(policy, ids), rtol=1e-4, atol=1e-5)


def test_parameters_that_are_replaced_are_read_after_invalidate() -> None:
    policy, ids = policy_of("llama"), torch.randint(3, 30, (sum(LENGTHS),))
    forward = PrepackedDecoder(policy)
    computed(forward, ids)
    other = policy_of("llama")
    with torch.no_grad():
        for module, source in zip(policy.modules(), other.modules(), strict=True):
            for name, parameter in source.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(parameter * 0.5))
    forward.invalidate()
    torch.testing.assert_close(computed(forward, ids), expected(policy, ids), rtol=1e-4, atol=1e-5)


def test_parameters_that_fsdp_gathered_are_not_moved():
    """If they were moved, they would keep the weights of the first all-gather."""
    model = policy()
    assert can_join_parameters(model)
    model.decoder.unshard = lambda: None  # what fully_shard adds to a module's class
    assert not can_join_parameters(model)


def rolled_out(policy: PolicyModel, **options: int) -> list[Request]:
    """Runs two groups; a second turn hits the prefix cache with its first turn."""
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
    gap_without_replay, _ = gaps(trainer, batch, replayed=False)
    gap_with_replay, agreement = gaps(trainer, batch, replayed=True)
    assert gap_without_replay > 1e-2
    assert gap_with_replay < 1e-5
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
