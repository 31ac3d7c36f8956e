"""`hone doctor` finds what is there, says what is missing, and notices what is broken."""

from __future__ import annotations

import pytest

from hone.trainer import doctor
from hone.trainer.doctor import State, examine, report, training_step


def findings(**kwargs: bool) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in examine(**kwargs)}


def test_versions_devices_and_layers_are_listed() -> None:
    found = findings(self_test=False)
    assert found["torch"].state is State.FINE
    assert found["devices"].detail
    assert {"bubblewrap", "seccomp", "rlimits"} <= set(found)


def test_a_missing_extra_says_what_it_would_enable(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda n: None if n == "wandb" else versions(n))
    found = findings(self_test=False)["wandb"]
    assert found.state is State.MISSING
    assert "would enable the wandb tracker (pip install 'hone-rl[wandb]')" in found.detail


def test_a_missing_requirement_fails_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda n: None if n == "torch" else versions(n))
    said: list[str] = []
    assert report(said.append, self_test=False) == 1
    assert any("!! torch" in line for line in said)
    assert said[-1] == "1 of these need attention"


def test_the_training_step_trains() -> None:
    said = training_step()
    norm = float(said.rpartition(" ")[2])
    assert norm > 0


def test_a_step_that_fails_is_reported_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(doctor, "training_step", broken)
    found = doctor._tried("self-test", "step", broken)
    assert (found.state, found.detail) == (State.BROKEN, "RuntimeError: no kernel")
