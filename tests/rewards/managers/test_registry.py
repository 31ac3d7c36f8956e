from __future__ import annotations

from typing import Any

import pytest

from hone.rewards.managers import AbstractRewardManager, get_reward_manager_cls, register, registry


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.MANAGERS, "entries", dict(registry.MANAGERS.entries))


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("naive", "NaiveRewardManager"),
        ("batch", "BatchRewardManager"),
        ("prime", "PrimeRewardManager"),
        ("dapo", "DAPORewardManager"),
        ("blank", "BlankRewardManager"),
    ],
)
def test_verls_managers_are_registered(name: str, cls: str) -> None:
    manager_cls = get_reward_manager_cls(name)
    assert manager_cls.__name__ == cls
    assert issubclass(manager_cls, AbstractRewardManager)


def test_a_users_class_is_found_by_its_name() -> None:
    @register("mine")
    class Mine(AbstractRewardManager):
        def __call__(self, data: Any, return_dict: bool = False) -> Any:
            return None

    assert get_reward_manager_cls("mine") is Mine
    assert register("mine")(Mine) is Mine


def test_a_registered_name_cannot_be_registered_again() -> None:
    for name in ("naive", "mine"):
        register("mine")(type("Mine", (), {}))
        with pytest.raises(ValueError, match=f"{name!r} is already"):
            register(name)(type("Other", (), {}))


def test_an_unknown_name_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"'naiv'.*Did you mean 'naive'.*pkg.mod:object"):
        get_reward_manager_cls("naiv")
