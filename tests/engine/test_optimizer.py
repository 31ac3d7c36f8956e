"""The optimizer: any class, schedule, clipping, masters, and skipped non-finite gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hone.config.engine import OptimConfig
from hone.engine.optimizer import Optimizer, optimizer_class
from hone.plugins import PluginError


def make_optimizer(values, config=None, *, grad_clip=0.0, total=-1, dtype=torch.float32):
    parameters = [nn.Parameter(torch.tensor(v, dtype=dtype)) for v in values]
    named = [(f"layer.{i}", p) for i, p in enumerate(parameters)]
    config = config or OptimConfig(optimizer="SGD", lr=0.5, weight_decay=0.0)
    return parameters, Optimizer(named, config, grad_clip=grad_clip, total_steps=total)


def set_gradients(parameters, grads):
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = torch.tensor(grad, dtype=parameter.dtype)


def test_sgd_updates_the_parameters():
    (a, b), optimizer = make_optimizer([[1.0, 2.0], [3.0]])
    set_gradients([a, b], [[2.0, 0.0], [-4.0]])
    metrics = optimizer.step()
    assert a.tolist() == [0.0, 2.0]
    assert b.tolist() == [5.0]
    assert metrics == {"grad_norm": pytest.approx(math.sqrt(20)), "lr": 0.5, "skipped_updates": 0}
    assert a.grad is None
    assert optimizer.updates == 1


def test_gradients_of_16_bits_are_summed_in_float32_over_micro_batches():
    (a, b), optimizer = make_optimizer([[1.0, 2.0], [3.0]], dtype=torch.bfloat16)
    for _ in range(4):
        set_gradients([a, b], [[256.0, 0.5], [1.0]])
        optimizer.accumulate_gradients()
        assert a.grad is None
    set_gradients([a, b], [[1.0, 0.0], [0.0]])  # in 16 bits 1,025 would be rounded to 1,024
    optimizer.accumulate_gradients()
    masters = list(optimizer.masters.values())
    assert [m.grad.tolist() for m in masters] == [[1025.0, 2.0], [4.0]]
    optimizer.step()
    assert [m.tolist() for m in masters] == [[1.0 - 512.5, 1.0], [1.0]]


@pytest.mark.parametrize(
    ("name", "impl", "expected"),
    [
        ("AdamW", "torch.optim", torch.optim.AdamW),
        ("Adam", "torch.optim", torch.optim.Adam),
        ("RMSprop", "torch.optim", torch.optim.RMSprop),
        ("Adafactor", "torch.optim", torch.optim.Adafactor),
        ("NAdam", "torch.optim.nadam", torch.optim.NAdam),
    ],
)
def test_the_class_is_found_by_its_path_and_gets_the_arguments_it_accepts(name, impl, expected):
    config = OptimConfig(optimizer=name, optimizer_impl=impl, lr=0.1, betas=(0.8, 0.9))
    (a,), optimizer = make_optimizer([[[1.0, 2.0], [3.0, 4.0]]], config)
    assert type(optimizer.torch_optimizer) is expected
    group = optimizer.torch_optimizer.param_groups[0]
    assert group.get("betas", (0.8, 0.9)) == (0.8, 0.9)
    assert group.get("weight_decay", 0.01) == 0.01
    set_gradients([a], [[[1.0, 1.0], [1.0, 1.0]]])
    optimizer.step()
    assert (a < torch.tensor([[1.0, 2.0], [3.0, 4.0]])).all()


def test_further_arguments_reach_the_class():
    config = OptimConfig(
        lr=0.1, override_optimizer_config={"eps": 1e-3, "foreach": True, "betas": (0.5, 0.6)}
    )
    _, optimizer = make_optimizer([[1.0]], config)
    group = optimizer.torch_optimizer.param_groups[0]
    assert (group["eps"], group["foreach"], group["betas"]) == (1e-3, True, (0.5, 0.6))


def test_an_unknown_class_is_named_in_the_error():
    with pytest.raises(
        PluginError, match=r"optim\.optimizer=AdmW was not found \(optimizer_impl=torch\.optim"
    ):
        make_optimizer([[1.0]], OptimConfig(optimizer="AdmW"))


def test_adamw_equals_torch_over_several_updates():
    config = OptimConfig(lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    (a,), optimizer = make_optimizer([[1.0, -2.0, 3.0]], config)
    reference = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    torch_adamw = torch.optim.AdamW([reference], lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    for i in range(5):
        set_gradients([a, reference], [[0.3 * i, -1.0, 2.0]] * 2)
        optimizer.step()
        torch_adamw.step()
    torch.testing.assert_close(a, reference)


def test_clipping_scales_the_whole_gradient_to_the_bound():
    (a, b), optimizer = make_optimizer([[0.0], [0.0]], grad_clip=1.0)
    set_gradients([a, b], [[3.0], [4.0]])
    assert optimizer.step()["grad_norm"] == 5.0  # the norm before clipping is reported
    torch.testing.assert_close(torch.cat([a, b]), torch.tensor([-0.3, -0.4]))
    set_gradients([a, b], [[0.3], [0.4]])
    optimizer.step()
    torch.testing.assert_close(torch.cat([a, b]), torch.tensor([-0.45, -0.6]))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(broken, dtype):
    config = OptimConfig(lr=0.1)
    (a, b), optimizer = make_optimizer([[1.0], [2.0]], config, dtype=dtype, grad_clip=1.0)
    for count in (1, 2):
        set_gradients([a, b], [[broken], [1.0]])
        metrics = optimizer.step()
        assert metrics["skipped_updates"] == count
        assert not math.isfinite(metrics["grad_norm"])
    assert (a.item(), b.item()) == (1.0, 2.0)
    assert not optimizer.torch_optimizer.state  # the moments were not updated
    set_gradients([a, b], [[1.0], [1.0]])
    assert optimizer.step()["skipped_updates"] == 2
    assert a.item() < 1.0
    assert (optimizer.updates, optimizer.skipped_updates) == (1, 2)


def test_parameters_without_a_gradient_stay():
    (a, b), optimizer = make_optimizer([[1.0], [2.0]])
    a.grad = torch.tensor([1.0])
    assert optimizer.step()["grad_norm"] == 1.0
    assert (a.item(), b.item()) == (0.5, 2.0)
    assert optimizer.step()["grad_norm"] == 0.0


def test_frozen_parameters_are_left_out():
    frozen = nn.Parameter(torch.tensor([1.0]), requires_grad=False)
    trained = nn.Parameter(torch.tensor([1.0]))
    config = OptimConfig(optimizer="SGD", lr=1.0)
    optimizer = Optimizer([("a", frozen), ("b", trained)], config, grad_clip=0.0, total_steps=-1)
    assert list(optimizer.masters) == ["b"]


def test_small_updates_accumulate_in_the_masters_where_bfloat16_would_lose_them():
    config = OptimConfig(optimizer="SGD", lr=1.0, weight_decay=0.0)
    (a,), optimizer = make_optimizer([[1.0]], config, dtype=torch.bfloat16)
    plain = torch.tensor([1.0], dtype=torch.bfloat16)
    for _ in range(100):
        set_gradients([a], [[1e-4]])
        optimizer.step()
        plain -= 1e-4
    assert plain.item() == 1.0
    assert a.item() == pytest.approx(0.99, abs=0.003)
    assert optimizer.master_copies()["layer/0"].item() == pytest.approx(0.99, abs=5e-5)


def test_the_norm_of_bfloat16_gradients_is_taken_in_float32():
    (a,), optimizer = make_optimizer([[0.0] * 1000], dtype=torch.bfloat16, grad_clip=1.0)
    set_gradients([a], [[1.0] * 1000])
    assert optimizer.step()["grad_norm"] == pytest.approx(math.sqrt(1000), rel=1e-6)


def test_masters_belong_to_their_parameters_under_any_names():
    named = [
        (f"layers.{i}.weight", nn.Parameter(torch.tensor([float(i)]).bfloat16())) for i in range(12)
    ]
    config = OptimConfig(optimizer="SGD", lr=1.0, weight_decay=0.0)
    optimizer = Optimizer(named, config, grad_clip=0.0, total_steps=-1)
    for i, (_, parameter) in enumerate(named):
        parameter.grad = torch.tensor([0.25 * i]).bfloat16()
    optimizer.step()
    assert [p.item() for _, p in named] == [0.75 * i for i in range(12)]


def test_the_schedule_sets_the_rate_of_the_update():
    config = OptimConfig(
        optimizer="SGD", lr=1.0, weight_decay=0.0, lr_warmup_steps=1, lr_scheduler_type="cosine"
    )
    (a,), optimizer = make_optimizer([[0.0]], config, total=5)
    rates = []
    for _ in range(6):
        set_gradients([a], [[1.0]])
        rates.append(optimizer.step()["lr"])
        set_gradients([a], [[0.0]])
        assert optimizer.step()["lr"] == rates[-1]  # only a new step moves it
        optimizer.advance_schedule()
    cosine = [0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(5)]
    assert rates == pytest.approx([0.5, *cosine])
    assert a.item() == pytest.approx(-sum(rates), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"no_such_setting": 1}, "no_such_setting"), ({"eps": -1.0}, "Invalid epsilon")],
)
def test_settings_that_the_optimizer_refuses_are_named(settings, message):
    config = OptimConfig(override_optimizer_config=settings)
    with pytest.raises(PluginError, match=rf"AdamW refuses its settings \(.*{message}"):
        make_optimizer([[1.0]], config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "LBFGS"}, "without a closure"),
        ({"override_optimizer_config": {"lr": 1.0}}, "set optim.lr"),
        ({"betas": (0.9,)}, "has 1 numbers; give 2"),
        ({"override_optimizer_config": {"betas": [0.9, 0.95, 0.99]}}, "has 3 numbers; give 2"),
    ],
)
def test_settings_that_would_fail_at_the_first_update_are_refused_before(settings, message):
    with pytest.raises(PluginError, match=message):
        optimizer_class(OptimConfig(**settings))
