from __future__ import annotations

from collections.abc import Callable

import pytest

from hone.plugins import PluginError, load_extern_object, load_object


def test_a_file_is_loaded_once_and_keeps_its_identity(scorer_file: Callable[[str], str]) -> None:
    path = scorer_file("class A:\n    def f(self): return 1\nN = []\n")
    assert load_extern_object(path, "A") is load_extern_object("file://" + path, "A")
    assert load_extern_object(path, class_name="A.f") is load_extern_object(path, "A").f


def test_files_of_one_name_do_not_clash(
    scorer_file: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other") / "my_reward.py"
    other.write_text("NAME = 2")
    assert load_extern_object(scorer_file("NAME = 1"), "NAME") == 1
    assert load_extern_object(str(other), "NAME") == 2


def test_modules_are_loaded_by_name_and_by_pkg() -> None:
    import json

    assert load_extern_object("pkg://json", "loads") is json.loads
    assert load_extern_object("json", "loads") is json.loads
    assert load_object("json.decoder:JSONDecoder") is json.JSONDecoder


@pytest.mark.parametrize(
    ("path", "name", "message"),
    [
        ("/nowhere/x.py", "f", "no such file: '/nowhere/x.py'"),
        ("no_such_module_at_all", "f", "neither a file"),
        ("json", "lods", "'json' has no 'lods'; it has"),
        ("json", "", "name the object"),
    ],
)
def test_an_error_names_what_is_missing(path: str, name: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        load_extern_object(path, name)


def test_an_error_in_the_file_is_shown_and_the_next_load_retries(
    scorer_file: Callable[[str], str],
) -> None:
    path = scorer_file("1/0")
    with pytest.raises(PluginError, match=r", line 1: ZeroDivisionError: division by zero"):
        load_extern_object(path, "f")
    scorer_file("f = 3")
    assert load_extern_object(path, "f") == 3
