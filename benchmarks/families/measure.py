"""How far the rollout's and the trainer's log-probs are from plain `transformers`' on a family's models.

Plain means eager attention, one text at a time, no cache. Ours: groups that share a prompt, a second turn
that finds the first in the prefix cache, prompts of several lengths side by side, rows packed with and
without shared prompts. A family that is not supported must be refused from its config alone.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.families.tiny import POSITIONS, VOCABULARY, randomise, tiny_config
from hone.models.decoder_layer import fuse
from hone.models.families import CPU_ONLY_FAMILIES, FAMILIES, UnsupportedModel
from hone.models.load import load_causal_lm
from hone.models.policy import PolicyModel
from hone.ops.rows import pack_rows
from hone.rollout.contract import Sampling
from hone.rollout.native.core import NativeCore
from hone.rollout.native.paged_core import PagedCore
from hone.rollout.requests import Request

CPU_BOUND = 1e-5
GRADIENT_BOUND = 1e-4
_TEMPERATURE = 0.9
_SEQUENCES = 8

Text = tuple[list[int], list[int], list[float]]
"""Prompt, response, and the log-probs that the rollout gave the response."""


def examine(family: str, device: torch.device) -> dict[str, Any]:
    """What a family's table row says: equal or unequal with its numbers, or refused with its sentence."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        refused = family not in FAMILIES or (device.type == "cuda" and family in CPU_ONLY_FAMILIES)
        if refused:
            return _refusal(family, folder, device)
        results = [measure(family, folder / str(b), device, flipped=b) for b in (False, True)]
    worst = {key: max(r[key] for r in results) for key in results[0]}
    return {"outcome": "equal" if _is_equal(results, device) else "unequal", **worst}


def _refusal(family: str, folder: Path, device: torch.device) -> dict[str, Any]:
    """There are no weights: what needs them is no refusal from the config."""
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    try:
        load_causal_lm(str(folder), dtype=torch.float32, device=device)
    except UnsupportedModel as refusal:
        sentence = str(refusal).replace(str(folder), "MODEL")
        return {"outcome": "refused" if family in sentence else "unnamed", "sentence": sentence}
    return {"outcome": "loaded"}


def measure(family: str, folder: Path, device: torch.device, *, flipped: bool) -> dict[str, float]:
    """One model: differences of log-probs from plain transformers, the greatest and the mean."""
    plain = _save_tiny(family, folder, device, flipped)
    policy = _load(folder, device)
    texts = rollout_texts(policy)
    with torch.no_grad():
        eager = plain_log_probs(plain, texts)
        said = torch.cat([torch.tensor(log_probs) for *_, log_probs in texts])
        trained = [torch.cat(trainer_log_probs(policy, texts, share=s)) for s in (True, False)]
    ours = {"rollout": [said], "trainer": trained}
    result = {}
    for side, values in ours.items():
        gaps = torch.stack([(v - eager).abs() for v in values])
        result[f"{side}_max"], result[f"{side}_mean"] = float(gaps.max()), float(gaps.mean(1).max())
    if device.type != "cuda":
        return result | {"gradient": _gradient_error(policy, plain, texts[:3])}
    with torch.no_grad():
        return result | _rounding(plain, folder, texts, eager, ours)


def _rounding(
    plain: Any, folder: Path, texts: list[Text], eager: Tensor, ours: dict[str, list[Tensor]]
) -> dict[str, float]:
    """What 16 bits alone do: eager against sdpa, and all against float32."""
    from transformers import AutoModelForCausalLM

    device = next(plain.parameters()).device
    kinds = {}
    for name, dtype in (("sdpa", torch.bfloat16), ("eager", torch.float32)):
        try:
            lm = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=name)
        except ValueError:  # this family has no sdpa
            continue
        kinds[name] = plain_log_probs(lm.to(device).eval(), texts)
    wide = kinds["eager"]
    gap = {"eager_to_float32": float((eager - wide).abs().mean())}
    sdpa = kinds.get("sdpa", wide)  # where there is none, float32 is the measure
    gap["eager_to_sdpa"] = float((eager - sdpa).abs().mean())
    for side, values in ours.items():
        gap[f"{side}_to_float32"] = max(float((v - wide).abs().mean()) for v in values)
    return gap


def _is_equal(results: list[dict[str, float]], device: torch.device) -> bool:
    if device.type != "cuda":
        return all(
            max(r["rollout_max"], r["trainer_max"]) <= CPU_BOUND and r["gradient"] <= GRADIENT_BOUND
            for r in results
        )
    return all(_is_rounding(r, side) for r in results for side in ("rollout", "trainer"))


def _is_rounding(r: dict[str, float], side: str) -> bool:
    """Within twice the difference of eager and sdpa, or as near to float32 as eager is."""
    return (
        r[f"{side}_mean"] <= 2 * r["eager_to_sdpa"]
        or r[f"{side}_to_float32"] <= r["eager_to_float32"]
    )


