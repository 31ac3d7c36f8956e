"""The training kernels against plain torch: log-probs, entropies and gates, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hone.ops import logprobs
from hone.ops.attention import AttentionOptions, SegmentLayout, VarlenIndices, varlen_attention
from hone.ops.logprobs import add_product, linear_fp32

from .device import DEVICE, needs_gpu, needs_kernels, relative_error


@pytest.mark.parametrize("vocabulary", [100, 5000, 9001])
@pytest.mark.parametrize("read", ["log_probs", "entropy", "both"])
@pytest.mark.parametrize("chunk_logits", [2**27, 2**8])
class TestLogProbs:
    pytestmark = needs_kernels

    def test_values_and_gradients_equal_the_plain_path(
        self, vocabulary: int, read: str, chunk_logits: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(logprobs, "_GPU_CHUNK_LOGITS", chunk_logits)
        hidden = torch.randn(300, 48, device=DEVICE)
        weight = torch.randn(vocabulary, 48, device=DEVICE) * 0.3
        target = torch.randint(0, vocabulary, (300,), device=DEVICE)
        out_grad = torch.randn(2, 300, device=DEVICE)
        results = []
        for fused in (True, False):
            h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            outs = logprobs.LinearLogProbs.apply(
                h, w, None, target, 1 / 0.7, None, True, fused, None
            )
            indices = {"log_probs": [0], "entropy": [1], "both": [0, 1]}[read]
            sum((outs[i] * out_grad[i]).sum() for i in indices).backward()
            results.append([outs[0], outs[1], h.grad, w.grad])
        for actual, plain in zip(*results, strict=True):
            assert relative_error(actual, plain) < 1e-4


class TestEntropyNotAskedFor:
    pytestmark = needs_kernels

    def test_it_has_no_gradient(self) -> None:
        hidden = torch.randn(6, 8, device=DEVICE, requires_grad=True)
        weight, target = torch.randn(50, 8, device=DEVICE), torch.arange(6, device=DEVICE)
        log_probs, entropy = logprobs.LinearLogProbs.apply(
            hidden, weight, None, target, 1.0, None, False, True, None
        )
        assert log_probs.requires_grad
        assert not entropy.requires_grad


class TestGate:
    pytestmark = needs_kernels

    def test_gate_and_gradients_equal_plain_torch(self) -> None:
        from hone.ops import training_triton

        gate, up, g = torch.randn(3, 5, 1111, device=DEVICE)
        a, b = gate.clone().requires_grad_(), up.clone().requires_grad_()
        plain = F.silu(a) * b
        plain.backward(g)
        assert relative_error(training_triton.silu_gate_forward(gate, up), plain) < 1e-5
        gradients = training_triton.silu_gate_backward(gate, up, g)
        for actual, expected in zip(gradients, (a.grad, b.grad, plain), strict=True):
            assert relative_error(actual, expected) < 1e-5

    def test_the_inputs_of_a_gate_may_be_strided(self) -> None:
        from hone.ops import training_triton

        gate, up, g = torch.randn(3, 1111, 5, device=DEVICE).transpose(1, 2)
        contiguous = [x.contiguous() for x in (gate, up, g)]
        assert torch.equal(
            training_triton.silu_gate_forward(gate, up),
            training_triton.silu_gate_forward(*contiguous[:2]),
        )
        gradients = training_triton.silu_gate_backward(gate, up, g)
        for actual, expected in zip(
            gradients, training_triton.silu_gate_backward(*contiguous), strict=True
        ):
            assert torch.equal(actual, expected)


class TestWideProducts:
    pytestmark = needs_gpu

    def test_the_result_is_not_rounded_and_gradients_are_those_of_a_plain_product(self) -> None:
        x = torch.randn(3, 40, 64, device=DEVICE).bfloat16()
        weight = torch.randn(200, 64, device=DEVICE).bfloat16()
        out_grad = torch.randn(3, 40, 200, device=DEVICE)
        results = []
        for apply, dtype in ((linear_fp32, torch.bfloat16), (F.linear, torch.float32)):
            inputs = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
            out = apply(*inputs)
            out.backward(out_grad)
            results.append([out, *(t.grad for t in inputs)])
        errors = [relative_error(a, b) for a, b in zip(*results, strict=True)]
        assert results[0][0].dtype == torch.float32
        assert errors[0] < 1e-5
        assert max(errors[1:]) < 5e-3

    def test_a_frozen_weight_gets_no_gradient(self) -> None:
        x = torch.randn(7, 32, device=DEVICE).bfloat16().requires_grad_()
        weight = torch.randn(32, 32, device=DEVICE).bfloat16()
        linear_fp32(x, weight).sum().backward()
        assert x.grad is not None
        assert weight.grad is None

    def test_a_product_is_added_to_a_sum(self) -> None:
        a, b = torch.randn(30, 50, device=DEVICE), torch.randn(30, 70, device=DEVICE)
        a, b = a.bfloat16(), b.bfloat16()
        total = torch.randn(50, 70, device=DEVICE)
        expected = total.double() + a.double().t() @ b.double()
        add_product(total, a.t(), b)
        assert relative_error(total, expected) < 1e-5


@pytest.mark.parametrize(("heads", "kv", "d"), [(12, 2, 128), (32, 8, 128)])
class TestSameRoundings:
    """Decoding rounds the weights of attention where the training kernel rounds them."""

    pytestmark = needs_gpu

    def test_a_decoded_token_attends_as_in_training(self, heads: int, kv: int, d: int) -> None:
        from hone.rollout.native import attention_triton, kernels_triton
        from hone.rollout.native.paged_cache import PagedCache

        rows, length = 64, 500
        blocks = -(-length // 16)
        cache = PagedCache(
            num_layers=1, kv_heads=kv, head_dim=d, num_blocks=rows * blocks + 1, block_size=16,
            dtype=torch.bfloat16, device=DEVICE,
        )  # fmt: skip
        cache.reserve()
        q = torch.randn(rows, length, heads, d, device=DEVICE).bfloat16()
        k, v = torch.randn(2, rows, length, kv, d, device=DEVICE).bfloat16()
        table = (torch.arange(rows * blocks, device=DEVICE).view(rows, blocks) + 1).int()
        positions = torch.arange(length, device=DEVICE)
        slots = (table[:, positions // 16].long() * 16 + positions % 16).flatten()
        kernels_triton.store_kv(k.flatten(0, 1), v.flatten(0, 1), slots, cache, 0)
        cu = torch.arange(rows + 1, device=DEVICE).int() * length
        packed = (x.flatten(0, 1) for x in (q, k, v))
        trained = varlen_attention(
            *packed, cu, cu, length, length, scaling=d**-0.5, window=None
        ).view(rows, length, heads, d)
        for position in (37, 130, 383, 499):
            decoded = attention_triton.decode_attention(
                q[:, position], cache, table, torch.full((rows,), position, device=DEVICE),
                AttentionOptions(0, d**-0.5), splits=1,
            )  # fmt: skip
            equal = (decoded == trained[:, position]).float().mean()
            assert equal > 0.98, f"at {position}: {equal:.3f} of the values are equal"


@pytest.mark.parametrize("window", [None, 7])
class TestVarlen:
    pytestmark = needs_gpu

    def test_grouped_heads_and_gradients_equal_dense_attention(self, window: int | None) -> None:
        lengths = [5, 64, 33]
        q = torch.randn(sum(lengths), 14, 64, device=DEVICE)
        k, v = torch.randn(2, sum(lengths), 2, 64, device=DEVICE)
        out_grad = torch.randn_like(q)
        cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
        half = [x.bfloat16().requires_grad_() for x in (q, k, v)]
        out = varlen_attention(*half, cu, cu, 64, 64, scaling=0.125, window=window)
        out.backward(out_grad.bfloat16())
        full = [x.detach().float().requires_grad_() for x in half]
        pieces = zip(*(x.split(lengths) for x in full), strict=True)
        dense = torch.cat([_dense(*piece, window) for piece in pieces])
        dense.backward(out_grad)
        assert relative_error(out, dense) < 1e-2
        for actual, expected in zip(half, full, strict=True):
            assert relative_error(actual.grad, expected.grad) < 2e-2


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    position = torch.arange(len(q), device=q.device)
    visible = position[:, None] >= position
    if window is not None:
        visible &= position[:, None] - position < window
    return F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        attn_mask=visible,
        scale=0.125,
        enable_gqa=True,
    )[0].transpose(0, 1)


@pytest.mark.parametrize("width", [896, 100])
class TestNorm:
    pytestmark = needs_kernels

    def test_norm_and_gradients_equal_plain_torch(self, width: int) -> None:
        from hone.ops import training_triton
        from hone.ops.decoder import plain_rms_norm

        x, g = torch.randn(2, 37, width, device=DEVICE)
        weight = torch.randn(width, device=DEVICE)
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        plain = plain_rms_norm(a, w, 1e-6)
        plain.backward(g)
        out, scale = training_triton.rms_norm_forward(x, weight, 1e-6)
        assert relative_error(out, plain) < 1e-5
        g_x, g_weight = training_triton.rms_norm_backward(x, weight, scale, g)
        assert relative_error(g_x, a.grad) < 1e-4
        assert relative_error(g_weight, w.grad) < 1e-4
        more, _ = training_triton.rms_norm_backward(x, weight, scale, g, x)
        assert relative_error(more, a.grad + x) < 1e-4

    def test_the_rows_of_a_norm_may_be_strided(self, width: int) -> None:
        from hone.ops import training_triton

        x, g = torch.randn(2, width, 37, device=DEVICE).transpose(1, 2)
        plus = torch.randn(37, 1, device=DEVICE).expand(37, width)
        weight = torch.randn(width, device=DEVICE)
        out, scale = training_triton.rms_norm_forward(x, weight, 1e-6)
        expected, _ = training_triton.rms_norm_forward(x.contiguous(), weight, 1e-6)
        assert torch.equal(out, expected)
        gradients = training_triton.rms_norm_backward(x, weight, scale, g, plus)
        contiguous = (x.contiguous(), weight, scale, g.contiguous(), plus.contiguous())
        for actual, expected in zip(
            gradients, training_triton.rms_norm_backward(*contiguous), strict=True
        ):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize(("heads", "d"), [(14, 64), (3, 80)])
class TestRotation:
    pytestmark = needs_kernels

    def test_rotation_and_gradient_equal_plain_torch(self, heads: int, d: int) -> None:
        from hone.ops.decoder import plain_rotate
        from hone.ops.training_triton import join_gradients, split_and_rotate

        x, g = torch.randn(2, 9, heads, d, device=DEVICE)
        cos, sin = torch.randn(2, 9, d, device=DEVICE)
        a = x.clone().requires_grad_()
        plain = plain_rotate(a, cos, sin)
        plain.backward(g)
        actual, *nothing = split_and_rotate(x.flatten(1), cos, sin, kv_heads=0)
        assert relative_error(actual, plain) < 1e-5
        assert relative_error(join_gradients(g, *nothing, cos, sin).view(g.shape), a.grad) < 1e-5

    def test_parts_of_one_product_and_their_gradients_equal_plain_torch(
        self, heads: int, d: int
    ) -> None:
        from hone.ops.decoder import plain_rotate
        from hone.ops.training_triton import join_gradients, split_and_rotate

        kv = 2
        joined = torch.randn(9, (heads + 2 * kv) * d, device=DEVICE)
        cos, sin = torch.randn(2, 9, d, device=DEVICE)
        a = joined.clone().requires_grad_()
        q, k, v = a.unflatten(1, (-1, d)).split([heads, kv, kv], 1)
        plain = plain_rotate(q, cos, sin), plain_rotate(k, cos, sin), v
        pulls = [torch.randn_like(x) for x in plain]
        torch.autograd.backward(plain, pulls)
        for actual, expected in zip(
            split_and_rotate(joined, cos, sin, kv_heads=kv), plain, strict=True
        ):
            assert relative_error(actual, expected) < 1e-5
        assert relative_error(join_gradients(*pulls, cos, sin), a.grad) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
class TestAccumulation:
    pytestmark = needs_kernels

    def test_sums_of_all_tensors_grow_by_their_parts(self, dtype: torch.dtype) -> None:
        from hone.ops.training_triton import add_all

        shapes = [(1,), (7, 13), (4096,), (4097,), (130, 100), (0,)]
        sums = [torch.randn(shape, device=DEVICE) for shape in shapes]
        parts = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
        expected = [a + b for a, b in zip(sums, parts, strict=True)]
        add_all(sums, parts)
        for actual, reference in zip(sums, expected, strict=True):
            assert torch.equal(actual, reference)


class TestVarlenIndices:
    pytestmark = needs_kernels

    def test_copies_and_sums_equal_plain_torch(self) -> None:
        from hone.ops.attention import sum_copies_plain
        from hone.ops.training_triton import gather, sum_copies

        keys = VarlenIndices.build([5, 70, 1], [(1, 9), (0, 3), (1, 40), (1, 0), (2, 2)], DEVICE)
        source, key_order, token_offsets = (
            keys.source,
            keys.key_order,
            keys.token_offsets,
        )
        k, v = torch.randn(2, 130, 2, 24, device=DEVICE)
        for actual, inputs in zip(gather(k, v, source), (k, v), strict=True):
            assert torch.equal(actual, inputs[source.long()])
        g_k, g_v = torch.randn(2, len(source), 2, 24, device=DEVICE)
        for actual, inputs in zip(
            sum_copies(g_k, g_v, key_order, token_offsets), (g_k, g_v), strict=True
        ):
            assert relative_error(actual, sum_copies_plain(inputs, source, 130)) < 1e-6


@pytest.mark.parametrize("window", [None, 20])
class TestSharedPrompts:
    pytestmark = needs_gpu

    def test_values_and_gradients_equal_those_of_padded_attention(self, window: int | None) -> None:
        roots, children = [31, 64, 5], [(0, 40), (1, 7), (0, 33), (0, 0), (2, 129)]
        tokens = sum(roots) + sum(n for _, n in children)
        q = torch.randn(tokens, 14, 64, device=DEVICE)
        k, v = torch.randn(2, tokens, 2, 64, device=DEVICE)
        out_grad = torch.randn_like(q)
        results = []
        for dtype in (torch.bfloat16, torch.float32):
            layout = SegmentLayout(roots, children, DEVICE)
            inputs = [x.bfloat16().to(dtype).requires_grad_() for x in (q, k, v)]
            out = layout.attend(*inputs, AttentionOptions(0, 0.125, window))
            out.backward(out_grad.to(dtype))
            results.append([out, *(x.grad for x in inputs)])
        for actual, expected in zip(*results, strict=True):
            assert relative_error(actual, expected) < 2e-2
