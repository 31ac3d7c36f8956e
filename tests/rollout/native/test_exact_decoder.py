"""Exact mode: the log-probs of engine and trainer have the same bits."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from hone.models.policy import PolicyModel
from hone.models.tiny import tiny_lm
from hone.ops.rows import pack_rows
from hone.rollout.contract import RolloutError, Sampling
from hone.rollout.native.engine import NativeRollout
from hone.rollout.native.exact_decoder import ExactDecoder, check_exact_supported
from hone.rollout.native.paged_core import PagedCore

from ..engine_contract import ask_all, play, update

VOCABULARY = 61
SHAPES = {
    "llama": {
        "heads": 6,
        "kv_heads": 2,
        "hidden": 96,
        "mlp": 250,
    },  # widths that are not powers of two
    "qwen2": {"heads": 4, "kv_heads": 4, "hidden": 64, "mlp": 128},  # no grouped heads
}


def exact_policy(family: str) -> PolicyModel:
    lm = tiny_lm(VOCABULARY, layers=3, family=family, eos_token_id=None, **SHAPES[family])
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)  # larger weights, so that all sums are rounded
    policy = PolicyModel(lm.eval())
    policy.exact = ExactDecoder(policy)
    return policy


def engine_of(policy: PolicyModel, **changed: Any) -> NativeRollout:
    options: dict[str, Any] = {
        "eos_ids": (), "max_num_seqs": 16, "max_num_batched_tokens": 200, "max_model_len": 300,
        "gpu_memory_utilization": 0.1, "exact": policy.exact,
    }  # fmt: skip
    return NativeRollout(PagedCore(policy, **(options | changed)))


def groups(prompts: int, samples: int, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    chooser = random.Random(seed)
    requests = [
        [chooser.randrange(3, VOCABULARY) for _ in range(chooser.randint(1, 90))]
        for _ in range(prompts)
    ]
    rows = [prompt for prompt in requests for _ in range(samples)]
    return rows, [chooser.randint(1, 100) for _ in rows]


def batch_of(rows: list[list[int]], outputs: list[Any]) -> dict[str, torch.Tensor]:
    width, reach = max(map(len, rows)), max(len(o.token_ids) for o in outputs)
    batch = {
        "prompts": torch.zeros(len(rows), width, dtype=torch.int64),
        "responses": torch.zeros(len(rows), reach, dtype=torch.int64),
        "attention_mask": torch.zeros(len(rows), width + reach, dtype=torch.int64),
        "response_mask": torch.zeros(len(rows), reach, dtype=torch.int64),
        "log_probs": torch.zeros(len(rows), reach),
    }
    for i, (prompt, out) in enumerate(zip(rows, outputs, strict=True)):
        made = len(out.token_ids)
        batch["prompts"][i, width - len(prompt) :] = torch.tensor(prompt)
        batch["responses"][i, :made] = torch.tensor(out.token_ids)
        batch["attention_mask"][i, width - len(prompt) : width + made] = 1
        batch["response_mask"][i, :made] = 1
        batch["log_probs"][i, :made] = torch.tensor(out.log_probs)
    return batch


def trainer_gap(
    policy: PolicyModel, batch: dict[str, torch.Tensor], rows: list[int], share: bool, heat: float
) -> float:
    columns = ("prompts", "responses", "attention_mask", "response_mask")
    packed = pack_rows(*(batch[name][rows] for name in columns), share_prompts=share)
    device = next(policy.parameters()).device
    out = policy(packed.to(device), temperature=heat, with_entropy=True)
    return float((out["log_probs"].detach().cpu() - batch["log_probs"][rows]).abs().max())


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollout_and_trainer_agree_to_the_last_bit(family: str, temperature: float) -> None:
    policy = exact_policy(family)
    rows, lengths = groups(6, 3)
    sampling = [
        Sampling(n, temperature, seed=i, ignore_eos=True, top_p=0.9 if i % 5 == 0 else 1.0)
        for i, n in enumerate(lengths)
    ]
    engine = engine_of(policy)
    outputs = ask_all(engine, rows, sampling)
    asyncio.run(engine.close())
    batch = batch_of(rows, outputs)
    cuts = [list(range(len(rows))), [0], [7, 3], list(range(5, 16))]
    for share in (True, False):
        for cut in cuts:
            assert trainer_gap(policy, batch, cut, share, temperature) == 0.0


def test_the_same_request_has_the_same_bits_in_any_batch() -> None:
    policy = exact_policy("qwen2")
    rows, lengths = groups(12, 1)
    sampling = [Sampling(n, 1.0, seed=i, ignore_eos=True) for i, n in enumerate(lengths)]
    engine = engine_of(policy)
    together = ask_all(engine, rows, sampling)
    alone = [ask_all(engine, [rows[i]], [sampling[i]])[0] for i in (0, 5, 11)]
    asyncio.run(engine.close())
    for out, i in zip(alone, (0, 5, 11), strict=True):
        assert out.token_ids == together[i].token_ids
        assert out.log_probs == together[i].log_probs


def test_a_cached_prefix_and_a_preempted_row_change_no_bit() -> None:
    policy = exact_policy("llama")
    rows, lengths = [row[:6] for row in groups(10, 1, seed=4)[0]], [90] * 10
    sampling = [Sampling(n, 1.0, seed=i, ignore_eos=True) for i, n in enumerate(lengths)]
    log_probs_by_run = []
    for blocks in (None, 30):
        engine = engine_of(policy, blocks=blocks)
        first = ask_all(engine, rows, sampling)
        again = ask_all(engine, rows, sampling)  # now the prompts hit the prefix cache
        assert [o.log_probs for o in first] == [o.log_probs for o in again]
        log_probs_by_run.append([o.log_probs for o in first])
        asyncio.run(engine.close())
    assert any(output.num_preempted for output in first)
    assert log_probs_by_run[0] == log_probs_by_run[1]


@pytest.mark.parametrize("family", SHAPES)
def test_gradients_are_the_plain_models(family: str) -> None:
    policy = exact_policy(family)
    rows, lengths = groups(3, 2)
    sampling = [Sampling(n, 1.0, seed=i, ignore_eos=True) for i, n in enumerate(lengths)]
    engine = engine_of(policy)
    batch = batch_of(rows, ask_all(engine, rows, sampling))
    asyncio.run(engine.close())
    columns = ("prompts", "responses", "attention_mask", "response_mask")
    packed = pack_rows(*(batch[name] for name in columns), share_prompts=True)
    grads = []
    for exact in (policy.exact, None):
        policy.exact = exact
        policy.zero_grad()
        out = policy(packed, temperature=0.8, with_entropy=True)
        (out["log_probs"].sum() + out["entropy"].sum()).backward()
        grads.append({n: p.grad.clone() for n, p in policy.named_parameters()})
    for name, expected_grad in grads[1].items():
        # The bias of the keys adds one number to all scores of a query, so its gradient is only rounding.
        scale = (
            expected_grad.norm()
            if "k_proj.bias" not in name
            else grads[1][name.replace("k_", "q_")].norm()
        )
        assert (grads[0][name] - expected_grad).norm() <= 1e-4 * scale, name


def test_new_weights_are_seen_by_both_sides() -> None:
    policy = exact_policy("qwen2")
    rows, lengths = groups(4, 1)
    sampling = [Sampling(n, 1.0, seed=i, ignore_eos=True) for i, n in enumerate(lengths)]
    engine = engine_of(policy)
    before = ask_all(engine, rows, sampling)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.02)
    play(update(engine, (), 1))
    after = ask_all(engine, rows, sampling)
    asyncio.run(engine.close())
    assert [o.log_probs for o in before] != [o.log_probs for o in after]
    assert trainer_gap(policy, batch_of(rows, after), [0, 1, 2, 3], True, 1.0) == 0.0


def test_other_families_are_refused_by_name() -> None:
    lm = tiny_lm(VOCABULARY, family="qwen3")
    with pytest.raises(RolloutError, match="llama and qwen2, but some/model is qwen3"):
        check_exact_supported(lm.config, "some/model")


def test_a_sliding_window_is_refused() -> None:
    lm = tiny_lm(VOCABULARY, family="qwen2")
    lm.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(RolloutError, match="sliding_attention"):
        check_exact_supported(lm.config, "some/model")


def test_half_precision_on_a_cpu_is_refused() -> None:
    lm = tiny_lm(VOCABULARY, family="llama").bfloat16()
    with pytest.raises(RolloutError, match=r"fsdp_config\.dtype=float32"):
        ExactDecoder(PolicyModel(lm))
