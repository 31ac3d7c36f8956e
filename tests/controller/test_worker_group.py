"""The contract of a worker group: the same under the local controller, one Ray rank, and two."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from toy_workers import Other, Toy

from hone.controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalWorkerGroup,
    ResourcePool,
    WorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_raw_cls,
    register,
    register_dispatch_mode,
)
from hone.controller.contract import DEFAULT_MESH, Call, Executor, TensorDictPayload
from hone.controller.dispatch import get_results
from hone.controller.worker import Placement, Worker
from hone.controller.worker_group import build_host
from hone.event_loop import PhaseDeadlines
from hone.protocol import PADDED_ROW, DataProto, DataProtoFuture
from hone.verl import tensordict_utils as tu

RAY, RAY2 = (pytest.param(kind, marks=pytest.mark.slow) for kind in ("ray", "ray2"))
KINDS = ["local", RAY, RAY2]


def make_group(kind: str, cls_with_init: ClassWithInitArgs, **kwargs: Any) -> WorkerGroup:
    if kind == "local":
        return LocalWorkerGroup(
            resource_pool=ResourcePool([1]), ray_cls_with_init=cls_with_init, name_prefix="toy"
        )
    from hone.controller.ray import RayWorkerGroup

    pool = ResourcePool([2 if kind == "ray2" else 1])
    return RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=cls_with_init,
        name_prefix="toy",
        start_deadline_s=250,
        deadlines=PhaseDeadlines(200.0, 1.0),
        **kwargs,
    )


@pytest.fixture(scope="module", autouse=True)
def _two_threads() -> Iterator[None]:
    """With one thread, a controller that forgets to fix their number would compute the same bits."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "2")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param != "local":
        request.getfixturevalue("ray_cluster")
    return str(request.param)


@pytest.fixture(scope="module")
def group(kind: str) -> Iterator[WorkerGroup]:
    made = make_group(kind, ClassWithInitArgs(Toy, 3.0, offset=1.0))
    yield made
    made.shutdown()


def rows(count: int) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(1.0, count + 1)}, {"uid": [f"u{i}" for i in range(count)]}, {"step": 4}
    )


def test_every_rank_knows_its_place(group: WorkerGroup) -> None:
    places = group.whereabouts()
    world = group.world_size
    assert [place["rank"] for place in places] == list(range(world))
    assert {place["world_size"] for place in places} == {world}
    assert [place["local_rank"] for place in places] == list(range(world))
    assert {place["local_world_size"] for place in places} == {world}
    assert {place["role"] for place in places} == {"toy"}
    assert len({place["pid"] for place in places}) == world


def test_one_to_all_sends_the_same_and_returns_a_list(group: WorkerGroup) -> None:
    assert group.echo([1, 2], named="n") == [
        (rank, [1, 2], "n") for rank in range(group.world_size)
    ]
    assert group.init_model() == [None] * group.world_size


def test_rank_zero_modes_return_its_result_alone(group: WorkerGroup) -> None:
    assert group.first_echo("a") == (0, "a")
    assert group.zero_echo("b") == (0, "b")


def test_a_method_may_be_given_instead_of_its_name(group: WorkerGroup[Toy]) -> None:
    values = list(range(group.world_size))
    assert group.call(Toy.zero_echo, 7) == group.zero_echo(7)
    assert group.call_all(Toy.echo, 7, named="n") == group.echo(7, named="n")
    assert group.call_each(Toy.own, values) == group.own(values)
    scaled = group.call(Toy.scale, rows(3), power=2)
    assert torch.equal(scaled.batch["y"], group.scale(rows(3), power=2).batch["y"])
    later = group.begin(Toy.scale_later, rows(3)).get()
    assert torch.equal(later.batch["y"], group.scale(rows(3)).batch["y"])
    with pytest.raises(AttributeError, match="unregistered"):
        group.call(Toy.unregistered)


def test_all_to_all_gives_each_rank_its_entry(group: WorkerGroup) -> None:
    mine = [f"for {rank}" for rank in range(group.world_size)]
    assert group.own(mine) == list(enumerate(mine))
    assert group.by_default(value=mine) == mine
    assert group.own_dp(mine) == mine


def test_all_to_all_refuses_what_is_not_one_entry_a_rank(group: WorkerGroup) -> None:
    with pytest.raises(ValueError, match=f"one entry for each of {group.world_size} ranks; got 3"):
        group.own([1, 2, 3])
    with pytest.raises(ValueError, match="ONE_TO_ALL"):
        group.own_dp(5)


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_a_batch_comes_back_whole_and_in_order_whatever_its_size(
    group: WorkerGroup, count: int
) -> None:
    data = rows(count)
    result = group.scale(data, power=2)
    assert torch.equal(result.batch["y"], torch.arange(1.0, count + 1) ** 2 * 3 + 1)
    assert list(result.non_tensor_batch["uid"]) == list(data.non_tensor_batch["uid"])
    assert not result.has_column(PADDED_ROW)
    assert not data.has_column(PADDED_ROW)
    assert result.meta_info["temperature"] == 0.5


