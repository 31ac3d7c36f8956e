"""Copies of checkpoints in a store: a run goes on from them elsewhere, and a broken store costs a warning."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hone.cli import main as hone
from hone.config import ConfigError
from hone.controller.worker import free_port
from hone.data import files
from hone.tracking import RunFolder
from hone.tracking.manifest import write_manifest
from hone.trainer import main_sft
from hone.trainer.ppo import remote_checkpoints
from hone.trainer.ppo.checkpoint import NoValidCheckpoint

from ..around_fixtures import sft_config, sft_settings, tiny_model
from ..runs import Run, Task

FOUR = ("trainer.save_freq=1", "trainer.total_training_steps=4")
TWO = ("trainer.save_freq=1", "trainer.total_training_steps=2")
MOTO = Path(__file__).parents[3] / ".venv-s3" / "bin" / "moto_server"


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return f"memory://{request.node.name}"


def whole_copies(url: str) -> set[str]:
    return {n.split("/")[0] for n in files.remote_files(url) if n.endswith("/manifest.json")}


def test_a_run_goes_on_on_another_machine(train: Callable[..., Run], store: str) -> None:
    uninterrupted = train(*FOUR, folder="whole")
    there = f"trainer.default_hdfs_dir={store}"
    first = train(*TWO, there, folder="first")
    assert whole_copies(store) == {"global_step_1", "global_step_2"}
    shutil.rmtree(first.folder)
    second = train(*FOUR, there, "trainer.max_actor_ckpt_to_keep=2", folder="second")
    assert second.numbers == uninterrupted.numbers
    assert whole_copies(store) == {"global_step_3", "global_step_4"}
    assert "global_step_1" not in {n.split("/")[0] for n in files.remote_files(store)}


@pytest.mark.parametrize("url", ["file://{home}/store", "~/store"])
def test_a_folder_of_this_machine_is_a_store(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    first, second = (
        RunFolder(tmp_path / name, url.format(home=tmp_path)) for name in ("first", "second")
    )
    first.checkpoint(3).mkdir(parents=True)
    (first.checkpoint(3) / "trainer_state.json").write_text("{}")
    write_manifest(first.checkpoint(3))
    first.metrics_file.write_text('{"step": 3}\n')
    remote_checkpoints.push(first, 0)
    assert (tmp_path / "store" / "metrics.jsonl").is_file()
    remote_checkpoints.pull(second)
    assert [step for step, _ in second.checkpoints()] == [3]
    assert second.metrics_file.read_text() == first.metrics_file.read_text()


def test_a_damaged_copy_is_passed_over_and_a_later_one_is_set_aside(
    train: Callable[..., Run], store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = f"trainer.default_hdfs_dir={store}"
    train(*TWO, there, folder="first")
    (tmp_path / "x").write_text("broken")
    files.copy(tmp_path / "x", f"{store}/global_step_2/trainer_state.json")
    with caplog.at_level(logging.WARNING):
        resumed = train(*TWO, there, folder="second")
    assert "global_step_2 is damaged" in caplog.text
    assert [line["step"] for line in resumed.metrics] == [1, 2]
    anew = train(*TWO, there, "trainer.resume_mode=disable", "trainer.save_freq=2", folder="third")
    assert anew.checkpoints() == ["global_step_2"]
    assert whole_copies(store) == {"global_step_2"}
    assert "global_step_1/manifest.json.earlier" in files.remote_files(store)


def copied_run(folder: Path, store: str, *steps: int) -> RunFolder:
    run = RunFolder(folder, store)
    for step in steps:
        run.checkpoint(step).mkdir(parents=True)
        (run.checkpoint(step) / f"of_{folder.name}").write_text("x")
        write_manifest(run.checkpoint(step))
    return run


def test_invalidated_copies_are_deleted_with_the_old_ones(store: str, tmp_path: Path) -> None:
    remote_checkpoints.push(copied_run(tmp_path / "first", store, 1, 2, 3, 9), 0)
    second = copied_run(tmp_path / "second", store, 2, 4)
    remote_checkpoints.invalidate_after(second, 0)
    remote_checkpoints.push(second, 0)
    names = files.remote_files(store)
    assert "global_step_1/manifest.json.earlier" in names  # 0 keeps all
    assert [n for n in names if n.startswith("global_step_2/")] == [
        "global_step_2/manifest.json",
        "global_step_2/of_second",
    ]
    remote_checkpoints.push(second, 1)
    folders = {n.split("/")[0] for n in files.remote_files(store)}
    assert folders == {"global_step_2", "global_step_4", "global_step_9"}  # 9 is still to come


def test_a_run_on_another_machine_has_the_ids_of_its_trackers(store: str, tmp_path: Path) -> None:
    first = copied_run(tmp_path / "first", store, 1)
    first.save_run_id("wandb", "abc")
    remote_checkpoints.push(first, 0)
    second = RunFolder(tmp_path / "second", store)
    remote_checkpoints.pull(second)
    assert second.run_ids_by_tracker().get("wandb") == "abc"


def test_without_any_sound_copy_the_run_stops_and_changes_nothing(
    train: Callable[..., Run], store: str, tmp_path: Path
) -> None:
    there = f"trainer.default_hdfs_dir={store}"
    train(*TWO, there, folder="first")
    (tmp_path / "x").write_text("broken")
    for step in (1, 2):
        files.copy(tmp_path / "x", f"{store}/global_step_{step}/trainer_state.json")
    before = files.remote_files(store)
    with pytest.raises(NoValidCheckpoint, match="has 2 checkpoints, but all of them are damaged"):
        train(*TWO, there, folder="second")
    assert files.remote_files(store) == before
    train(*TWO, there, "trainer.resume_mode=disable", folder="second")


def test_the_copied_metrics_reach_every_copied_checkpoint_and_incomplete_ones_are_passed_over(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "run", store)
    run.metrics.append({"a": 1.0}, 2)
    for step in (1, 2):
        run.checkpoint(step).mkdir()
    (run.checkpoint(2) / "x").write_text("x")
    write_manifest(run.checkpoint(2))
    order = []

    def upload(source: Path, url: str, last: str | None = None) -> None:
        order.append(source.name)
        files.upload(source, url, last)

    monkeypatch.setattr(remote_checkpoints, "upload", upload)
    remote_checkpoints.push(run, 0)
    assert order == ["metrics.jsonl", "global_step_2"]


def test_a_store_that_fails_costs_a_warning_and_gets_all_the_next_time(
    train: Callable[..., Run],
    store: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = []

    def fails_once(*arguments: object, **options: object) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError("no route to host")
        files.upload(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(remote_checkpoints, "upload", fails_once)
    with caplog.at_level(logging.WARNING):
        train(*TWO, f"trainer.default_hdfs_dir={store}")
    assert "could not be copied there (no route to host); they are still in" in caplog.text
    assert whole_copies(store) == {"global_step_1", "global_step_2"}


def test_a_store_that_cannot_be_reached_and_remote_run_folders_are_refused_before_training(
    train: Callable[..., Run],
) -> None:
    with pytest.raises(ConfigError, match=r"default_hdfs_dir=nosuch://a cannot be reached"):
        train("trainer.default_hdfs_dir=nosuch://a")
    with pytest.raises(ConfigError, match=r"is in a remote store; name a local path.*hdfs_dir"):
        train("trainer.default_local_dir=s3://bucket/run")


def test_sft_and_exports_use_the_store_too(store: str, tmp_path: Path) -> None:
    settings = sft_settings(tmp_path, tiny_model(tmp_path / "model"), "trainer.save_freq=1")
    go = functools.partial(sft_config, settings)
    there = f"trainer.default_hdfs_dir={store}/sft"
    main_sft.run(go(tmp_path / "a", there, "trainer.total_training_steps=1"))
    main_sft.run(go(tmp_path / "b", there, "trainer.total_training_steps=2"))
    assert whole_copies(f"{store}/sft") == {"global_step_1", "global_step_2"}
    assert hone(["export", f"{store}/sft/global_step_2", f"{store}/model"]) in (0, None)
    assert {"config.json", "model.safetensors"} <= set(files.remote_files(f"{store}/model"))
    settings[:] = [s for s in settings if not s.startswith("model.path")]
    main_sft.run(go(tmp_path / "c", f"model.path={store}/model", "trainer.total_training_steps=1"))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A bucket of a real S3 server on this machine."""
    if not MOTO.is_file():
        pytest.skip("no S3 server: `make setup-s3` installs one")
    from pyarrow.fs import S3FileSystem

    port = free_port()
    server = subprocess.Popen([str(MOTO), "-H", "127.0.0.1", "-p", str(port)], stderr=-3, stdout=-3)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        S3FileSystem(
            allow_bucket_creation=True,
            endpoint_override=f"127.0.0.1:{port}",
            scheme="http",
            request_timeout=100,  # its first answer takes seconds, and more on a busy machine
        ).create_dir("runs")
        yield "s3://runs"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def hdfs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """An empty folder of a real HDFS: HONE_HDFS names one, as in hdfs://127.0.0.1:9000."""
    if "HONE_HDFS" not in os.environ:
        pytest.skip("HONE_HDFS names no HDFS")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    url = f"{os.environ['HONE_HDFS']}/hone-{os.getpid()}"
    system, path = files.file_system(url)
    try:
        yield url
    finally:
        system.rm(path, recursive=True)


@pytest.mark.slow
@pytest.mark.parametrize("server", ["s3", "hdfs"])
def test_a_server_serves_data_model_checkpoints_and_export(
    server: str, task: Task, train: Callable[..., Run], request: pytest.FixtureRequest
) -> None:
    root = request.getfixturevalue(server)
    uninterrupted = train(*FOUR, folder="whole")
    files.copy(task.model, f"{root}/model")
    files.copy(task.train, f"{root}/data/{task.train.name}")
    remote = (
        f"data.train_files={root}/data/*{task.train.suffix}",
        f"actor_rollout_ref.model.path={root}/model",
        f"trainer.default_hdfs_dir={root}/grpo",
    )
    train(*TWO, *remote, folder="first")
    assert train(*FOUR, *remote, folder="second").numbers == uninterrupted.numbers
    assert len(whole_copies(f"{root}/grpo")) == 4
    assert hone(["export", f"{root}/grpo/global_step_4", f"{root}/out"]) in (0, None)
    assert "config.json" in files.remote_files(f"{root}/out")
    assert os.path.isfile(Path(files.copy_to_local(f"{root}/out")) / "model.safetensors")