def _save_tiny(family: str, folder: Path, device: torch.device, flipped: bool) -> Any:
    """A plain model of the device's dtype, its folder written."""
    from transformers import AutoModelForCausalLM

    options = {"dtype": _dtype(device), "attn_implementation": "eager"}
    lm = AutoModelForCausalLM.from_config(tiny_config(family, flipped=flipped), **options)
    randomise(lm)
    lm.save_pretrained(folder)
    # Opened again: what a folder holds is not always what was written (youtu's padding token).
    return AutoModelForCausalLM.from_pretrained(folder, **options).to(device).eval()


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _load(folder: Path, device: torch.device) -> PolicyModel:
    """As a run loads and prepares it; in training mode, where dropout would show."""
    lm: Any = load_causal_lm(str(folder), dtype=_dtype(device), device=device)
    policy = PolicyModel(lm.to(device)).train()
    if device.type == "cuda":
        fuse(policy)
    return policy


def prompts(seed: int = 0) -> list[list[int]]:
    """A group of three, a group of two, and three of their own lengths."""
    generator = torch.Generator().manual_seed(seed)
    long, middle, *others = (
        torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in (33, 23, 16, 9, 1)
    )
    return [long, long, long, middle, middle, *others]


def rollout_texts(policy: PolicyModel) -> list[Text]:
    """Two turns of every prompt through the device's core; on the CPU also through the paged one."""
    device = next(policy.parameters()).device
    cores = [_paged(policy)] if device.type == "cuda" else [_native(policy), _paged(policy)]
    tokens = 20 if device.type == "cuda" else 5  # rounding is judged by its mean
    texts = []
    for core in cores:
        first = _finish(core, prompts(), tokens, seed=0)
        second = _finish(core, [p + r + p[:5] for p, r, _ in first], tokens, seed=100)
        texts += first + second
    return texts


def _native(policy: PolicyModel) -> Any:
    return NativeCore(policy, eos_ids=(), max_num_seqs=_SEQUENCES, max_num_batched_tokens=64)


def _paged(policy: PolicyModel) -> Any:
    return PagedCore(
        policy, eos_ids=(), max_num_seqs=_SEQUENCES, max_num_batched_tokens=64,
        max_model_len=POSITIONS, gpu_memory_utilization=0.1, blocks=100, capture_sizes=[_SEQUENCES],
    )  # fmt: skip


def _finish(core: Any, asked: list[list[int]], tokens: int, seed: int) -> list[Text]:
    requests = [
        # Of several lengths, so that sequences leave while others run.
        Request(p, Sampling(tokens + i, _TEMPERATURE, seed + i, ignore_eos=True), f"r{i}")
        for i, p in enumerate(asked)
    ]
    for request in requests:
        core.add(request)
    while core.busy:
        core.step()
    return [(r.prompt_ids, r.token_ids, r.log_probs) for r in requests]


def trainer_log_probs(policy: PolicyModel, texts: list[Text], *, share: bool) -> list[Tensor]:
    """Packed rows through the policy, as the engine calls it."""
    width, longest = max(len(p) for p, _, _ in texts), max(len(r) for _, r, _ in texts)
    ids = torch.zeros(len(texts), width, dtype=torch.int64)
    mask = torch.zeros(len(texts), width + longest, dtype=torch.int64)
    responses = torch.zeros(len(texts), longest, dtype=torch.int64)
    for i, (p, r, _) in enumerate(texts):
        ids[i, width - len(p) :] = torch.tensor(p)
        responses[i, : len(r)] = torch.tensor(r)
        mask[i, width - len(p) : width + len(r)] = 1
    packed = pack_rows(ids, responses, mask, mask[:, width:], share_prompts=share)
    packed = packed.to(next(policy.parameters()).device)
    out = policy(packed, temperature=_TEMPERATURE)["log_probs"]
    return [row[: len(r)].float().cpu() for row, (_, r, _) in zip(out, texts, strict=True)]


def plain_log_probs(lm: Any, texts: list[Text]) -> Tensor:
    """One text at a time through a model that knows nothing of us."""
    device = next(lm.parameters()).device
    out = []
    for p, r, _ in texts:
        ids = torch.tensor([p + r], device=device)
        logits = lm(input_ids=ids, use_cache=False).logits[0, len(p) - 1 : -1].float()
        log_p = torch.log_softmax(logits / _TEMPERATURE, -1)
        out.append(log_p.gather(-1, ids[0, len(p) :, None])[:, 0].cpu())
    return torch.cat(out)


def _gradient_error(policy: PolicyModel, plain: Any, texts: list[Text]) -> float:
    """‖ours − plain‖ / ‖plain‖ over the gradient of the texts' log-probability."""
    torch.cat(trainer_log_probs(policy, texts, share=True)).sum().backward()
    plain_log_probs(plain, texts).sum().backward()
    ours = {name: p.grad for name, p in policy.lm.named_parameters() if p.grad is not None}
    difference = size = torch.zeros(())
    for name, parameter in plain.named_parameters():
        if parameter.grad is None:
            continue
        size = size + parameter.grad.square().sum()
        mine = ours.get(name, torch.zeros(()))
        difference = difference + (mine - parameter.grad).square().sum()
    return float((difference / size).sqrt())
