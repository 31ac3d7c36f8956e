"""Slow, obvious float64 references of every estimator: Python loops over rows and tokens.

They share no code with the package. `REFERENCES[name](b)` takes a `Batch` and returns
(advantages, returns) as nested lists in a [B, T] array.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Batch:
    """One batch in plain numpy; what lies outside the mask is NaN."""

    rewards: np.ndarray  # [B, T]
    mask: np.ndarray  # [B, T] bool
    index: np.ndarray  # [B] labels
    columns: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def score(self, i: int) -> float:
        return sum(float(r) for r, m in zip(self.rewards[i], self.mask[i], strict=True) if m)

    def scores(self) -> list[float]:
        return [self.score(i) for i in range(len(self.rewards))]

    def group(self, i: int) -> list[int]:
        return [j for j, label in enumerate(self.index) if label == self.index[i]]

    def tile(self, per_row: list[float]) -> np.ndarray:
        out = np.zeros(self.mask.shape)
        for i, t in zip(*np.nonzero(self.mask), strict=True):
            out[i, t] = per_row[i]
        return out


def mean(xs: list[float]) -> float:
    return math.fsum(xs) / len(xs)


def std(xs: list[float]) -> float:
    """Unbiased."""
    centre = mean(xs)
    return math.sqrt(math.fsum((x - centre) ** 2 for x in xs) / (len(xs) - 1))


def whiten(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    values = [float(v) for v in x[mask]]
    if not values:
        return np.zeros(x.shape)
    centre = mean(values)
    variance = std(values) ** 2 if len(values) > 1 else 0.0
    return np.where(mask, (x - centre) / math.sqrt(variance + 1e-8), 0.0)


def both(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x, x


def to_go(b: Batch, gamma: float) -> np.ndarray:
    out = np.zeros(b.mask.shape)
    for i in range(len(out)):
        ahead = 0.0
        for t in reversed(range(out.shape[1])):
            if b.mask[i, t]:
                ahead = float(b.rewards[i, t]) + gamma * ahead
                out[i, t] = ahead
    return out


def gae(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    gamma, lam, values = b.config["gamma"], b.config["lam"], b.columns["values"]
    adv = np.zeros(b.mask.shape)
    ret = np.zeros(b.mask.shape)
    for i in range(len(adv)):
        own = [t for t in range(adv.shape[1]) if b.mask[i, t]]
        for place, t in enumerate(own):
            total, discount = 0.0, 1.0
            for k in range(place, len(own)):  # the definition: a discounted sum of TD errors
                after = float(values[i, own[k + 1]]) if k + 1 < len(own) else 0.0
                delta = float(b.rewards[i, own[k]]) + gamma * after - float(values[i, own[k]])
                total += discount * delta
                discount *= gamma * lam
            adv[i, t] = total
            ret[i, t] = total + float(values[i, t])
    return whiten(adv, b.mask), ret


def group_relative(b: Batch, scores: list[float], by_std: bool) -> list[float]:
    out = []
    for i, score in enumerate(scores):
        members = [scores[j] for j in b.group(i)]
        if len(members) == 1:
            out.append(score / (1 + 1e-6) if by_std else score)
        else:
            centred = score - mean(members)
            out.append(centred / (std(members) + 1e-6) if by_std else centred)
    return out


def grpo(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    return both(b.tile(group_relative(b, b.scores(), b.config["norm_adv_by_std_in_grpo"])))


def dr_grpo(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    return both(b.tile(group_relative(b, b.scores(), False)))


def grpo_passk(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    scores, out = b.scores(), [0.0] * len(b.rewards)
    for i in range(len(out)):
        rows = b.group(i)
        if len(rows) < 2:
            continue
        ranked = sorted(rows, key=lambda j: (-scores[j], j))
        if ranked[0] == i:
            margin = scores[ranked[0]] - scores[ranked[1]]
            if b.config["norm_adv_by_std_in_grpo"]:
                margin /= std([scores[j] for j in rows]) + 1e-6
            out[i] = margin
    return both(b.tile(out))


def rloo(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    scores, out = b.scores(), []
    for i, score in enumerate(scores):
        others = [scores[j] for j in b.group(i) if j != i]
        out.append(score - mean(others) if others else score)
    return both(b.tile(out))


def rloo_token(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    returns = to_go(b, b.config["gamma"])
    out = []
    for i in range(len(returns)):
        others = [j for j in b.group(i) if j != i]
        tokens = [float(returns[j, t]) for j in others for t in np.nonzero(b.mask[j])[0]]
        out.append(mean(tokens) if tokens else 0.0)
    return np.where(b.mask, returns - b.tile(out), 0.0), returns


def prime_rloo(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    """verl's two leave-one-out parts: the score on the last token, implicit rewards on every token."""
    implicit, scores = b.columns["reward/implicit"], b.columns["token_level_scores"]
    rewards = np.zeros(b.mask.shape)
    for i in range(len(rewards)):
        group, own = b.group(i), np.nonzero(b.mask[i])[0]
        n = len(group)
        totals = [math.fsum(float(x) for x in scores[j][b.mask[j]]) for j in group]
        means = [mean([float(x) for x in implicit[j][b.mask[j]]] or [0.0]) for j in group]
        score = math.fsum(float(x) for x in scores[i][b.mask[i]])
        for t in own:
            r = float(implicit[i, t])
            part = (r * n - math.fsum(means)) / (n - 1) if n > 1 else r
            kl = float(b.rewards[i, t] - scores[i, t])
            rewards[i, t] = b.config["reward_dpo_coef"] * part + kl
        if len(own):
            whole = (score * n - math.fsum(totals)) / (n - 1) if n > 1 else score
            rewards[i, own[-1]] += b.config["reward_gt_coef"] * whole
    returns = to_go(Batch(rewards, b.mask, b.index), 1.0)
    return whiten(returns, b.mask), returns


