"""A checkpoint of others runs nothing: neither its table nor its values name code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hone.engine.optimizer import Optimizer
from hone.engine.saved_state import TABLE, ForeignState, load_state, read_table
from tests.engine.engines import ADAM, engine, policy


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


def test_the_commands_do_run_when_they_are_unpickled(marker: Path) -> None:
    pickle.loads(pickle.dumps(Command(marker)))
    assert marker.exists()


def test_a_checkpoint_of_torch_is_read_whole(saved: Path) -> None:
    state = {"model": {"w": torch.zeros(3)}, "n": 0}
    load_state(state, saved)
    assert state["n"] == 5
    assert torch.equal(state["model"]["w"], torch.ones(3))  # type: ignore[index]
    assert set(read_table(saved).state_dict_metadata) == {"model.w", "n"}


def hostile_tables(saved: Path, marker: Path) -> dict[str, bytes]:
    table = read_table(saved)
    inside = pickle.loads((saved / TABLE).read_bytes())
    inside.planner_data = Command(marker)
    outside = read_table(saved)
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
        "other content": pickle.dumps(table.storage_meta),
        "file outside": pickle.dumps(outside),
        "torn": (saved / TABLE).read_bytes()[:40],
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
def test_a_table_that_is_no_table_is_refused_and_runs_nothing(
    saved: Path, marker: Path, kind: str
) -> None:
    (saved / TABLE).write_bytes(hostile_tables(saved, marker)[kind])
    with pytest.raises(ForeignState, match=r"not written by hone .*nothing of it was run"):
        read_table(saved)
    with pytest.raises(ForeignState):
        load_state({"model": {"w": torch.zeros(3)}, "n": 0}, saved)
    assert not marker.exists()


def test_a_value_that_is_a_command_is_refused_and_runs_nothing(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(policy(), ADAM)
    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "state_dict", lambda self: {"updates": Command(marker)})
        made.save(tmp_path / "state", ("model", "extra"))
    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "state_dict", lambda self: {"updates": 0})
        with pytest.raises(ForeignState, match="nothing of it was run"):
            engine(policy(), ADAM).load(tmp_path / "state")
    assert not marker.exists()
