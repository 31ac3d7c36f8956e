"""Sampling: the tokens that each parameter allows, their frequencies, and what a sampled token depends on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import torch

from hone.rollout.contract import Sampling

from .engine_contract import Factory, ask, ask_all, clause
from .models import next_probabilities, policy, prompts


def allowed(p: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Returns a mask [V] of the tokens that a request may sample, by a slow and obvious method."""
    order = sorted(range(len(p)), key=lambda i: -float(p[i]))
    keep, before = torch.zeros(len(p), dtype=torch.bool), 0.0
    best = order if sampling.top_k < 0 else order[: sampling.top_k]
    total_p = sum(float(p[token]) for token in best)
    for rank, token in enumerate(order):
        inside_k = rank < len(best)
        inside_p = before / total_p < sampling.top_p - 1e-9
        inside_m = float(p[token]) >= sampling.min_p * float(p[order[0]])
        keep[token] = rank == 0 or (inside_k and inside_p and inside_m)
        before += float(p[token])
    return keep


def chi_square_excess(counts: Counter[int], expected: torch.Tensor, draws: int) -> float:
    """Returns by how many standard deviations the statistic exceeds its mean; rare tokens are pooled."""
    cells, rest_seen, rest_expected = [], 0.0, 0.0
    for token, share in enumerate(expected.tolist()):
        if share * draws >= 5:
            cells.append((counts[token], share * draws))
        else:
            rest_seen += counts[token]
            rest_expected += share * draws
    if rest_expected >= 1:
        cells.append((rest_seen, rest_expected))
    statistic = sum((seen - want) ** 2 / want for seen, want in cells)
    freedom = max(len(cells) - 1, 1)
    return (statistic - freedom) / (2 * freedom) ** 0.5


def check_distribution(factory: Factory, **cut: float) -> None:
    """Checks that only allowed tokens are sampled, and with the frequencies of the model."""
    model, prompt = policy(), prompts(1, 9, 9, seed=4)[0]
    first = Sampling(max_tokens=1, seed=0, **{"temperature": 1.0, **cut})  # type: ignore[arg-type]
    n = factory.draws
    with factory.engine(model) as engine:
        outputs = ask_all(engine, [prompt] * n, [replace(first, seed=i) for i in range(n)])
    counts = Counter(out.token_ids[0] for out in outputs)
    p = next_probabilities(model, prompt, first.temperature)
    keep = allowed(p, first)
    outside = [token for token in counts if not keep[token]]
    assert not outside, f"drew {outside}, outside the allowed {keep.nonzero().flatten().tolist()}"
    excess = chi_square_excess(counts, p * keep / (p * keep).sum(), n)
    assert excess < 4, f"frequencies are {excess:.1f} standard deviations off"


@clause("model", "honors_seeds")
def temperature_shapes_the_frequencies(factory: Factory) -> None:
    check_distribution(factory, temperature=0.5)
    check_distribution(factory, temperature=1.7)


@clause("model", "honors_seeds")
def top_k_keeps_the_k_likeliest(factory: Factory) -> None:
    check_distribution(factory, top_k=3)


@clause("model", "honors_seeds")
def top_p_keeps_the_smallest_set_that_reaches_p(factory: Factory) -> None:
    check_distribution(factory, top_p=0.6)


@clause("model", "honors_seeds")
def top_p_is_a_share_of_what_top_k_left(factory: Factory) -> None:
    check_distribution(
        factory, top_k=3, top_p=0.7
    )  # allows two tokens; without top-k, top_p=0.7 allows more


@clause("model", "honors_seeds")
def min_p_keeps_what_is_likely_beside_the_likeliest(factory: Factory) -> None:
    check_distribution(factory, min_p=0.3)


@clause("honors_seeds")
def different_seeds_differ_and_the_same_seed_repeats(factory: Factory) -> None:
    prompt = prompts(1, 8, 8)[0]
    seeds = [*range(10), *range(10)]
    with factory.engine(policy()) as engine:
        outputs = ask_all(engine, [prompt] * 20, [Sampling(12, 1.0, seed=s) for s in seeds])
    texts = [tuple(out.token_ids) for out in outputs]
    assert texts[:10] == texts[10:]
    assert len(set(texts)) > 5


@clause("honors_seeds", "samples_by_position")
def a_draw_depends_on_the_absolute_position(factory: Factory) -> None:
    """A response that becomes part of the prompt continues with the same random numbers."""
    prompt, sampling = prompts(1, 11, 11)[0], Sampling(14, 1.0, seed=3, ignore_eos=True)
    with factory.engine(policy()) as engine:
        tokens = ask(engine, prompt, sampling).token_ids
        continuation = ask(engine, prompt + tokens[:5], replace(sampling, max_tokens=9)).token_ids
    assert continuation == tokens[5:]


@clause("batch_invariant")
def the_same_request_gets_the_same_tokens_in_any_batch(factory: Factory) -> None:
    """A request runs alone, and in batches of 64 mixed lengths, in any order, with few or many slots."""
    rows = prompts(64, 1, 40, seed=5)
    chooser = Random(0)
    sampling = [
        Sampling(chooser.randint(1, 16), chooser.choice((0.0, 0.8, 1.0)), seed=i, top_k=20)
        for i in range(64)
    ]
    order = list(range(64))
    chooser.shuffle(order)
    with factory.engine(policy()) as engine:
        together = ask_all(engine, rows, sampling)
        shuffled = ask_all(engine, [rows[i] for i in order], [sampling[i] for i in order])
        alone = {i: ask(engine, rows[i], sampling[i]) for i in range(0, 64, 5)}
    with factory.engine(policy(), max_num_seqs=5) as engine:
        few = ask_all(engine, rows, sampling)
    for place, i in enumerate(order):
        want = together[i].token_ids
        assert shuffled[place].token_ids == want, f"request {i} in another order"
        assert few[i].token_ids == want, f"request {i} with 5 slots"
        assert i not in alone or alone[i].token_ids == want, f"request {i} alone"