@pytest.mark.parametrize("count", [1, 5, 6])
def test_padding_does_not_distort_means(group: WorkerGroup, count: int) -> None:
    expected = count * (count + 1) / 2
    parts = group.real_sum(rows(count))
    assert len(parts) == group.world_size
    assert sum(total for total, _ in parts) == expected
    assert sum(number for _, number in parts) == count
    metrics = group.scale(rows(count)).meta_info["metrics"]
    assert sum(metrics["sum"]) == expected
    assert sum(metrics["rows"]) == count
    assert all(number > 0 for number in metrics["rows"])


def test_results_of_more_or_fewer_rows_lose_exactly_the_padded_ones(group: WorkerGroup) -> None:
    assert group.twice_each(rows(3)).batch["x"].tolist() == [1, 1, 2, 2, 3, 3]
    assert group.real_only(rows(3)).batch["x"].tolist() == [1, 2, 3]


def test_coroutine_methods_are_run(group: WorkerGroup) -> None:
    assert group.scale_async(rows(3)).batch["y"].tolist() == [4, 7, 10]


def test_a_method_that_must_return_a_batch_says_so(group: WorkerGroup) -> None:
    with pytest.raises(TypeError, match=r"rank 0 returned a int.*DP_COMPUTE_METRIC"):
        group.not_a_batch(rows(2))


def test_a_batch_method_without_a_batch_says_so(group: WorkerGroup) -> None:
    with pytest.raises(TypeError, match="splits a DataProto"):
        group.scale(7)


def test_a_workers_error_arrives_as_it_was_raised(group: WorkerGroup) -> None:
    with pytest.raises(LookupError, match="rank 0 cannot find it"):
        group.fail(0)
    assert group.zero_echo("still there") == (0, "still there")


def test_a_nonblocking_call_returns_a_future_at_once(group: WorkerGroup) -> None:
    future = group.scale_later(rows(5))
    assert isinstance(future, DataProtoFuture)
    assert future.get().batch["y"].tolist() == [4, 7, 10, 13, 16]


def test_a_future_raises_when_it_is_asked_not_before(group: WorkerGroup) -> None:
    future = group.fail_later()
    with pytest.raises(LookupError, match="too late"):
        future.get()


def test_a_future_goes_into_the_next_call_unfetched(group: WorkerGroup) -> None:
    def renamed(worker: Any, data: DataProto) -> DataProto:
        return data.rename("y", "x")

    later = group.scale_later(rows(5))
    assert group.execute_with_func_generator(renamed, later).batch["x"].tolist() == [
        4,
        7,
        10,
        13,
        16,
    ]


def test_a_future_can_be_cut_and_joined_without_being_fetched(group: WorkerGroup) -> None:
    pieces = group.scale_later(rows(6)).chunk(3)
    assert [piece.get().batch["y"].tolist() for piece in pieces] == [[4, 7], [10, 13], [16, 19]]
    joined = DataProtoFuture.concat([pieces[2], pieces[0]])
    assert joined.get().batch["y"].tolist() == [16, 19, 4, 7]


def test_a_function_can_be_run_on_rank_zero(group: WorkerGroup) -> None:
    assert group.execute_func_rank_zero(max, 3, 9) == 9


def test_execute_all_broadcasts_also_a_list_as_long_as_the_world(group: WorkerGroup) -> None:
    value = list(range(group.world_size))
    assert group.execute_all("echo", value) == [
        (rank, value, None) for rank in range(group.world_size)
    ]
    assert group.execute_all_async("echo", 1).get() == group.execute_all_sync("echo", 1)
    assert group.execute_rank_zero("echo", 1) == (0, 1, None)
    assert group.execute_rank_zero_async("echo", 1).get() == (0, 1, None)


def test_a_mesh_splits_over_its_data_axis_only(group: WorkerGroup) -> None:
    group.make_mesh("model", group.world_size)
    result = group.scale_on_mesh(rows(3))
    assert result.batch["y"].tolist() == [4, 7, 10]
    assert result.meta_info["metrics"]["rows"] == [3]


def test_a_mesh_nobody_registered_is_explained(group: WorkerGroup) -> None:
    with pytest.raises(ValueError, match="not registered on mesh 'elsewhere'"):
        group.mesh("elsewhere")


