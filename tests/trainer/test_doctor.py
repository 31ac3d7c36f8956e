"""`hone doctor` finds what is there, says what is missing, and notices what is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone import sandbox
from hone.sandbox import Check, SandboxError
from hone.trainer import doctor
from hone.trainer.doctor import State, examine, report, run_training_step


def findings(**kwargs: bool) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in examine(**kwargs)}


def test_versions_devices_and_layers_are_listed() -> None:
    result = findings(self_test=False)
    assert result["torch"].state is State.FINE
    assert result["devices"].detail
    assert {"bubblewrap", "seccomp", "rlimits"} <= set(result)


def test_a_missing_extra_says_what_it_would_enable(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda n: None if n == "wandb" else versions(n))
    result = findings(self_test=False)["wandb"]
    assert result.state is State.MISSING
    assert "would enable the wandb tracker (pip install 'hone-rl[wandb]')" in result.detail


def test_a_missing_requirement_fails_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda n: None if n == "torch" else versions(n))
    lines: list[str] = []
    assert report(lines.append, self_test=False) == 1
    assert any("!! torch" in line for line in lines)
    assert lines[-1] == "1 of these need attention"


def test_the_training_step_trains() -> None:
    message = run_training_step()
    norm = float(message.rpartition(" ")[2])
    assert norm > 0


def test_a_step_that_fails_is_reported_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(doctor, "run_training_step", broken)
    monkeypatch.setattr(sandbox, "self_test", list)
    lines: list[str] = []
    assert report(lines.append) == 1
    assert "self-test:" in lines
    assert any(line.startswith("  !! ") and "RuntimeError: no kernel" in line for line in lines)


def test_a_step_that_works_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "run_training_step", lambda: "0.1 s: fine")
    monkeypatch.setattr(sandbox, "self_test", list)
    result = findings(self_test=True)["one GRPO step of a tiny model"]
    assert (result.section, result.state, result.detail) == ("self-test", State.FINE, "0.1 s: fine")
    assert "one GRPO step of a tiny model" not in findings(self_test=False)


def test_attacks_that_got_through_are_named_and_fail_the_examination(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = [
        Check("read a file", True, "refused"),
        Check("open a socket", False, "connected to 1.2.3.4"),
    ]
    monkeypatch.setattr(doctor, "run_training_step", lambda: "fine")
    monkeypatch.setattr(sandbox, "self_test", lambda: checks)
    printed: list[str] = []
    assert report(printed.append) == 1
    lines = [" ".join(line.split()) for line in printed]
    assert "!! open a socket connected to 1.2.3.4" in lines
    assert "!! self-test 1 of 2 attacks contained" in lines
    assert not any("read a file" in line for line in lines)


def test_a_sandbox_that_cannot_run_is_missing_and_not_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent() -> list[Check]:
        raise SandboxError("no bubblewrap")

    monkeypatch.setattr(doctor, "run_training_step", lambda: "fine")
    monkeypatch.setattr(sandbox, "self_test", absent)
    result = findings(self_test=True)["self-test"]
    assert result.state is State.MISSING
    assert result.detail == "code rewards cannot run: no bubblewrap"


def test_a_chat_template_is_compared_with_what_a_loop_appends(tmp_path: Path) -> None:
    from agents.chat_templates import FAMILIES, characters

    from hone.models.tiny import save_pretrained, tiny_lm

    tokenizer = characters(FAMILIES["qwen3"])
    save_pretrained(tiny_lm(len(tokenizer), hidden=32, mlp=48), tokenizer, tmp_path)
    lines: list[str] = []
    assert report(lines.append, doctor.chat_template_findings(str(tmp_path))) == 0
    ok = [line.split()[0] for line in lines if " answers " in line]
    assert ok == ["ok", "ok", "ok", "--"]
    assert "the loop has '<think>" in lines[4]
