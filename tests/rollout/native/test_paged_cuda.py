"""The paged engine on a GPU: the rollout contract, graphs against eager, memory, 16-bit agreement."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch

from hone.models.policy import PolicyModel
from hone.models.tiny import tiny_lm
from hone.ops.rows import pack_rows
from hone.rollout.contract import RolloutEngine, Sampling
from hone.rollout.native.engine import NativeRollout
from hone.rollout.native.paged_core import PagedCore

from .. import (  # noqa: F401
    clauses_control,
    clauses_failure,
    clauses_kept,
    clauses_lifecycle,
    clauses_model,
    clauses_sampling,
)
from ..engine_contract import CLAUSES, Factory, ask_all, play, update, verify
from ..models import policy, prompts
from .paged import PagedFactory, paged_core

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


class CudaFactory(PagedFactory):
    """The policy stays on the CPU for the clauses; the engine decodes with a copy on the GPU."""

    name = "paged-cuda"
    eager = False

    def build(self, policy: PolicyModel, *, max_num_seqs: int = 64) -> RolloutEngine:
        moved = copy.deepcopy(policy).cuda()
        core = paged_core(moved, max_num_seqs=max_num_seqs, enforce_eager=self.eager)
        return NativeRollout(core)


class EagerCudaFactory(CudaFactory):
    name = "paged-cuda-eager"
    eager = True


CASES = [(c.name, CudaFactory()) for c in CLAUSES.values() if c.applies(CudaFactory())]


@pytest.mark.parametrize(("name", "factory"), CASES, ids=[n for n, _ in CASES])
def test_contract(name: str, factory: Factory) -> None:
    verify(name, factory)


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "mistral", "gemma"])
def test_graphs_and_eager_steps_draw_the_same_tokens(family: str) -> None:
    prompt_ids = prompts(40, longest=60)
    sampling = [
        Sampling(max_tokens=50, temperature=(0.0, 0.7, 1.0)[i % 3], seed=i) for i in range(40)
    ]
    outputs = []
    for factory in (CudaFactory(), EagerCudaFactory()):
        with factory.engine(policy(family), max_num_seqs=16) as engine:
            outputs.append(ask_all(engine, prompt_ids, sampling))
    assert [o.token_ids for o in outputs[0]] == [o.token_ids for o in outputs[1]]


def small_lm() -> Any:
    lm = tiny_lm(5000, hidden=256, layers=4, heads=8, kv_heads=2, mlp=512, eos_token_id=None)
    return lm.cuda().bfloat16().eval()


def core_of(lm: Any, **changed: Any) -> PagedCore:
    options: dict[str, Any] = {
        "eos_ids": (), "max_num_seqs": 32, "max_num_batched_tokens": 4096, "max_model_len": 400,
        "gpu_memory_utilization": 0.1,
    }  # fmt: skip
    return PagedCore(PolicyModel(lm), **(options | changed))


def sampled(
    engine: NativeRollout, prompt_ids: list[list[int]], tokens: int, temperature: float = 1.0
) -> Any:
    sampling = [
        Sampling(tokens, temperature, seed=i, ignore_eos=True) for i in range(len(prompt_ids))
    ]
    return ask_all(engine, prompt_ids, sampling)


def random_prompts(count: int, length: int) -> list[list[int]]:
    return torch.randint(3, 5000, (count, length)).tolist()


def test_log_probs_agree_with_the_trainer_in_bfloat16() -> None:
    lm = small_lm()
    engine = NativeRollout(core_of(lm))
    prompt_ids = random_prompts(24, 70)
    outputs = sampled(engine, prompt_ids, 100)
    asyncio.run(engine.close())
    ids = torch.tensor(prompt_ids)
    responses = torch.tensor([o.token_ids for o in outputs])
    mask = torch.ones_like(responses)
    packed = pack_rows(ids, responses, torch.ones(24, 170).long(), mask, share_prompts=False)
    with torch.no_grad():
        out = PolicyModel(lm)(packed.to(torch.device("cuda")), temperature=1.0)
    gap = (out["log_probs"].cpu() - torch.tensor([o.log_probs for o in outputs])).abs()
    assert gap.mean() < 0.01


def test_a_small_pool_preempts_and_still_says_the_same() -> None:
    prompt_ids = random_prompts(24, 50)
    lm = small_lm().float()
    texts = []
    for blocks in (None, 100):
        core = core_of(lm, blocks=blocks)
        engine = NativeRollout(core)
        outputs = sampled(engine, prompt_ids, 150, temperature=0.0)
        texts.append([o.token_ids for o in outputs])
        asyncio.run(engine.close())
    assert any(o.num_preempted for o in outputs)
    assert texts[0] == texts[1]


def test_sleep_gives_the_memory_back_and_graphs_survive_it() -> None:
    core = core_of(small_lm(), max_num_seqs=32)
    engine = NativeRollout(core)
    prompt_ids = random_prompts(24, 50)
    before = [o.token_ids for o in sampled(engine, prompt_ids, 40)]
    held, allocated = core.cache.nbytes, torch.cuda.memory_allocated()
    graphs = dict(core._decode_step._graphs)
    asyncio.run(engine.sleep())
    assert core.cache.nbytes == 0
    assert allocated - torch.cuda.memory_allocated() >= held
    blocker = torch.empty(
        held // 2, dtype=torch.uint8, device="cuda"
    )  # new memory at another address
    asyncio.run(engine.wake_up())
    after = [o.token_ids for o in sampled(engine, prompt_ids, 40)]
    asyncio.run(engine.close())
    assert after == before
    assert core._decode_step._graphs.keys() == graphs.keys()
    assert all(core._decode_step._graphs[k] is graphs[k] for k in graphs)
    del blocker


def test_training_still_reaches_parameters_that_share_memory() -> None:
    lm = small_lm()
    core = core_of(lm)
    engine = NativeRollout(core)
    prompt_ids = random_prompts(8, 30)
    before = sampled(engine, prompt_ids, 20)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(1.05)
    play(update(engine, (), 1))
    after = sampled(engine, prompt_ids, 20)
    asyncio.run(engine.close())
    assert [o.log_probs for o in before] != [o.log_probs for o in after]
    attention = lm.model.layers[0].self_attn
    joined = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(core._forward._layers[0].qkv[0], joined)