def test_an_unregistered_method_is_not_offered_and_a_typo_is_helped(group: WorkerGroup) -> None:
    with pytest.raises(AttributeError, match="no method 'unregistered'"):
        _ = group.unregistered
    with pytest.raises(AttributeError, match="Did you mean 'init_model'"):
        group.init_modle()


def test_a_batch_the_worker_changes_is_not_the_callers(group: WorkerGroup) -> None:
    data = rows(2)
    data.meta_info["note"] = "mine"

    def vandalise(worker: Any, piece: DataProto) -> DataProto:
        piece.meta_info["note"] = "yours"
        piece.batch["z"] = torch.zeros(len(piece))
        piece.non_tensor_batch["w"] = np.array([None] * len(piece))
        return piece

    group.execute_with_func_generator(vandalise, data)
    assert data.meta_info == {"step": 4, "note": "mine"}
    assert data.column_names() == ["x", "uid"]


def test_every_controller_computes_the_same_bits_with_one_rank(group: WorkerGroup) -> None:
    if group.world_size > 1:
        pytest.skip("ranks of one node share its cores: another thread count, other last bits")
    with make_group("local", ClassWithInitArgs(Toy, 1.0)) as local:
        assert local.whereabouts()[0]["threads"] == group.whereabouts()[0]["threads"]
        assert local.matmul_bits() == group.matmul_bits()


def test_ranks_can_reduce_over_gloo(group: WorkerGroup) -> None:
    if group.world_size == 1:
        pytest.skip("one rank has nobody to reduce with")
    assert group.all_reduced(10.0) == [30.0, 30.0]


class Custom(Toy):
    mode = register_dispatch_mode(
        "EACH_RANK_ITS_NUMBER",
        lambda group, word: (([f"{word}{rank}" for rank in range(group.world_size)],), {}),
        lambda group, results: "|".join(results),
    )

    @register(dispatch_mode=Dispatch.EACH_RANK_ITS_NUMBER)
    def shout(self, word: str) -> str:
        return word.upper()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def echo(self, value: Any, *, named: Any = None) -> tuple[int, Any, Any]:
        return -1, value, named


@pytest.mark.parametrize("kind", ["local", RAY2], scope="module", indirect=True)
def test_a_users_own_mode_overrides_and_colocated_roles(kind: str) -> None:
    roles = create_colocated_worker_cls(
        {
            "custom": ClassWithInitArgs(Custom, 2.0),
            "other": ClassWithInitArgs(Other, word="hello"),
        }
    )
    with make_group(kind, roles) as whole:
        groups = whole.spawn(prefix_set={"custom", "other"})
        custom, other = groups["custom"], groups["other"]
        world = whole.world_size
        assert custom.shout("a") == "|".join(f"A{rank}" for rank in range(world))
        assert custom.echo(5) == [(-1, 5, None)] * world
        assert [said[0] for said in other.say()] == ["hello"] * world
        assert {said[2] for said in other.say()} == {"other"}
        assert [said[1] for said in other.say()] == [w["pid"] for w in custom.whereabouts()]
        assert whole.other_say() == other.say()
        whole.fuse({"other"})
        assert whole.other.say() == other.say()
        assert set(whole.spawn_fused(["custom"])) == {"custom"}
        assert custom.scale(rows(3)).batch["y"].tolist() == [2, 4, 6]
        with pytest.raises(ValueError, match="no role \\['ghost'\\]"):
            whole.spawn({"ghost"})
        with pytest.raises(ValueError, match="has a single role"):
            custom.spawn({"other"})
        with pytest.raises(ValueError, match=r"has the roles \['custom', 'other'\]"):
            whole.execute_all("say")
    with pytest.raises(RuntimeError, match="shut down"):
        other.say()


@pytest.mark.parametrize(
    "kind",
    ["local", RAY],
    scope="module",
    indirect=True,
)
def test_an_error_in_the_constructor_is_raised_where_the_group_is_made(kind: str) -> None:
    with pytest.raises(TypeError, match="wrong"):
        make_group(kind, ClassWithInitArgs(Toy, wrong=1))


class ManyRanks(Executor):
    """Several ranks in this process, one after the other."""

    def __init__(self, cls_with_init: ClassWithInitArgs, world_size: int) -> None:
        self.world_size = world_size
        places = [Placement(rank=rank, world_size=world_size) for rank in range(world_size)]
        self.hosts = [build_host(cls_with_init, place, threads=1) for place in places]

    def submit(self, rank: int, call: Call) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self.hosts[rank].call(call))
        return future

    def resolver(self, role: str, method: str) -> Any:
        return get_results

    def shutdown(self) -> None:
        pass


