"""Schedules against hand-computed numbers."""

from __future__ import annotations

import pytest

from hone.config.engine import OptimConfig
from hone.engine.optimizer import SCHEDULES, lr_factor, warmup_steps


def factors(config, total, steps):
    return [
        lr_factor(step, total, config, SCHEDULES.get(config.lr_scheduler_type)) for step in steps
    ]


def test_constant_stays_at_the_peak():
    assert factors(OptimConfig(), 100, [0, 1, 50, 100, 1000]) == [1.0] * 5


def test_warm_up_rises_linearly_from_above_zero():
    config = OptimConfig(lr_warmup_steps=3)
    assert factors(config, 100, range(5)) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_warm_up_length_comes_from_the_ratio_unless_it_is_set():
    assert warmup_steps(OptimConfig(lr_warmup_steps_ratio=0.1), 50) == 5
    assert warmup_steps(OptimConfig(lr_warmup_steps_ratio=0.1, lr_warmup_steps=2), 50) == 2
    assert warmup_steps(OptimConfig(lr_warmup_steps_ratio=0.1, lr_warmup_steps=0), 50) == 5
    assert warmup_steps(OptimConfig(lr_warmup_steps_ratio=0.1), -1) == 0


def test_cosine_falls_from_peak_to_floor():
    config = OptimConfig(lr_scheduler_type="cosine", min_lr_ratio=0.2)
    assert factors(config, 8, [0, 2, 4, 6, 8, 99]) == pytest.approx(
        [1.0, 0.2 + 0.8 * 0.853553390593, 0.6, 0.2 + 0.8 * 0.146446609407, 0.2, 0.2]
    )


def test_cosine_starts_after_the_warm_up():
    config = OptimConfig(lr_scheduler_type="cosine", lr_warmup_steps=2)
    assert factors(config, 6, [0, 1, 2, 4, 6]) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5, 0.0])


def test_more_cycles_come_back_up():
    config = OptimConfig(lr_scheduler_type="cosine", num_cycles=1.0)
    assert factors(config, 4, [0, 1, 2, 3, 4]) == pytest.approx([1.0, 0.5, 0.0, 0.5, 1.0])


def test_linear_falls_from_peak_to_floor_after_the_warm_up():
    config = OptimConfig(lr_scheduler_type="linear", lr_warmup_steps=2, min_lr_ratio=0.2)
    assert lr_factor(2, 12, config, SCHEDULES.get(config.lr_scheduler_type)) == 1.0
    assert lr_factor(7, 12, config, SCHEDULES.get(config.lr_scheduler_type)) == pytest.approx(0.6)
    assert lr_factor(12, 12, config, SCHEDULES.get(config.lr_scheduler_type)) == pytest.approx(0.2)


def test_wsd_is_stable_then_decays_in_the_last_share():
    config = OptimConfig(
        lr_scheduler_type="wsd", lr_warmup_steps=1, lr_decay_steps_ratio=0.4, min_lr_ratio=0.5
    )
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    assert factors(config, 10, range(12)) == pytest.approx(expected)


def test_without_total_steps_nothing_decays():
    for kind in ("cosine", "wsd"):
        assert factors(OptimConfig(lr_scheduler_type=kind), -1, [0, 10]) == [1.0, 1.0]
