"""Every clause of the rollout contract, over the paged engine."""

from __future__ import annotations

from typing import Any

import pytest

from hone.rollout.native.paged_core import PagedCore

from .. import (  # noqa: F401
    clauses_control,
    clauses_failure,
    clauses_kept,
    clauses_lifecycle,
    clauses_model,
    clauses_sampling,
)
from ..clauses_model import check_greedy, check_log_probs
from ..engine_contract import CLAUSES, Factory, Violation, verify
from ..models import policy
from .paged import PagedFactory, PagedModulesFactory

ENGINES = [PagedFactory(), PagedModulesFactory()]
CASES = [
    pytest.param(c.name, f, id=f"{f.name}-{c.name}", marks=[pytest.mark.slow] * f.is_slow)
    for f in ENGINES
    for c in CLAUSES.values()
    if c.applies(f)
]


@pytest.mark.parametrize(("name", "factory"), CASES)
def test_contract(name: str, factory: Factory) -> None:
    verify(name, factory)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma"])
def test_other_families_say_what_transformers_says(family: str) -> None:
    """Mistral with a window; gemma through its modules."""
    factory = PagedModulesFactory() if family == "gemma" else PagedFactory()
    check_log_probs(factory, policy(family))
    check_greedy(factory, policy(family))


class MovedParametersAreNotRead(PagedCore):
    """The core reads moved parameters only while no sequence runs."""

    def invalidate(self) -> None:
        super().invalidate()
        self._must_refresh = False


class ParkKeepsKeys(PagedCore):
    def park(self) -> None: ...


class ClearsNoPrefixes(PagedCore):
    def invalidate(self) -> None:
        self._must_refresh = True


MOVED = "kept requests go on after the parameters have moved"
COMMITTED = "after a commit kept requests attend only to keys of the new weights"
SLEPT = "sleep keeps the tokens of kept requests and not their keys"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        (MovedParametersAreNotRead, MOVED),
        (ParkKeepsKeys, COMMITTED),
        (ParkKeepsKeys, SLEPT),
        (ClearsNoPrefixes, COMMITTED),
    ],
)
def test_the_contract_names_the_clause_a_mutant_breaks(mutant: Any, name: str) -> None:
    class Broken(PagedFactory):
        paged_core_class = mutant

    with pytest.raises(Violation, match=f"^{name}: "):
        verify(name, Broken())