class OnTensorDicts(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: TensorDict) -> TensorDict:
        assert isinstance(data, TensorDict)
        return tu.get_tensordict(
            {"y": data["x"] * 2, "tag": tu.get(data, "tag")}, {"rank": self.rank}
        )


def test_a_tensordict_is_split_over_ranks_and_joined() -> None:
    cls_with_init = ClassWithInitArgs(OnTensorDicts)
    group = WorkerGroup(ManyRanks(cls_with_init, 2), cls_with_init, "toy")
    result = group.double(tu.get_tensordict({"x": torch.arange(3), "tag": ["a", "b", "c"]}))
    assert isinstance(result, TensorDict)
    assert result["y"].tolist() == [0, 2, 4]  # the row added to even out the ranks is gone
    assert tu.get(result, "tag") == ["a", "b", "c"]
    assert tu.get(result, "rank") == 0
    with pytest.raises(TypeError, match="DataProto or a TensorDict"):
        group.double(tu.get_tensordict({}, {"step": 1}))


def test_a_tensordict_crosses_a_process_as_itself() -> None:
    ragged = torch.nested.as_nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    sent = TensorDictPayload(DataProto.from_tensordict(tu.get_tensordict({"x": ragged})))
    arrived = pickle.loads(pickle.dumps(sent))
    assert isinstance(arrived, TensorDict)
    assert torch.equal(arrived["x"][1], torch.arange(3))


class Adds(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x: float) -> float:
        return x + self.rank


def test_a_fused_worker_holds_workers_that_it_and_its_group_call() -> None:
    roles = {"adds": ClassWithInitArgs(Adds), "other": ClassWithInitArgs(Other, "x")}

    class Both(create_colocated_worker_raw_cls(roles)):  # type: ignore[misc]
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def both(self, x: float) -> tuple[float, str]:
            return self.adds.add(x), self.other.word

    cls_with_init = ClassWithInitArgs(Both)
    group = WorkerGroup(ManyRanks(cls_with_init, 2), cls_with_init, "toy")
    group.fuse(roles)
    assert group.both(1.0) == [(1.0, "x"), (2.0, "x")]
    assert group.adds.add(1.0) == [1.0, 2.0]


class OnSlots(Worker):
    """Two ranks share a data-parallel slot; the second of them answers."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.seen: list[list[float]] = []
        self.register_mesh(DEFAULT_MESH, self.rank // 2, self.rank % 2 == 1)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: DataProto, by: float = 2.0) -> DataProto:
        self.seen.append(data.batch["x"].tolist())
        answer = DataProto.from_dict({"y": by * data.batch["x"]})
        answer.meta_info["metrics"] = {"rank": self.rank}
        return answer

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto) -> int:
        return len(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def later(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"y": data.batch["x"]})


@pytest.fixture
def slots() -> WorkerGroup:
    cls_with_init = ClassWithInitArgs(OnSlots)
    return WorkerGroup(ManyRanks(cls_with_init, 4), cls_with_init, "slots")


def test_ranks_of_one_slot_get_the_same_rows_and_answer_once(slots: WorkerGroup) -> None:
    slots.init_model()
    assert (slots.world_size, slots.data_parallel_size) == (4, 2)
    result = slots.double(rows(4), by=3.0)
    assert result.batch["y"].tolist() == [3, 6, 9, 12]
    assert result.meta_info["metrics"]["rank"] == [1, 3]
    executor = slots._executor
    assert isinstance(executor, ManyRanks)
    assert [host.worker().seen for host in executor.hosts] == [[[1, 2]]] * 2 + [[[3, 4]]] * 2
    assert slots.count(rows(4)) == [2, 2]


def test_rows_are_evened_out_over_slots_not_over_ranks(slots: WorkerGroup) -> None:
    slots.init_model()
    assert slots.double(rows(2)).batch["y"].tolist() == [2, 4]
    assert slots.double(rows(3)).batch["y"].tolist() == [2, 4, 6]
    assert slots.later(rows(3)).get().batch["y"].tolist() == [1, 2, 3]


def test_a_place_that_rows_were_sent_by_is_not_changed(slots: WorkerGroup) -> None:
    assert slots.count(rows(4)) == [1, 1, 1, 1]  # before it says otherwise, each rank is a slot
    with pytest.raises(ValueError, match="cannot change to"):
        slots.init_model()


def _unnamed(function: Any) -> Any:
    def wrapper(self: Any) -> Any:
        return function(self)

    return wrapper


class Decorated(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @_unnamed
    def hello(self) -> int:
        return 1


def test_a_method_is_called_by_the_name_that_the_class_gives_it() -> None:
    group = make_group("local", ClassWithInitArgs(Decorated))
    assert group.hello() == [1]
