"""Fused layers: the same values and gradients, with less rounding."""

from __future__ import annotations

import copy
import os
import shutil

import pytest
import torch

from hone.models.decoder_layer import compile_layers, fuse
from hone.models.policy import PolicyModel, hidden_states
from hone.models.tiny import tiny_lm
from hone.ops.rows import PackedRows, pack_rows

COMPILERS = (os.environ.get("CXX", "c++"), "g++", "clang++")


def packed_rows() -> PackedRows:
    prompts, responses = torch.randint(3, 50, (2, 3, 20))
    ones = torch.ones(3, 40, dtype=torch.int64)
    return pack_rows(prompts, responses, ones, ones[:, :20], share_prompts=False)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kernels", [True, False])
def test_values_and_gradients_do_not_change(family: str, kernels: bool) -> None:
    plain = PolicyModel(tiny_lm(50, family=family))
    if family == "mistral":
        plain.lm.config.sliding_window = 7
    fused = copy.deepcopy(plain)
    assert fuse(fused, kernels=kernels) > 4
    packed = packed_rows()
    grads = []
    for policy in (plain, fused):
        out = policy(packed, temperature=1.0)["log_probs"]
        out.sum().backward()
        grads.append([out, *(p.grad for p in policy.parameters())])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def test_in_bfloat16_the_result_is_closer_to_float32() -> None:
    lm = tiny_lm(50, layers=8).bfloat16()
    packed = packed_rows()
    exact = hidden_states(copy.deepcopy(lm).float().model, packed)
    plain = hidden_states(lm.model, packed)
    fuse(PolicyModel(lm))
    fused = hidden_states(lm.model, packed)
    assert fused.dtype == torch.bfloat16
    assert (fused.float() - exact).norm() < 0.8 * (plain.float() - exact).norm()


def test_an_unsupported_family_is_not_changed() -> None:
    assert fuse(PolicyModel(tiny_lm(50, family="gemma"))) == 0


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason="torch.compile needs a C++ compiler"
)
def test_compiled_layers_equal_plain_layers() -> None:
    policies = [PolicyModel(tiny_lm(50, layers=2)) for _ in range(2)]
    assert compile_layers(policies[1]) == 2
    for rows, width in ((3, 9), (2, 20)):  # one compilation, several shapes
        prompts, responses = torch.randint(3, 50, (2, rows, width))
        ones = torch.ones(rows, 2 * width, dtype=torch.int64)
        packed = pack_rows(prompts, responses, ones, ones[:, :width], share_prompts=False)
        grads = []
        for policy in policies:
            policy.zero_grad()
            out = policy(packed, temperature=1.0)
            out["log_probs"].sum().backward()
            grads.append([out["log_probs"], *(p.grad for p in policy.parameters())])
        for plain, compiled in zip(*grads, strict=True):
            torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
