"""A checkpoint cannot run code: neither through its metadata nor through its values."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hone.engine.optimizer import Optimizer
from hone.engine.saved_state import METADATA_FILE, UnsafeCheckpoint, load_state, read_metadata
from tests.engine.engines import ADAM, make_engine, policy


class Command:
    """Unpickling it runs a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "ran"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    dcp.save({"model": {"w": torch.ones(3)}, "n": 5}, checkpoint_id=str(folder))
    return folder


def test_unpickling_the_command_would_run_it(marker: Path) -> None:
    pickle.loads(pickle.dumps(Command(marker)))
    assert marker.exists()


def test_a_checkpoint_of_torch_is_read(saved: Path) -> None:
    state = {"model": {"w": torch.zeros(3)}, "n": 0}
    load_state(state, saved)
    assert state["n"] == 5
    assert torch.equal(state["model"]["w"], torch.ones(3))  # type: ignore[index]
    assert set(read_metadata(saved).state_dict_metadata) == {"model.w", "n"}


def hostile_metadata(saved: Path, marker: Path) -> dict[str, bytes]:
    metadata = read_metadata(saved)
    inside = pickle.loads((saved / METADATA_FILE).read_bytes())
    inside.planner_data = Command(marker)
    outside = read_metadata(saved)
    for place in outside.storage_data.values():
        place.relative_path = "../../../../etc/hostname"
    named = b"\x80\x04\x8c\x05torch\x8c\x10nn.modules.Module\x93."
    return {
        "command": pickle.dumps(Command(marker)),
        "command inside": pickle.dumps(inside),
        "old protocol": b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.",
        "builtins": b"cbuiltins\neval\n(S'1'\ntR.",
        "torch's own function": b"ctorch\nload\n(S'x'\ntR.",
        "dotted name": named,
        "persistent": b"Pid\n.",
        "list": pickle.dumps([1]),
        "other content": pickle.dumps(metadata.storage_meta),
        "file outside": pickle.dumps(outside),
        "torn": (saved / METADATA_FILE).read_bytes()[:40],
        "text": b"no pickle",
        "empty": b"",
    }


KINDS = (
    "command",
    "command inside",
    "old protocol",
    "builtins",
    "torch's own function",
    "dotted name",
    "persistent",
    "list",
    "other content",
    "file outside",
    "torn",
    "text",
    "empty",
)


@pytest.mark.parametrize("kind", KINDS)
def test_malformed_metadata_is_refused_and_runs_nothing(
    saved: Path, marker: Path, kind: str
) -> None:
    (saved / METADATA_FILE).write_bytes(hostile_metadata(saved, marker)[kind])
    with pytest.raises(UnsafeCheckpoint, match=r"not written by hone .*nothing of it was run"):
        read_metadata(saved)
    with pytest.raises(UnsafeCheckpoint):
        load_state({"model": {"w": torch.zeros(3)}, "n": 0}, saved)
    assert not marker.exists()


def test_a_value_that_is_a_command_is_refused_and_runs_nothing(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(policy(), ADAM)
    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "state_dict", lambda self: {"updates": Command(marker)})
        engine.save(tmp_path / "state", ("model", "extra"))
    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "state_dict", lambda self: {"updates": 0})
        with pytest.raises(UnsafeCheckpoint, match="nothing of it was run"):
            make_engine(policy(), ADAM).load(tmp_path / "state")
    assert not marker.exists()
