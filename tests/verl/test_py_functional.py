"""Small functions on dicts, processes and addresses that code written for verl imports."""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from typing import Any

import pytest
from omegaconf import OmegaConf

from hone.verl import py_functional as F


def test_dicts_are_joined_renamed_and_collected() -> None:
    data: dict = {}
    F.append_to_dict(data, {"a": 1, "m/b": [2, 3]}, prefix="m/")
    F.append_to_dict(data, {"m/a": 4})
    assert data == {"m/a": [1, 4], "m/b": [2, 3]}
    assert F.union_two_dict({"a": 1}, {"a": 1, "b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(AssertionError, match="'a' is 1"):
        F.union_two_dict({"a": 1}, {"a": 2})
    assert F.list_of_dict_to_dict_of_list([{"a": 1}, {"a": 2}]) == {"a": [1, 2]}
    assert F.list_of_dict_to_dict_of_list([]) == {}
    assert F.NestedNamespace({"a": {"b": 1}}).a.b == 1


def test_an_environment_variable_is_put_back() -> None:
    with F.temp_env_var("HONE_TEST_VARIABLE", "1"):
        assert os.environ["HONE_TEST_VARIABLE"] == "1"
    assert "HONE_TEST_VARIABLE" not in os.environ


def test_a_function_with_a_time_limit_returns_raises_or_is_killed() -> None:
    @F.timeout_limit(seconds=20)
    def divided(a: float, b: float = 1.0) -> float:
        return a / b

    assert divided(6, b=3) == 2
    with pytest.raises(ZeroDivisionError):
        divided(1, 0)

    @F.timeout_limit(seconds=0.05)
    def endless() -> None:
        time.sleep(60)

    with pytest.raises(TimeoutError, match="endless timed out after"):
        endless()


def test_a_function_whose_process_dies_or_whose_result_cannot_be_pickled_raises() -> None:
    with pytest.raises(RuntimeError, match="exitcode: 3"):
        F.timeout_limit(20)(lambda: os._exit(3))()
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        F.timeout_limit(20)(lambda: lambda: 1)()


def test_a_deprecated_function_or_class_warns_and_works() -> None:
    @F.deprecated("better")
    def old(x: int) -> int:
        return x

    @F.deprecated()
    class Old:
        def __init__(self, x: int) -> None:
            self.x = x

    with pytest.warns(FutureWarning, match=r"Function '.*old' is deprecated. Please use 'better'"):
        assert old(1) == 1
    with pytest.warns(FutureWarning, match=r"Class '.*Old' is deprecated\.$"):
        assert Old(2).x == 2
    assert isinstance(Old, type)


def test_ipv4_and_ipv6_addresses_are_recognized() -> None:
    texts = ["10.0.0.1", "::1", "localhost", "1.2.3"]
    assert [F.is_ipv4(text) for text in texts] == [True, False, False, False]
    assert [F.is_ipv6(text) for text in texts] == [False, True, False, False]


@pytest.mark.parametrize(
    ("variable", "remaining_s", "saves"),
    [
        ("MLP", 100, True),
        ("MLP", 200, False),
        ("MLP", -5, False),
        ("SAGEMAKER", 100, True),
        ("SAGEMAKER", 200, False),
    ],
)
def test_a_checkpoint_is_due_when_a_reserved_machine_expires_before_the_next(
    monkeypatch: pytest.MonkeyPatch, variable: str, remaining_s: int, saves: bool
) -> None:
    assert not F.should_save_ckpt_esi(1000)
    name = f"{variable}_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"
    monkeypatch.setenv(name, str(int(time.time()) + remaining_s))
    assert F.should_save_ckpt_esi(40, save_ckpt_duration=60, redundant_time=50) is saves


def test_an_expiration_time_that_is_not_a_number_saves_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", "soon")
    assert not F.should_save_ckpt_esi(1000)


def test_configs_become_plain_containers() -> None:
    config = OmegaConf.create({"a": [{"b": 1}], "c": None})
    plain = F.convert_to_regular_types({"config": config, "pair": (1, 2)})
    assert plain == {"config": {"a": [{"b": 1}], "c": None}, "pair": [1, 2]}
    assert type(plain["config"]["a"][0]) is dict


def test_a_class_is_loaded_by_its_dotted_name() -> None:
    assert F.load_class_from_fqn("collections.OrderedDict") is OrderedDict
    with pytest.raises(ValueError, match="agent loop 'OrderedDict' is not a dotted name"):
        F.load_class_from_fqn("OrderedDict", "agent loop")


def test_an_async_function_can_be_called_without_await_where_no_loop_runs() -> None:
    from hone.utils.ray_utils import auto_await  # type: ignore[import-not-found]

    @auto_await  # type: ignore[untyped-decorator]
    async def double(number: int) -> int:
        return 2 * number

    async def awaits() -> Any:
        return await double(4)

    assert (double(3), asyncio.run(awaits())) == (6, 8)
