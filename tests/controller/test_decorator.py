"""`@register` and the table of dispatch modes."""

from __future__ import annotations

from typing import Any

import pytest

from hone.controller import (
    Dispatch,
    Execute,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from hone.controller.contract import Mesh
from hone.controller.decorator import DispatchMode, method_spec, registered_methods
from hone.controller.dispatch import broadcast


def split(group: Any, *args: Any, **kwargs: Any) -> Any:
    return broadcast(group, *args, **kwargs)


def join(group: Any, results: list[Any]) -> Any:
    return results


def test_a_registered_method_is_the_method_itself() -> None:
    def work(self: Any, x: int) -> int:
        return x + 1

    marked = register(dispatch_mode=Dispatch.ONE_TO_ALL)(work)
    assert marked is work
    assert marked(None, 1) == 2
    spec = method_spec(marked)
    assert spec is not None
    assert (spec.dispatch_mode, spec.execute_mode, spec.blocking) == (
        Dispatch.ONE_TO_ALL,
        Execute.ALL,
        True,
    )
    default = method_spec(register()(lambda self: None))
    assert default is not None
    assert default.dispatch_mode is Dispatch.ALL_TO_ALL


@pytest.mark.parametrize("mode", ["ONE_TO_ALL", 3, object()])
def test_a_mode_of_the_wrong_type_is_refused(mode: Any) -> None:
    with pytest.raises(TypeError, match="use Dispatch"):
        register(dispatch_mode=mode)


def test_half_a_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="collect_fn"):
        register(dispatch_mode={"dispatch_fn": split})
    spec = method_spec(register({"dispatch_fn": split, "collect_fn": join})(lambda self: None))
    assert spec is not None
    assert spec.dispatch_mode.collect_fn is join


def test_an_execute_mode_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Execute\.ALL"):
        register(execute_mode="all")  # type: ignore[arg-type]


def test_a_mode_that_does_not_exist_is_helped() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'ONE_TO_ALL'"):
        _ = Dispatch.ONE_TO_AL
    assert repr(Dispatch.DP_COMPUTE) == "Dispatch.DP_COMPUTE"


def test_the_modes_can_be_listed() -> None:
    assert Dispatch.ONE_TO_ALL in Dispatch
    assert {mode.name for mode in Dispatch} >= {
        "RANK_ZERO",
        "ONE_TO_ALL",
        "ALL_TO_ALL",
        "DP_COMPUTE",
        "DP_COMPUTE_PROTO",
        "DP_COMPUTE_PROTO_WITH_FUNC",
        "DP_COMPUTE_METRIC",
        "DIRECT_ROLLOUT_METHOD",
    }


def test_modes_can_be_added_once_and_updated() -> None:
    mode = register_dispatch_mode("TEST_MODE", split, join)
    assert Dispatch.TEST_MODE is mode
    assert mode in Dispatch
    with pytest.raises(ValueError, match="update_dispatch_mode"):
        register_dispatch_mode("TEST_MODE", split, join)
    with pytest.raises(ValueError, match="must be an identifier"):
        register_dispatch_mode("two words", split, join)
    newer = update_dispatch_mode("TEST_MODE", broadcast, join)
    assert Dispatch.TEST_MODE is newer
    with pytest.raises(ValueError, match="register_dispatch_mode"):
        update_dispatch_mode("NEVER_SEEN", split, join)


def test_an_override_keeps_the_registration_of_its_base() -> None:
    class Base:
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def work(self) -> int:
            return 1

    class Child(Base):
        def work(self) -> int:
            return 2

        @register(dispatch_mode=Dispatch.RANK_ZERO)
        def more(self) -> None: ...

    found = registered_methods(Child)
    assert found["work"].dispatch_mode is Dispatch.ONE_TO_ALL
    assert found.keys() == {"work", "more"}


def test_rollout_methods_have_no_driver_side() -> None:
    mode: DispatchMode = Dispatch.DIRECT_ROLLOUT_METHOD
    with pytest.raises(RuntimeError, match="inside the rollout worker"):
        mode.dispatch_fn(None)


def test_a_function_mode_needs_a_function() -> None:
    with pytest.raises(TypeError, match="the function that each rank runs"):
        Dispatch.DP_COMPUTE_PROTO_WITH_FUNC.dispatch_fn(None, 3)


def test_each_data_parallel_group_of_a_mesh_answers_once() -> None:
    Mesh((0, 0, 1, 1), (True, False, False, True)).check("m")
    for is_collect in ((True, True, True, False), (True, False, False, False)):
        with pytest.raises(ValueError, match="exactly one rank"):
            Mesh((0, 0, 1, 1), is_collect).check("m")
