"""Offload on the device: memory is given back between phases, and training stays bit-equal."""

from __future__ import annotations

import gc

import pytest
import torch

from hone.config.engine import FSDPConfig, OptimConfig
from hone.engine.build import build_engine
from hone.models.policy import PolicyModel
from hone.models.tiny import tiny_lm
from hone.ops.rows import MicroBatchRule
from hone.workers.actor import PolicyObjective
from hone.workers.device import make_deterministic
from tests.engine.batches import VOCABULARY, WIDTH, rows
from tests.engine.engines import actor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

RULE = MicroBatchRule(rows=100, tokens=10_000)


def make_offload_engine(fsdp: FSDPConfig, dtype: torch.dtype = torch.bfloat16):
    lm = tiny_lm(VOCABULARY, hidden=512, layers=4, mlp=1024, seed=1)
    return build_engine(
        PolicyModel(lm.to("cuda", dtype)),
        optim=OptimConfig(lr=1e-3),
        grad_clip=1.0,
        fsdp=fsdp,
        train_micro_batch_rule=RULE,
        infer_micro_batch_rule=RULE,
        response_width=WIDTH,
    )


@pytest.fixture(autouse=True)
def deterministic():
    make_deterministic(1)
    yield
    torch.use_deterministic_algorithms(False)


def update(engine):
    metrics = engine.train_minibatch(rows(), PolicyObjective(actor(), temperature=1.0))
    return metrics, {name: x.cpu() for name, x in engine.named_hf_weights()}


OFFLOADS = {
    "none": FSDPConfig(),
    "both": FSDPConfig(param_offload=True, optimizer_offload=True),
    "optimizer": FSDPConfig(optimizer_offload=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OFFLOADS)
def test_training_is_bit_equal_under_every_offload(name, dtype):
    """`none` shows that the update itself is deterministic."""
    plain, offloaded = (
        make_offload_engine(FSDPConfig(), dtype),
        make_offload_engine(OFFLOADS[name], dtype),
    )
    for _ in range(3):
        expected, actual = update(plain), update(offloaded)
        assert actual[0] == expected[0]
        assert all(torch.equal(actual[1][name], x) for name, x in expected[1].items())


def test_memory_falls_between_phases():
    update(make_offload_engine(FSDPConfig()))  # libraries allocate their workspaces
    gc.collect()  # engines have reference cycles, whose memory would be counted here
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = make_offload_engine(FSDPConfig(param_offload=True, optimizer_offload=True))
    parameters = sum(p.numel() for p in engine.module.parameters())
    slack = 4 << 20
    assert torch.cuda.memory_allocated() - before < slack
    update(engine)
    assert torch.cuda.memory_allocated() - before < slack
    with engine.on_device():
        held = torch.cuda.memory_allocated() - before
        assert abs(held - 2 * parameters) < slack  # bfloat16 parameters alone
    with engine.on_device(optimizer=True):
        held = torch.cuda.memory_allocated() - before
        assert abs(held - 14 * parameters) < slack  # masters and two moments in float32


def test_only_the_optimizer_is_offloaded_with_optimizer_offload_alone():
    engine = make_offload_engine(FSDPConfig(optimizer_offload=True))
    update(engine)
    parameters = sum(p.numel() for p in engine.module.parameters())
    assert engine.offload.parameters is None
    # Two moments and the masters, four bytes each, and one counter a tensor.
    assert engine.offload.optimizer.offloaded_bytes >= 12 * parameters


def test_the_native_rollout_decodes_the_same_after_its_policy_was_offloaded(tmp_path):
    import asyncio

    from hone.agents.loop_thread import run_with_engine
    from hone.models.tiny import character_tokenizer
    from hone.rollout.build import build_rollout
    from hone.rollout.contract import RolloutSpec, Sampling
    from hone.verl.dialect import load_config

    tokenizer = character_tokenizer()
    rollout = load_config(
        ["actor_rollout_ref.rollout.max_num_seqs=8", "data.max_response_length=32"]
    ).actor_rollout_ref.rollout
    lm = tiny_lm(len(tokenizer), hidden=512, layers=2, mlp=1024, seed=1)
    policy = PolicyModel(lm.to("cuda", torch.bfloat16))
    engine = build_engine(
        policy,
        optim=OptimConfig(lr=1e-3),
        grad_clip=1.0,
        fsdp=FSDPConfig(param_offload=True),
        train_micro_batch_rule=RULE,
        infer_micro_batch_rule=RULE,
        response_width=WIDTH,
    )
    with engine.on_device():
        decoding = build_rollout(
            RolloutSpec(
                rollout,
                model_path="unused",
                load_policy=lambda: policy,
                dtype=torch.bfloat16,
                device=torch.device("cuda"),
                tokenizer=tokenizer,
                eos_ids=(0,),
            )
        )

    def answers():
        sampling = Sampling(max_tokens=24, temperature=0.0, seed=1)

        async def ask():
            requests = [decoding.generate([3, 4, 5 + i], sampling, str(i)) for i in range(4)]
            return await asyncio.gather(*requests)

        with engine.on_device():
            token_ids = [out.token_ids for out in run_with_engine(decoding, ask())]
            asyncio.run(decoding.sleep())
        return token_ids

    first = answers()
    blocker = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")  # its old place is taken
    assert answers() == first
    del blocker
    asyncio.run(decoding.close())
