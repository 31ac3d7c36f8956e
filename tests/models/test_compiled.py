"""Compiled decoder layers compute what the plain ones do."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from hone.models.compiled import compile_layers
from hone.models.policy import PolicyModel
from hone.models.tiny import tiny_lm
from hone.ops.packing import pack_rows

COMPILERS = (os.environ.get("CXX", "c++"), "g++", "clang++")


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason="torch.compile needs a C++ compiler"
)
def test_values_and_gradients_are_those_of_plain_layers() -> None:
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