def opo(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    scores, out = b.scores(), []
    for i, score in enumerate(scores):
        rows = b.group(i)
        weight = math.fsum(float(b.mask[j].sum()) for j in rows)
        if len(rows) == 1 or weight == 0:
            out.append(score)
        else:
            out.append(score - math.fsum(b.mask[j].sum() * scores[j] for j in rows) / weight)
    return both(b.tile(out))


def reinforce_plus_plus(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    returns = to_go(b, b.config["gamma"])
    return whiten(returns, b.mask), returns


def reinforce_plus_plus_baseline(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    return both(whiten(b.tile(group_relative(b, b.scores(), False)), b.mask))


def remax(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    returns = to_go(b, 1.0)
    baseline = b.tile([float(x) for x in b.columns["reward_baselines"]])
    return returns - baseline, returns


def gpg(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    scores = b.scores()
    alpha = len(scores) / max(sum(s != 0 for s in scores), 1)
    return both(b.tile([alpha * x for x in group_relative(b, scores, False)]))


def maxrl(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    scores, out = b.scores(), []
    for i, score in enumerate(scores):
        centre = mean([scores[j] for j in b.group(i)])
        out.append((score - centre) / (centre + 1e-6))
    return both(b.tile(out))


def lite_ppo(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    scores = b.scores()
    spread = std(scores) if len(scores) > 1 else 0.0
    out = [
        (s - mean([scores[j] for j in b.group(i)])) / (spread + 1e-6) for i, s in enumerate(scores)
    ]
    return both(b.tile(out))


def gdpo(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    total = np.zeros(b.mask.shape)
    weights = b.config["gdpo_reward_weights"] or [1.0] * len(b.config["gdpo_reward_keys"])
    for key, weight in zip(b.config["gdpo_reward_keys"], weights, strict=True):
        part = Batch(b.columns[f"reward/{key}"], b.mask, b.index)
        total += weight * part.tile(group_relative(part, part.scores(), True))
    return both(whiten(total, b.mask))


def _otb(b: Batch, compact: bool) -> tuple[np.ndarray, np.ndarray]:
    returns = to_go(b, 1.0)
    pi, squares = np.exp(b.columns["old_log_probs"]), b.columns["sum_pi_squared"]
    weights = b.columns.get("rollout_is_weights")
    position: dict[tuple[int, int], int] = {}
    energy: dict[tuple[int, int], float] = {}
    for i in range(len(returns)):
        total = 0.0
        for nth, t in enumerate(np.nonzero(b.mask[i])[0]):
            rho = 1.0 if weights is None else float(weights[i, t])
            total += (1 - 2 * float(pi[i, t]) + float(squares[i, t])) * rho**2
            position[i, t] = nth if compact else int(t)
            energy[i, t] = total
    adv = np.zeros(returns.shape)
    for (i, t), place in position.items():
        peers = [key for key, p in position.items() if p == place and key[0] in b.group(i)]
        if len(peers) > 1:
            top = math.fsum(float(returns[key]) * energy[key] for key in peers)
            adv[i, t] = returns[i, t] - top / (math.fsum(energy[key] for key in peers) + 1e-8)
        else:
            adv[i, t] = returns[i, t]
    return adv, returns


def optimal_token_baseline(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    return _otb(b, compact=False)


def tir_optimal_token_baseline(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    return _otb(b, compact=True)


def pure_reference(
    rewards: Any,
    scores: Any,
    process: Any,
    steps: Any,
    mask: Any,
    uid: Any,
    trajectory: Any,
    credit: Any,
    baseline: str,
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """PURE's advantages and returns by (row, token), one trajectory after the other; arrays or tensors."""
    rows: dict[Any, list[int]] = {}
    for row, key in enumerate(zip(uid, trajectory, strict=True)):
        rows.setdefault(key, []).append(row)
    flat: dict[Any, list[Any]] = {}
    for key, members in rows.items():
        places = [(r, t) for r in members for t in range(mask.shape[1]) if mask[r, t]]
        flat[key] = [
            (float(rewards[p]), float(process[p]) if steps[p] else None, float(scores[p]), p)
            for p in places
        ]
    returns: dict[tuple[int, int], float] = {}
    step_tokens: dict[tuple[int, int], int] = {}
    for tokens in flat.values():
        inside = 0
        for place, (_, step, _, p) in enumerate(tokens):
            ahead = tokens[place:]
            sums = sum(
                r - (s or 0.0 if credit == "strict min-form" else 0.0) for r, s, _, _ in ahead
            )
            lowest = min((s for _, s, _, _ in ahead if s is not None), default=0.0)
            returns[p] = sums + (lowest if credit == "strict min-form" else 0.0)
            inside = inside + 1 if step is None else inside
            if step is not None:
                step_tokens[p], inside = inside, 0
    advantages: dict[tuple[int, int], float] = {}
    for key, tokens in flat.items():
        others = [flat[k] for k in flat if k[0] == key[0] and k != key]
        lengths = sum(map(len, others)) or 1
        if baseline == "return":
            b = sum(returns[p] for o in others for *_, p in o) / lengths
            advantages |= {p: returns[p] - b for *_, p in tokens}
            continue
        outcomes = [sum(s or 0.0 for _, s, _, _ in o) for o in others]
        counts = [max(sum(s is not None for _, s, _, _ in o), 1) for o in others]
        per_token = sum(outcomes) / lengths
        per_step = sum(o / c for o, c in zip(outcomes, counts, strict=True)) / (len(others) or 1)
        rest = sum(s - (r or 0.0) for o in others for _, r, s, _ in o) / (len(others) or 1)
        for place, (*_, p) in enumerate(tokens):
            off = sum(
                per_token * step_tokens[q] if baseline == "token" else per_step
                for _, s, _, q in tokens[place:]
                if s is not None
            )
            advantages[p] = sum(r for r, *_ in tokens[place:]) - off - rest
    return advantages, returns


REFERENCES = {
    "gae": gae,
    "grpo": grpo,
    "grpo_vectorized": grpo,
    "dr_grpo": dr_grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "rloo_vectorized": rloo,
    "rloo_token": rloo_token,
    "prime_rloo": prime_rloo,
    "opo": opo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "gpg": gpg,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
    "gdpo": gdpo,
    "maxrl": maxrl,
    "lite_ppo": lite_ppo,
}
