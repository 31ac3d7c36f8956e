"""Slow, obvious float64 references of every policy loss, one row of valid tokens at a time.

`ROW[name](old, new, frozen, adv, cfg)` gives the loss of each token. `frozen` is a copy of `new` that
stands where the definition stops the gradient, so that finite differences in `new` alone give the
gradient the definition means. They share no code with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

CFG: dict[str, Any] = {
    "clip_ratio": 0.2,
    "clip_ratio_low": 0.15,
    "clip_ratio_high": 0.25,
    "clip_ratio_c": 2.0,
    "tau_pos": 1.0,
    "tau_neg": 1.4,
    "loss_scale_factor": 7.0,
    "policy_loss": {
        "clip_cov_ratio": 0.2,
        "clip_cov_lb": 0.0,
        "clip_cov_ub": 50.0,
        "kl_cov_ratio": 0.2,
        "ppo_kl_coef": 0.3,
        "dro_beta": 0.4,
    },
}
Row = list[float]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo(d: float, a: float, cfg: dict[str, Any]) -> float:
    ratio = math.exp(d)
    return max(-a * ratio, -a * clip(ratio, 1 - cfg["clip_ratio_low"], 1 + cfg["clip_ratio_high"]))


def vanilla(old: Row, new: Row, frozen: Row, adv: Row, cfg: dict[str, Any]) -> Row:
    out = []
    for o, n, a in zip(old, new, adv, strict=True):
        loss = ppo(clip(n - o, -20, 20), a, cfg)
        out.append(min(loss, -a * cfg["clip_ratio_c"]) if a < 0 else loss)
    return out


def gspo(old: Row, new: Row, frozen: Row, adv: Row, cfg: dict[str, Any]) -> Row:
    s = sum(f - o for f, o in zip(frozen, old, strict=True)) / len(old)
    return [ppo(min(n - f + s, 10), a, cfg) for n, f, a in zip(new, frozen, adv, strict=True)]


def geo_mean(old: Row, new: Row, frozen: Row, adv: Row, cfg: dict[str, Any]) -> Row:
    bounded = []
    for o, n, a in zip(old, new, adv, strict=True):
        d = n - o
        if a > 0:
            bounded.append(min(d, cfg["clip_ratio_high"]))
        elif a < 0:
            bounded.append(max(d, -cfg["clip_ratio_low"]))
        else:
            bounded.append(0.0)
    loss = -sum(adv) / len(adv) * math.exp(sum(bounded) / len(bounded))
    return [loss] * len(old)


def sapo(old: Row, new: Row, frozen: Row, adv: Row, cfg: dict[str, Any]) -> Row:
    out = []
    for o, n, a in zip(old, new, adv, strict=True):
        tau = cfg["tau_pos"] if a > 0 else cfg["tau_neg"]
        gate = 1 / (1 + math.exp(-tau * (math.exp(clip(n - o, -20, 20)) - 1)))
        out.append(-gate * 4 / tau * a)
    return out


def cispo(old: Row, new: Row, frozen: Row, adv: Row, cfg: dict[str, Any]) -> Row:
    low, high = 1 - cfg["clip_ratio_low"], 1 + cfg["clip_ratio_high"]
    return [
        -clip(math.exp(f - o), low, high) * a * n
        for o, n, f, a in zip(old, new, frozen, adv, strict=True)
    ]


def gradient(old: Row, new: Row, frozen: Row, adv: Row, cfg: dict[str, Any]) -> Row:
    return [-a * n for n, a in zip(new, adv, strict=True)]


def dro(old: Row, new: Row, frozen: Row, adv: Row, cfg: dict[str, Any]) -> Row:
    beta = cfg["policy_loss"]["dro_beta"]
    return [-(a * n - beta / 2 * (n - o) ** 2) for o, n, a in zip(old, new, adv, strict=True)]


def _dppo(old: Row, new: Row, frozen: Row, adv: Row, cfg: dict[str, Any], kl: bool) -> Row:
    low, high = cfg["clip_ratio_low"], cfg["clip_ratio_high"]
    out = []
    for o, n, f, a in zip(old, new, frozen, adv, strict=True):
        p, q = math.exp(o), math.exp(f)
        if kl:
            moved = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
            keep = moved <= high or q <= p if a > 0 else moved <= low or q >= p
        else:
            keep = q - p <= high if a > 0 else q - p >= -low
        out.append(-a * min(q / p, cfg["clip_ratio_c"]) * n if keep else 0.0)
    return out


def dppo_tv(old: Row, new: Row, frozen: Row, adv: Row, cfg: dict[str, Any]) -> Row:
    return _dppo(old, new, frozen, adv, cfg, kl=False)


def dppo_kl(old: Row, new: Row, frozen: Row, adv: Row, cfg: dict[str, Any]) -> Row:
    return _dppo(old, new, frozen, adv, cfg, kl=True)


ROW: dict[str, Callable[..., Row]] = {
    "vanilla": vanilla,
    "bypass_mode": vanilla,  # without correction options
    "gspo": gspo,
    "luspo": gspo,
    "geo_mean": geo_mean,
    "sapo": sapo,
    "cispo": cispo,
    "gpg": gradient,
    "reinforce": gradient,
    "dro": dro,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}


def clipped(name: str, old: Row, new: Row, adv: Row, cfg: dict[str, Any]) -> tuple[Row, Row]:
    """What `actor/pg_clipfrac` and `actor/pg_clipfrac_lower` count, token by token."""
    low, high, c = cfg["clip_ratio_low"], cfg["clip_ratio_high"], cfg["clip_ratio_c"]
    mean = sum(n - o for n, o in zip(new, old, strict=True)) / len(old)
    first, second = [], []
    for o, n, a in zip(old, new, adv, strict=True):
        d = n - o
        ratio = math.exp(mean if name in ("gspo", "luspo") else d)
        outside = not 1 - low <= ratio <= 1 + high
        if name in ("vanilla", "bypass_mode", "gspo", "luspo"):
            pushed_out = (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low)
            first.append(pushed_out)
            second.append(a < 0 and ratio > c and name in ("vanilla", "bypass_mode"))
        elif name == "geo_mean":
            first.append(a > 0 and not -low <= d <= high)
            second.append(a < 0 and not -low <= d <= high)
        elif name == "cispo":
            first.append(outside)
            second.append(False)
        elif name.startswith("dppo"):
            dropped = ROW[name]([o], [n], [n], [a], cfg)[0] == 0
            first.append(dropped)
            second.append(not dropped and ratio > c)
        else:
            first.append(False)
            second.append(False)
    return [float(x) for x in first], [float(x) for x in second]


FORCED = {
    "luspo": "seq-mean-token-sum",
    "geo_mean": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
}


def whole(
    name: str,
    old: np.ndarray,
    new: np.ndarray,
    frozen: np.ndarray,
    adv: np.ndarray,
    mask: np.ndarray,
    mode: str,
    weights: np.ndarray | None = None,
    cfg: dict[str, Any] = CFG,
) -> float:
    """The loss of a mini-batch, aggregated as `mode` says."""
    rows = []
    for i in range(len(mask)):
        values = np.nonzero(mask[i])[0]
        if len(values):
            loss = ROW[name](*(x[i, values].tolist() for x in (old, new, frozen, adv)), cfg)
            if weights is not None and name != "bypass_mode":
                w = weights[i, values]
                if name == "geo_mean":
                    w = np.full(len(values), math.exp(np.log(w).mean()))
                loss = [x * float(y) for x, y in zip(loss, w, strict=True)]
            rows.append(loss)
    return aggregate(rows, FORCED.get(name, mode), cfg["loss_scale_factor"])


def aggregate(rows: list[Row], mode: str, scale: float) -> float:
    if not rows:
        return 0.0
    tokens = [x for row in rows for x in row]
    match mode:
        case "token-mean":
            return math.fsum(tokens) / len(tokens)
        case "token-sum":
            return math.fsum(tokens)
        case "seq-mean-token-mean":
            return math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows)
        case "seq-mean-token-sum":
            return math.fsum(tokens) / len(rows)
    return math.fsum(tokens) / len(rows) / scale


def slope(f: Callable[[np.ndarray], float], x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Gradient by central differences."""
    out = np.zeros_like(x)
    for place in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[place] += step
        down[place] -= step
        out[place] = (f(up) - f(down)) / (2 * step)
    return out
