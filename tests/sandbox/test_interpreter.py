"""The box sees its interpreter, but not the other files beside it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hone.sandbox import SandboxUnavailable, interpreter, run_python
from hone.sandbox.interpreter import SYSTEM_PYTHON, choose, describe


def test_running_interpreter_is_described_outside_its_environment() -> None:
    python = describe()
    assert os.path.samefile(python.executable, os.path.realpath(sys.executable))
    assert (
        not any(path == sys.prefix for path in python.read_paths) or sys.prefix == sys.base_prefix
    )
    assert not any(path in ("/", os.path.expanduser("~")) for path in python.read_paths)


def test_box_runs_the_same_version_without_its_packages(bwrap: None) -> None:
    code = "import sys; print(sys.version_info[:2])\ntry:\n    import pip\nexcept ImportError: print('none')"
    assert run_python(code).stdout == f"{sys.version_info[:2]}\nnone\n"


@pytest.mark.skipif(not os.path.exists(SYSTEM_PYTHON), reason=f"no {SYSTEM_PYTHON} here")
def test_system_interpreter_can_be_named(bwrap: None) -> None:
    result = run_python("import sys; print(sys.prefix)", interpreter=SYSTEM_PYTHON)
    assert result.stdout == "/usr\n"


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_virtual_environment_brings_its_packages(
    bwrap: None, tmp_path: Path, is_nested: bool
) -> None:
    import venv

    venv.create(tmp_path / "env", symlinks=True)
    if is_nested:  # as Python 3.10 makes an environment out of another one
        link = tmp_path / "env" / "bin" / "python"
        (tmp_path / "outer").mkdir()
        (tmp_path / "outer" / "python").symlink_to(link.resolve())
        link.unlink()
        link.symlink_to("../../outer/python")
    library = next((tmp_path / "env" / "lib").glob("python*")) / "site-packages"
    (library / "treasure.py").write_text("VALUE = 7\n")
    python = str(tmp_path / "env" / "bin" / "python")
    result = run_python("import treasure; print(treasure.VALUE)", interpreter=python)
    assert result.stdout == "7\n", result


def test_an_interpreter_that_does_not_run_is_named() -> None:
    with pytest.raises(SandboxUnavailable, match="/nowhere/python"):
        describe("/nowhere/python")


def test_an_interpreter_in_a_private_directory_is_not_reachable(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "closed" / "python").write_text("")
    python = interpreter.Interpreter(str(tmp_path / "closed" / "python"), (), ())
    (tmp_path / "closed" / "python").chmod(0o755)
    assert not python.is_readable_by(12345, 12345)
    (tmp_path / "closed").chmod(0o755)
    assert python.is_readable_by(12345, 12345)


def test_unreachable_interpreter_falls_back_only_when_none_was_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interpreter.Interpreter, "is_readable_by", lambda *_: False)
    if os.path.exists(SYSTEM_PYTHON):
        assert choose(None, uid=1, gid=1, bind_interpreter=False) == describe(SYSTEM_PYTHON)
    with pytest.raises(SandboxUnavailable, match="uid 1 cannot read"):
        choose(sys.executable, uid=1, gid=1, bind_interpreter=False)
    assert choose(None, uid=1, gid=1, bind_interpreter=True) == describe()
