"""Every clause of the rollout contract, over every engine it applies to."""

from __future__ import annotations

import pytest

from . import (  # noqa: F401
    clauses_control,
    clauses_failure,
    clauses_kept,
    clauses_lifecycle,
    clauses_model,
    clauses_sampling,
)
from .clauses_model import check_greedy, check_log_probs
from .engine_contract import CLAUSES, Factory, verify
from .factories import (
    HFFactory,
    ModuleNativeFactory,
    NativeFactory,
    PlainNativeFactory,
    ScriptedFactory,
    SGLangFactory,
)
from .models import policy

ENGINES = [
    PlainNativeFactory(),
    ModuleNativeFactory(),
    HFFactory(),
    ScriptedFactory(),
    SGLangFactory(),
]
CASES = [(c, f) for f in ENGINES for c in CLAUSES.values() if c.applies(f)]


@pytest.mark.parametrize(
    ("name", "factory"),
    [
        pytest.param(c.name, f, id=f"{f.name}-{c.name}", marks=[pytest.mark.slow] * f.is_slow)
        for c, f in CASES
    ],
)
def test_contract(name: str, factory: Factory) -> None:
    verify(name, factory)


def test_the_fake_is_held_to_every_clause_that_needs_no_model() -> None:
    assert sum(c.applies(ENGINES[3]) for c in CLAUSES.values()) >= 12


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma", "olmo2"])
def test_other_families_say_what_transformers_says(family: str) -> None:
    """Some models use the fast forward, the others their modules; mistral has a sliding window."""
    plain = family in ("llama", "qwen3", "mistral")
    factory = PlainNativeFactory() if plain else NativeFactory()
    check_log_probs(factory, policy(family))
    check_greedy(factory, policy(family))
