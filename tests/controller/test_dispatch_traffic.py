"""Traffic: the payload of calls, counted without a second pickling."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toy_workers import Toy

from hone.controller import ClassWithInitArgs, LocalWorkerGroup
from hone.controller.dispatch import payload_bytes
from hone.protocol import DataProto
from hone.protocol.rows import object_array
from hone.trainer.ppo.source import traffic_metrics


@dataclass
class Trajectory:
    ids: list[int]
    text: str


def batch(rows: int) -> DataProto:
    """Tensors, text and messages that the two rows of a prompt share."""
    messages = [[{"role": "user", "content": f"{i:04d}" * 200}] for i in range(rows // 2)]
    shared = object_array([messages[i // 2] for i in range(rows)])
    tensors = {"ids": torch.randint(9, (rows, 300)), "mask": torch.ones(rows, 300).bool()}
    return DataProto.from_dict(tensors, {"raw_prompt": shared}, {"temperature": 1.0})


def test_the_count_is_what_a_pickle_carries_without_its_envelope() -> None:
    rows = batch(64)
    count, pickled = payload_bytes(rows), len(pickle.dumps(rows, protocol=5))
    assert 0.97 * pickled < count <= pickled


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (torch.zeros(3, 4, dtype=torch.bfloat16), 24),
        (torch.zeros(100)[:10], 40),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), 20),
        (np.zeros(3), 24),
        ("abc", 3),
        ([1, 2, 3], 24),
        (Trajectory([1, 2], "ab"), 18),
        (object_array([Trajectory([1], "a"), None]), 9),
        ({"loss": 0.5, "rows": 3, "none": None}, 0),
        ((), 0),
    ],
)
def test_numbers_alone_count_nothing_and_everything_else_its_bytes(
    value: object, count: int
) -> None:
    assert payload_bytes(value) == count


def test_a_module_or_class_in_an_argument_counts_nothing() -> None:
    argument = SimpleNamespace(module=torch, cls=DataProto, text="abc")
    assert payload_bytes(argument) == 3


def test_a_group_counts_arguments_and_results_by_role_and_method() -> None:
    with LocalWorkerGroup(
        ray_cls_with_init=ClassWithInitArgs(Toy, 2.0), name_prefix="toy"
    ) as group:
        data = DataProto.from_dict({"x": torch.zeros(4, 8)})
        group.twice_each(data)
        sent = 4 * 8 * 4
        assert group.traffic["toy/twice_each"] == sent + 2 * sent
        group.execute_all("echo", "word")
        assert group.traffic["toy/echo"] == 2 * len("word")
        group.zero_echo(5)
        assert group.traffic["toy/zero_echo"] == 16  # the result is a list of two numbers


def test_metrics_name_what_was_carried_and_start_anew() -> None:
    actor, rollout = Counter({"actor/version": 0, "actor/update_actor": 5}), Counter(weights=7)
    assert traffic_metrics([actor, rollout, actor]) == {
        "traffic/actor/update_actor_bytes": 5.0,
        "traffic/weights_bytes": 7.0,
        "traffic/step_bytes": 12.0,
    }
    nothing = {"traffic/weights_bytes": 0.0, "traffic/step_bytes": 0.0}
    assert traffic_metrics([actor, rollout]) == nothing
