"""Each mutant breaks the native engine in one way, and the contract tests name the broken clause."""

from __future__ import annotations

import pytest

from . import (
    clauses_control,
    clauses_failure,
    clauses_kept,
    clauses_lifecycle,
    clauses_model,
    clauses_sampling,
    engine_contract,
)
from .engine_contract import CLAUSES, Violation, verify, violations
from .factories import NativeFactory
from .mutants import MUTANTS, Mutant

pytestmark = pytest.mark.slow

_ = (
    clauses_control,
    clauses_failure,
    clauses_kept,
    clauses_lifecycle,
    clauses_model,
    clauses_sampling,
)


HANG = ("AbortHoldsNewRequests", "ResumeDropsWhatWasHeld", "StreamsNothing")
"""These mutants never answer a request, or never stream, so their clauses end at the deadline."""


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """On a busy machine, this mutant may take long to answer."""
    if "PauseDoesNotHoldNewRequests" in request.node.name:
        monkeypatch.setattr(engine_contract, "HOLD_S", 60.0)


@pytest.mark.parametrize(("mutant", "name"), MUTANTS, ids=[m.name for m, _ in MUTANTS])
def test_the_contract_names_the_clause_a_mutant_breaks(
    mutant: Mutant, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "waiter" in name or "waiting" in name or mutant.name in HANG:
        monkeypatch.setattr(engine_contract, "DEADLINE_S", 2.0)
    with pytest.raises(Violation, match=f"^{name}: "):
        verify(name, mutant)


def test_mutants_cover_at_least_a_dozen_clauses() -> None:
    assert len({name for _, name in MUTANTS}) >= 20
    assert {name for _, name in MUTANTS} <= set(CLAUSES)


@pytest.mark.slow
def test_an_unbroken_engine_violates_nothing() -> None:
    assert violations(NativeFactory()) == []


@pytest.mark.slow
def test_the_whole_contract_lists_the_clause_that_an_engine_breaks() -> None:
    mutant, name = MUTANTS[0]
    assert name in violations(mutant)
