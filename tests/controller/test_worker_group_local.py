"""The embedded controller: no ray, no environment, one rank."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from tensordict import TensorDict
from toy_workers import Other, Toy

from hone.controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalWorkerGroup,
    ResourcePool,
    Worker,
    create_colocated_worker_cls,
    create_colocated_worker_raw_cls,
    register,
    register_dispatch_mode,
)
from hone.controller.contract import Call, TensorDictPayload
from hone.controller.worker import Placement, free_port, use_placement
from hone.controller.worker_group import build_host
from hone.protocol import PADDED_ROW, DataProto, split_padded
from hone.protocol.padding import drop_padded_rows


def test_ray_is_not_imported() -> None:
    code = (
        "import sys, hone.controller as c; c.LocalWorkerGroup; "
        "bad = [m for m in sys.modules if m == 'ray' or m.startswith('ray.')]; sys.exit(len(bad))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_more_than_one_rank_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"pool has 2; set trainer\.controller=ray"):
        LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Toy, 1.0))
    with pytest.raises(ValueError, match="ray_cls_with_init is missing"):
        LocalWorkerGroup(ResourcePool([1]))


def test_a_launchers_environment_is_not_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    before = dict(os.environ)
    with LocalWorkerGroup(None, ClassWithInitArgs(Toy, 1.0)) as group:
        place = group.whereabouts()[0]
        assert (place["rank"], place["world_size"]) == (0, 1)
    assert dict(os.environ) == before
    assert (Toy(1.0).rank, Toy(1.0).world_size) == (3, 8)


class Closing(Worker):
    def __init__(self, log: list[str]) -> None:
        self.log = log

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def loop_thread(self) -> str:
        return threading.current_thread().name + str(threading.get_ident())

    def close(self) -> None:
        self.log.append("closed")


def test_shutdown_closes_the_worker_once() -> None:
    log: list[str] = []
    group = LocalWorkerGroup(None, ClassWithInitArgs(Closing, log))
    group.shutdown()
    group.shutdown()
    assert log == ["closed"]
    with pytest.raises(RuntimeError, match="'Closing' was shut down; create a new one"):
        group.loop_thread()


class ClosingBadly(Closing):
    def close(self) -> None:
        super().close()
        raise OSError("the server does not end")


class Unbuildable(Worker):
    def __init__(self) -> None:
        raise ValueError("no model")


@pytest.mark.parametrize("is_fused", [False, True])
def test_every_worker_is_closed_also_after_one_that_fails(is_fused: bool) -> None:
    log: list[str] = []
    members = {"a": ClassWithInitArgs(ClosingBadly, log), "b": ClassWithInitArgs(Closing, log)}
    if is_fused:
        cls = ClassWithInitArgs(create_colocated_worker_raw_cls(members))
    else:
        cls = create_colocated_worker_cls(members)
    with pytest.raises(OSError, match="does not end"):
        LocalWorkerGroup(None, cls).shutdown()
    assert log == ["closed", "closed"]


def test_workers_are_closed_if_a_later_one_cannot_be_built() -> None:
    log: list[str] = []
    members = {"a": ClassWithInitArgs(Closing, log), "b": ClassWithInitArgs(Unbuildable)}
    with pytest.raises(ValueError, match="no model"):
        LocalWorkerGroup(None, create_colocated_worker_cls(members))
    assert log == ["closed"]


def test_a_dispatch_function_with_the_wrong_number_of_entries_is_refused() -> None:
    mode = register_dispatch_mode(
        "ONE_ENTRY_TOO_MANY",
        lambda group, value: (([value, value],), {}),
        lambda group, results: results,
    )

    class Splits(Worker):
        @register(dispatch_mode=mode)
        def take(self, value: int) -> int:
            return value

    with LocalWorkerGroup(None, ClassWithInitArgs(Splits)) as group:
        with pytest.raises(ValueError, match="2 entries for 1 ranks"):
            group.take(1)


def test_coroutines_share_one_event_loop_for_the_workers_life() -> None:
    with LocalWorkerGroup(None, ClassWithInitArgs(Closing, [])) as group:
        assert group.loop_thread() == group.loop_thread()
        assert group.loop_thread()[0].startswith("worker-event-loop")


def test_no_role_or_nested_roles_are_refused() -> None:
    with pytest.raises(ValueError, match="no role to colocate"):
        create_colocated_worker_cls({})
    inner = create_colocated_worker_cls({"a": ClassWithInitArgs(Other, "x")})
    with pytest.raises(ValueError, match="cannot be a role"):
        create_colocated_worker_cls({"b": inner})
    with pytest.raises(TypeError, match="created from a class"):
        ClassWithInitArgs(len)


class TestPlacement:
    def test_environment_round_trip(self) -> None:
        place = Placement(1, 4, 1, 2, "10.0.0.1", 1234)
        assert Placement.from_environment(place.environment()) == place
        variables = place.environment()
        assert variables["RAY_LOCAL_WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"]
        assert variables["RAY_LOCAL_RANK"] == variables["LOCAL_RANK"]
        assert Placement.from_environment({}) == Placement()

    def test_a_worker_knows_its_place_before_its_init_runs(self) -> None:
        class Early(Worker):
            def __init__(self) -> None:
                self.seen = (self.rank, self.get_master_addr_port())

        with use_placement(Placement(2, 3, master_addr="h", master_port=9)):
            assert Early().seen == (2, ("h", 9))

    def test_a_rank_stands_at_one_place_of_a_mesh(self) -> None:
        worker = Toy(1.0)
        worker.register_mesh("m", 1, True)
        worker.register_mesh("m", 1, True)
        with pytest.raises(ValueError, match="already"):
            worker.register_mesh("m", 0, True)
        with pytest.raises(ValueError, match="data-parallel rank -1"):
            worker.register_mesh("k", -1, True)

    def test_a_free_port_can_be_bound(self) -> None:
        import socket

        with socket.socket() as server:
            server.bind(("", free_port()))


class TestPaddedResults:
    def padded(self) -> DataProto:
        return split_padded(DataProto.from_dict({"x": torch.arange(3)}), 2)[1]  # 1 real, 1 added

    def test_unmarked_input_leaves_the_result_alone(self) -> None:
        result = DataProto.from_dict({"y": torch.arange(7)})
        assert drop_padded_rows(result, [DataProto.from_dict({"x": torch.arange(3)})]) is result

    def test_a_carried_mark_wins(self) -> None:
        result = self.padded().select_idxs([1, 0, 1])
        kept = drop_padded_rows(result, [self.padded()])
        assert kept.batch["x"].tolist() == [2]
        assert not kept.has_column(PADDED_ROW)

    def test_facts_alone_are_kept(self) -> None:
        result = DataProto(meta_info={"metrics": {"l": 1}})
        assert drop_padded_rows(result, [self.padded()]).meta_info == {"metrics": {"l": 1}}

    def test_a_result_that_cannot_be_told_apart_is_refused(self) -> None:
        with pytest.raises(ValueError, match="the padded rows are unknown"):
            drop_padded_rows(DataProto.from_dict({"y": torch.zeros(5)}), [self.padded()])

    def test_a_worker_may_take_one_kind_of_batch_and_return_the_other(self) -> None:
        class Converts(Worker):
            @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
            def to_proto(self, data: TensorDict) -> DataProto:
                return DataProto.from_dict({"y": data["x"] + 1})

            @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
            def to_tensordict(self, data: DataProto) -> TensorDict:
                return DataProto.from_dict({"y": data.batch["x"] + 1}).to_tensordict()

        host = build_host(ClassWithInitArgs(Converts), Placement(), torch.get_num_threads())
        proto = host.call(Call("", "to_proto", (TensorDictPayload(self.padded()),)))
        assert proto.batch["y"].tolist() == [3]
        assert host.call(Call("", "to_tensordict", (self.padded(),)))["y"].tolist() == [3]

    def test_a_result_of_batches_with_different_padding_is_refused(self) -> None:
        other = DataProto.from_dict({"z": torch.arange(2)})  # this rank's part of 4 rows
        with pytest.raises(ValueError, match="the padded rows are unknown"):
            drop_padded_rows(DataProto.from_dict({"y": torch.zeros(2)}), [self.padded(), other])
        marked = self.padded().select_idxs([0, 1])
        assert len(drop_padded_rows(marked, [self.padded(), other])) == 1

    def test_a_rank_with_padding_only_measures_nothing(self) -> None:
        empty = split_padded(DataProto.from_dict({"x": torch.arange(1)}), 2)[1]
        result = DataProto.from_dict({"y": torch.zeros(1)}, meta_info={"metrics": {"l": 1}, "t": 2})
        kept = drop_padded_rows(result, [empty])
        assert len(kept) == 0
        assert kept.meta_info == {"t": 2}


class Counter(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def numbers(self):  # type: ignore[no-untyped-def]
        yield from range(3)


def test_a_generator_is_refused_as_a_result_because_ray_would_send_its_first_value() -> None:
    group = LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Counter))
    with pytest.raises(TypeError, match="'numbers' returned a generator"):
        group.numbers()
