"""Chunked log-probs and entropies against a float64 reference; gradients and memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hone.ops import logprobs
from hone.ops.logprobs import linear_log_probs, linear_sum_pi_squared

OPTIONS = {
    "plain": {"temperature": 1.0},
    "temperature": {"temperature": 0.6},
    "bias": {"temperature": 1.0, "bias": True},
    "softcap": {"temperature": 1.0, "softcap": 3.0},
    "logit_scale": {"temperature": 1.0, "logit_scale": 0.25},
    "everything": {"temperature": 1.7, "bias": True, "softcap": 2.0, "logit_scale": 1.5},
}


def naive(hidden, weight, target, *, temperature, bias=None, softcap=None, logit_scale=1.0):
    z = hidden @ weight.t()
    if bias is not None:
        z = z + bias
    if softcap is not None:
        z = torch.tanh(z / softcap) * softcap
    log_p = torch.log_softmax(z * logit_scale / temperature, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, target[:, None])[:, 0], entropy


class Case:
    """The same inputs in float32 (ours) and float64 (naive)."""

    def __init__(self, tokens, vocabulary, width, seed=0, bias=False):
        random = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(tokens, width, generator=random)
        self.weight = torch.randn(vocabulary, width, generator=random)
        self.target = torch.randint(vocabulary, (tokens,), generator=random)
        self.bias = torch.randn(vocabulary, generator=random) if bias else None
        self.output_gradient = torch.randn(2, tokens, generator=random)

    def run(self, fn, dtype, **options):
        leaves = [
            x.detach().to(dtype).requires_grad_() if x is not None else None
            for x in (self.hidden, self.weight, self.bias)
        ]
        hidden, weight, bias = leaves
        log_probs, entropy = fn(hidden, weight, self.target, bias=bias, **options)
        output_gradient = self.output_gradient.to(log_probs.dtype)
        (log_probs @ output_gradient[0] + entropy @ output_gradient[1]).backward()
        return [log_probs, entropy, *(x.grad for x in leaves if x is not None)]


def ours(hidden, weight, target, **options):
    return linear_log_probs(hidden, weight, target, with_entropy=True, **options)


def compare(case, **options):
    actual = case.run(ours, torch.float32, **options)
    expected = case.run(naive, torch.float64, **options)
    for result, truth in zip(actual, expected, strict=True):
        torch.testing.assert_close(result.double(), truth, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("chunk", [1, 200, 2**24])
def test_values_and_gradients_equal_float64(name, chunk, monkeypatch):
    monkeypatch.setattr(logprobs, "_CHUNK_LOGITS", chunk)
    options = dict(OPTIONS[name])
    compare(Case(21, 37, 8, bias=options.pop("bias", False)), **options)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    tokens=st.integers(0, 30),
    vocabulary=st.integers(1, 40),
    width=st.integers(1, 9),
    chunk=st.integers(1, 600),
    temperature=st.floats(0.3, 3),
)
def test_any_shape_and_any_chunking_equal_float64(tokens, vocabulary, width, chunk, temperature):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "_CHUNK_LOGITS", chunk)
        compare(Case(tokens, vocabulary, width), temperature=temperature)


def test_without_entropy_the_log_probs_are_the_same_and_entropies_zero():
    case = Case(9, 20, 4)
    arguments = (case.hidden, case.weight, case.target)
    plain, nothing = linear_log_probs(*arguments, temperature=0.9)
    full, _ = linear_log_probs(*arguments, temperature=0.9, with_entropy=True)
    assert torch.equal(plain, full)
    assert (nothing == 0).all()
    hidden = case.hidden.clone().requires_grad_()
    log_probs, nothing = linear_log_probs(hidden, case.weight, case.target, temperature=0.9)
    assert log_probs.requires_grad
    assert not nothing.requires_grad


@pytest.mark.parametrize("only", [0, 1])
def test_a_loss_on_one_output_alone_has_its_gradient(only):
    case = Case(9, 20, 4)
    case.output_gradient[1 - only] = 0
    truth = case.run(naive, torch.float64, temperature=1.0)
    hidden = case.hidden.clone().requires_grad_()
    weight = case.weight.clone().requires_grad_()
    out = linear_log_probs(hidden, weight, case.target, temperature=1.0, with_entropy=True)[only]
    (out @ case.output_gradient[only]).backward()
    torch.testing.assert_close(hidden.grad.double(), truth[2], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(weight.grad.double(), truth[3], rtol=2e-5, atol=2e-5)


def test_a_frozen_head_gets_no_gradient_and_its_input_does():
    case = Case(9, 20, 4)
    hidden = case.hidden.clone().requires_grad_()
    out, _ = linear_log_probs(hidden, case.weight, case.target, temperature=1.0)
    out.sum().backward()
    assert case.weight.grad is None
    assert (hidden.grad != 0).all()


def test_bfloat16_keeps_float32_sums():
    """The softmax denominator is summed in float32; in bfloat16 it would be off by tenths."""
    case = Case(16, 5000, 8)
    hidden, weight = case.hidden.bfloat16(), case.weight.bfloat16()
    actual, entropy = linear_log_probs(
        hidden, weight, case.target, temperature=1.0, with_entropy=True
    )
    assert actual.dtype == entropy.dtype == torch.float32
    truth, truth_entropy = naive(hidden.double(), weight.double(), case.target, temperature=1.0)
    torch.testing.assert_close(actual.double(), truth, rtol=0.02, atol=0.03)
    torch.testing.assert_close(entropy.double(), truth_entropy, rtol=0.01, atol=0.02)


class Largest(TorchDispatchMode):
    """Returns the size of the largest tensor of any operation."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("tokens", [256, 1024])
def test_no_tensor_of_a_forward_and_backward_pass_has_tokens_times_vocabulary_elements(
    tokens, monkeypatch
):
    vocabulary, width, chunk = 512, 4, 2**13
    monkeypatch.setattr(logprobs, "_CHUNK_LOGITS", chunk)
    case = Case(tokens, vocabulary, width)
    hidden = case.hidden.clone().requires_grad_()
    weight = case.weight.clone().requires_grad_()
    with Largest() as largest:
        log_probs, entropy = linear_log_probs(
            hidden, weight, case.target, temperature=1.0, with_entropy=True
        )
        (log_probs.sum() + entropy.sum()).backward()
    bound = max(chunk, tokens * width, vocabulary * width)
    assert largest.elements <= bound < tokens * vocabulary
    with Largest() as naive_way:
        naive(hidden, weight, case.target, temperature=1.0)
    assert naive_way.elements == tokens * vocabulary  # the measure sees what it should


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("chunk", [1, 2**24])
def test_the_sum_of_squared_probabilities_equals_float64(name, chunk, monkeypatch):
    monkeypatch.setattr(logprobs, "_CHUNK_LOGITS", chunk)
    options = dict(OPTIONS[name])
    case = Case(21, 37, 8, bias=options.pop("bias", False))
    actual = linear_sum_pi_squared(case.hidden, case.weight, bias=case.bias, **options)
    bias = case.bias.double() if case.bias is not None else None
    every = [torch.full((21,), v) for v in range(37)]
    log_p = torch.stack(
        [
            naive(case.hidden.double(), case.weight.double(), v, bias=bias, **options)[0]
            for v in every
        ]
    )
    torch.testing.assert_close(actual.double(), (2 * log_p).exp().sum(0), rtol=2e-5, atol=1e-7)
