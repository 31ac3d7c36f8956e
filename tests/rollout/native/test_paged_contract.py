"""Every clause of the rollout contract, over the paged engine."""

from __future__ import annotations

import pytest

from .. import (  # noqa: F401
    clauses_control,
    clauses_failure,
    clauses_kept,
    clauses_lifecycle,
    clauses_model,
    clauses_sampling,
)
from ..clauses_model import check_greedy, check_log_probs
from ..engine_contract import CLAUSES, Factory, verify
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
