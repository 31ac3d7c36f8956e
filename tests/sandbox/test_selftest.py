"""The self-test passes in a working sandbox and fails in one without isolation."""

from __future__ import annotations

import pytest

from hone.sandbox import SandboxResult, Status, self_test, selftest


def test_every_check_passes_on_a_machine_with_bubblewrap(bwrap: None) -> None:
    checks = self_test()
    assert len(checks) == 8
    assert [check for check in checks if not check.passed] == []


def test_a_box_without_isolation_fails_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_isolation(code: str, **_: object) -> SandboxResult:
        stdout = "planted" if "open(" in code else "HONE_SECRET" if "environ" in code else "9999"
        return SandboxResult(Status.OK, 0, stdout, "", 0.1)

    monkeypatch.setattr(selftest, "run_python", no_isolation)
    assert not any(check.passed for check in self_test())
