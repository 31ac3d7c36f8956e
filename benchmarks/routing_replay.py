"""Routing replay on one device: log-probs of rollout and trainer with and without it, and its cost.

A random qwen3_moe decodes with the native engine; the trainer's forward over packed rows is compared with the
log-probs that the rollout reported. `python -m benchmarks.routing_replay [OUT.json]`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.families.tiny import randomise
from benchmarks.gpu_timing import median_s
from hone.agents.collate import collate_outputs
from hone.agents.contract import AgentLoopOutput
from hone.models.decoder_layer import fuse
from hone.models.policy import PolicyModel, register_attention
from hone.ops.rows import pack_rows
from hone.protocol import DataProto
from hone.rollout.contract import Sampling
from hone.rollout.native.paged_core import PagedCore
from hone.rollout.requests import Request

SIZES = {
    "cpu": {"hidden": 64, "layers": 2, "experts": 8, "top": 2, "prompts": 4, "tokens": 16, "blocks": 200},
    "cuda": {"hidden": 1024, "layers": 12, "experts": 64, "top": 8, "prompts": 64, "tokens": 256,
             "blocks": 8000},
}  # fmt: skip
N, PROMPT, VOCABULARY, ROWS = 4, 64, 4096, 32


def build(size: dict[str, int], device: torch.device) -> PolicyModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=VOCABULARY, hidden_size=size["hidden"], num_hidden_layers=size["layers"],
        num_attention_heads=size["hidden"] // 64, num_key_value_heads=1, head_dim=64,
        num_experts=size["experts"], num_experts_per_tok=size["top"],
        moe_intermediate_size=size["hidden"] // 2, norm_topk_prob=True, max_position_embeddings=1024,
        tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lm = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=register_attention()
    )
    randomise(lm)
    policy = PolicyModel(lm.to(device).eval())
    if device.type == "cuda":
        fuse(policy)
    return policy


def core_of(policy: PolicyModel, size: dict[str, int], record: bool) -> PagedCore:
    return PagedCore(
        policy, eos_ids=(1,), max_num_seqs=size["prompts"] * N, max_num_batched_tokens=8192,
        max_model_len=PROMPT + size["tokens"], gpu_memory_utilization=0.2, blocks=size["blocks"],
        record_experts=record,
    )  # fmt: skip


def rolled_out(core: PagedCore, size: dict[str, int]) -> list[Request]:
    draw = torch.Generator().manual_seed(0)
    requests = []
    for prompt in torch.randint(2, VOCABULARY, (size["prompts"], PROMPT), generator=draw).tolist():
        for _ in range(N):
            seed = len(requests)
            requests.append(
                Request(prompt, Sampling(size["tokens"], 1.0, seed, ignore_eos=True), f"r{seed}")
            )
            core.add(requests[-1])
    while core.busy:
        core.step(lambda: False)
    return requests


def compared(policy: PolicyModel, requests: list[Request], *, replayed: bool) -> dict[str, float]:
    """Differences of log-probs over all tokens, in groups of rows."""
    gaps, agreement = [], []
    device = next(policy.parameters()).device
    for start in range(0, len(requests), ROWS):
        batch = batch_of(requests[start : start + ROWS]).batch
        columns = (
            batch["prompts"],
            batch["responses"],
            batch["attention_mask"],
            batch["response_mask"],
        )
        packed = pack_rows(*columns, share_prompts=True, with_packed_positions=True)
        if replayed:
            packed = packed.with_experts(batch["routed_experts"])
        with torch.no_grad():
            out = policy(packed.to(device), temperature=1.0)
        gaps.append((out["log_probs"].cpu() - batch["rollout_log_probs"]).abs().flatten())
        if replayed:
            agreement.append(out["routing_agreement"].cpu().flatten())
    gap = torch.cat(gaps)
    result = {
        "mean": float(gap.mean()),
        "p99": float(gap.quantile(0.99)),
        "max": float(gap.max()),
    }
    return result | ({"agreement": float(torch.cat(agreement).mean())} if replayed else {})


def batch_of(requests: list[Request]) -> DataProto:
    rows = [
        AgentLoopOutput(
            r.prompt_ids, r.token_ids, [1] * len(r.token_ids), r.log_probs,
            routed_experts=r.output().routed_experts,
        )
        for r in requests
    ]  # fmt: skip
    return collate_outputs(rows, pad_token_id=0)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = SIZES[device.type]
    policy = build(size, device)
    tokens = size["prompts"] * N * size["tokens"]
    results: dict[str, Any] = {"device": device.type, "size": size}
    for name, record in (("plain", False), ("recording", True)):
        core = core_of(policy, size, record)
        seconds = median_s(lambda core=core: rolled_out(core, size), device, runs=3)  # type: ignore[misc]
        results[f"{name}_tokens_per_s"] = round(tokens / seconds)
        requests = rolled_out(core, size) if record else []
    results["log_prob_gap"] = compared(policy, requests, replayed=False)
    results["log_prob_gap_replayed"] = compared(policy, requests, replayed=True)
    print(json.dumps(results, indent=1))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
