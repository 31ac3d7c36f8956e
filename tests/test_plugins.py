"""Names to objects."""

from __future__ import annotations

import math
import sys

import pytest

from hone.plugins import PluginError, Table, load_module, load_object


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "COUNT = [0]\nCOUNT[0] += 1\ndef score(x):\n    return x + 1\nclass Box:\n    lid = 3\n"
    )
    yield path
    for name in [n for n in sys.modules if n.startswith("hone_extern_")]:
        del sys.modules[name]


def test_objects_are_found_by_module_dotted_name_and_file(file):
    assert load_object("math:sqrt") is math.sqrt
    assert load_object("math.sqrt") is math.sqrt
    assert load_object("pkg://math:sqrt") is math.sqrt
    assert load_object("pkg://math.sqrt") is math.sqrt
    assert load_object(f"{file}:score")(1) == 2
    assert load_object(f"file://{file}:Box.lid") == 3


def test_a_file_is_loaded_once_and_two_of_one_name_do_not_clash(file, tmp_path):
    assert load_module(str(file)) is load_module(str(file))
    assert load_object(f"{file}:COUNT") == [1]
    other = tmp_path / "elsewhere" / "mine.py"
    other.parent.mkdir()
    other.write_text("def score(x):\n    return -x\n")
    assert load_object(f"{other}:score")(1) == -1
    assert load_object(f"{file}:score")(1) == 2


def test_a_file_that_fails_is_not_kept_half_loaded(file):
    file.write_text("import nothing_of_that_name\n")
    for _ in range(2):
        with pytest.raises(PluginError, match=r"mine\.py, line 1: .*'nothing_of_that_name'; inst"):
            load_module(str(file))
    file.write_text("VALUE = 5\n")
    assert load_module(str(file)).VALUE == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef score(:\n    pass\n", "line 2: SyntaxError: invalid syntax"),
        ("x = 1\n  y = 2\n", "line 2: IndentationError: unexpected indent"),
        ("import json\n\nfrom json import nothing\n", "line 3: ImportError: cannot import name"),
    ],
)
def test_a_users_file_that_cannot_run_is_told_with_file_and_line(file, text, message, monkeypatch):
    file.write_text(text)
    with pytest.raises(PluginError, match=rf"{file.name}, {message}"):
        load_object(f"{file}:score")
    monkeypatch.syspath_prepend(file.parent)
    file.rename(file.with_name("a_users_module.py"))
    with pytest.raises(PluginError, match=r"'a_users_module' cannot be imported: .*line \d"):
        load_object("a_users_module:score")


def test_what_a_users_module_lacks_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "another_users_module.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(PluginError, match="cannot be imported: No module named 'nothing_of_that_n"):
        load_object("another_users_module:score")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("math:sqroot", "'math' has no 'sqroot'; it has acos"),
        ("no_such_module:thing", "neither a file .* nor an importable module"),
        ("/no/such/file.py:thing", "no such file"),
        ("word", "has no object name"),
    ],
)
def test_what_is_missing_is_said(target, message):
    with pytest.raises(PluginError, match=message):
        load_object(target)


def test_a_table_resolves_names_paths_and_objects():
    table = Table("loss", {"root": "math:sqrt"})
    assert table.get("root") is math.sqrt
    assert table.get("math:floor") is math.floor
    assert "root" in table
    assert "floor" not in table

    @table.register("own")
    def own():
        return 1

    assert table.get("own") is own
    assert table.names() == ["own", "root"]


@pytest.mark.parametrize("name", ["math:floor", "math.floor", "file.py:x", "floor"])
def test_a_name_from_data_is_looked_up_and_never_imported(name):
    table = Table("loss", {"root": "math:sqrt"})
    assert table.get_registered("root") is math.sqrt
    with pytest.raises(PluginError, match="unknown loss"):
        table.get_registered(name)


def test_an_unknown_name_gets_a_proposal():
    with pytest.raises(
        PluginError, match=r"unknown loss 'roott'\. Did you mean 'root'\? Known: root"
    ):
        Table("loss", {"root": "math:sqrt"}).get("roott")


def test_a_taken_name_stays_taken_but_registering_again_is_fine():
    table = Table("loss", {})

    def make():
        def fn():
            return 1

        return fn

    table.add("fn", make())
    table.add("fn", make())  # one module imported twice gives two objects of one name
    with pytest.raises(PluginError, match="already"):
        table.add("fn", math.sqrt)


def test_a_folder_named_verl_is_not_verl(tmp_path, monkeypatch):
    (tmp_path / "verl").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert load_object("verl.utils.reward_score.gsm8k:compute_score").__module__.startswith("hone.")
