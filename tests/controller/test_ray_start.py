"""Ray that we start is closed to others; a cluster that is there keeps its own authentication."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hone.launch import reaper

ray = pytest.importorskip("ray")

from hone.controller import ray_liveness, ray_start  # noqa: E402
from hone.controller.worker import free_port  # noqa: E402
from hone.launch.ray_environment import SLOW_START_ENV  # noqa: E402

HERE = Path(__file__).parent
TOKEN = "RAY_AUTH_TOKEN"


@pytest.fixture
def inits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What ray.init was called with, and the environment at that moment; no Ray is started."""
    calls: list[dict[str, Any]] = []

    def init(**options: Any) -> Any:
        calls.append({"options": options, "environ": dict(os.environ)})
        return SimpleNamespace(address_info={"session_dir": str(tmp_path)})

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray_start, "watch_cluster", lambda *given: None)
    monkeypatch.setattr(ray_start, "reload_settings", lambda: None)
    monkeypatch.setattr(ray_start, "_own_cluster", None)
    for name in (TOKEN, "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    yield calls  # type: ignore[misc]
    if ray_start._own_cluster is not None:
        ray_start._own_cluster.reaper.kill()
        ray_start._own_cluster.reaper.wait()


def test_what_we_start_gets_a_new_token_which_no_other_process_sees(
    inits: list[dict[str, Any]],
) -> None:
    assert ray_start.start_ray({"num_cpus": 2, "address": None})
    during = inits[0]["environ"]
    assert (during["RAY_AUTH_MODE"], len(during[TOKEN])) == ("token", 64)
    assert inits[0]["options"]["address"] == "local"  # Ray must not look for another one
    assert SLOW_START_ENV.items() <= during.items()
    assert TOKEN not in os.environ
    assert os.environ["RAY_AUTH_MODE"] == "disabled"  # which is about clusters one joins


def test_a_token_of_the_user_is_used(
    inits: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "mine" * 16)
    ray_start.start_ray({})
    assert inits[0]["environ"][TOKEN] == "mine" * 16 == os.environ[TOKEN]


def test_ray_starts_with_the_options_of_ray_init(inits: list[dict[str, Any]]) -> None:
    from hone.verl.dialect import load_config

    config = load_config(
        ["ray_kwargs.ray_init.num_cpus=3", "ray_kwargs.ray_init.runtime_env={env_vars: {A: b}}"]
    )
    assert ray_start.start_ray(vars(config.ray_kwargs.ray_init))
    options = inits[0]["options"]
    assert (options["num_cpus"], options["runtime_env"]) == (3, {"env_vars": {"A": "b"}})


@pytest.mark.parametrize("how", ["option", "environment", "file"])
def test_a_cluster_that_is_there_is_joined_as_the_environment_says(
    inits: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        options = {"address": address} if how == "option" else {}
        if how == "environment":
            monkeypatch.setenv("RAY_ADDRESS", address)
        if how == "file":
            _latest_cluster(tmp_path, address)
        ray_start.start_ray(options)
    assert inits[0]["options"].get("address") == options.get("address")
    assert inits[0]["environ"]["RAY_AUTH_MODE"] == "disabled"
    assert TOKEN not in inits[0]["environ"]


def test_the_cluster_of_another_user_is_not_joined(
    inits: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = _latest_cluster(tmp_path, "127.0.0.1:1")
    if os.getuid() == 0:
        os.chown(file, 12345, 12345)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(ray_start, "check_reachable", lambda *given: None)
    ray_start.start_ray({})
    assert inits[0]["options"]["address"] == "local"


def test_a_run_that_says_how_large_its_ray_is_gets_its_own(
    inits: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _latest_cluster(tmp_path, "127.0.0.1:1")
    monkeypatch.setattr(ray_start, "check_reachable", lambda *given: None)
    ray_start.start_ray({"num_cpus": 2})
    assert inits[0]["options"]["address"] == "local"


def test_a_cluster_that_is_gone_is_not_joined(
    inits: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _latest_cluster(tmp_path, f"127.0.0.1:{free_port()}")
    ray_start.start_ray({})
    assert inits[0]["options"]["address"] == "local"
    assert "has ended; starting a new one" in caplog.text


def test_a_handler_of_the_program_for_sigterm_stays(
    inits: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(*given: object) -> None: ...

    def init(**options: Any) -> Any:
        signal.signal(signal.SIGTERM, lambda *given: None)
        return SimpleNamespace(address_info={"session_dir": "/"})

    monkeypatch.setattr(ray, "init", init)
    before = signal.signal(signal.SIGTERM, handler)
    try:
        ray_start.start_ray({})
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_process_of_ray_that_ends_at_once_does_not_fail_the_start(
    inits: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "marked_pids", lambda mark: [2**30])  # no such process
    monkeypatch.setattr(reaper, "kill_marked_processes", lambda mark: [])
    assert ray_start.start_ray({})
    assert len(inits) == 1


def _latest_cluster(folder: Path, address: str) -> Path:
    (folder / "ray").mkdir()
    file = folder / "ray" / "ray_current_cluster"
    file.write_text(address)
    return file


# -- with a real cluster ------------------------------------------------------------------------


def listening(pids: list[int]) -> list[tuple[str, str]]:
    """(address in hexadecimal, program) of every socket on which one of these processes listens."""
    owner = {}
    for pid in pids:
        with suppress(OSError):  # the process has ended
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    owner[os.readlink(f"/proc/{pid}/fd/{fd}")] = pid
    rows = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            pid = owner.get(f"socket:[{fields[9]}]")
            if fields[3] == "0A" and pid is not None:
                name = _content(Path(f"/proc/{pid}/comm")).decode().strip()
                rows.append((fields[1].rpartition(":")[0], name))
    return rows


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_every_socket_of_our_cluster_listens_on_loopback() -> None:
    assert ray_start._own_cluster is not None
    processes = [*reaper.marked_pids(ray_start._own_cluster.mark), os.getpid()]
    sockets = listening(processes)
    assert {"gcs_server", "raylet"} <= {name for _, name in sockets}
    assert [row for row in sockets if row[0] not in LOOPBACK] == []


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_the_token_is_in_no_file_and_no_worker_shows_it() -> None:
    assert ray_start._own_cluster is not None
    assert ray_liveness._watch is not None
    pid = ray_liveness._watch._ray_pids["gcs_server"]
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    token = next(entry for entry in environ if entry.startswith(TOKEN.encode())).partition(b"=")[2]
    assert len(token) == 64
    folder = Path(ray._private.worker._global_node.get_session_dir_path())
    private = Path(ray_start._own_cluster.folder)
    assert private in folder.parents
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    assert [file for file in files if token in _content(file)] == []
    pids = reaper.marked_pids(ray_start._own_cluster.mark)
    assert pid in pids
    assert not any(token in _content(Path(f"/proc/{p}/cmdline")) for p in pids)


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:  # Ray has deleted it, or the process has ended
        return b""


INTRUDER = """
import os, sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
@ray.remote(num_cpus=0)
def intrude():
    open(sys.argv[2], "w").write("here")
ray.get(intrude.remote(), timeout=60)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_foreign_processes_without_the_token_run_nothing(tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    # As an intruder on this machine would: Ray takes 127.0.0.1 for the machine's own address.
    environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "HOME": str(tmp_path)}
    keys = [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", TOKEN: "f" * 64}]
    intruders = [
        subprocess.Popen(
            [sys.executable, "-c", INTRUDER, address, str(tmp_path / "trace")],
            env={**environment, **key},
            stderr=subprocess.PIPE,
            text=True,
        )
        for key in keys
    ]
    for intruder in intruders:
        _, errors = intruder.communicate(timeout=240)
        assert intruder.returncode != 0
        assert "uthenticat" in errors, errors[-2000:]
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("joins", "sentence"),
    [(True, "joining the Ray cluster 10.1.1.1:6379"), (False, "starting Ray on this machine")],
)
def test_what_begins_is_told_before_it_is_waited_for(
    inits: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, joins: bool, sentence: str
) -> None:
    told: list[str] = []
    monkeypatch.setattr(ray_start, "joins_cluster", lambda ray_init: joins)
    ray_start.start_ray({"address": "10.1.1.1:6379"}, told.append)
    assert told == [sentence]
