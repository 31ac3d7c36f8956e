"""What a step reports, by verl's names; a reduction is said, never guessed from a name."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from hone.algorithms.correction_metrics import gap_metrics
from hone.ops.masked import masked_mean
from hone.protocol import DataProto
from hone.types import JsonValue

log = logging.getLogger(__name__)

_LARGEST = sys.float_info.max


class SkippedUpdates:
    """Says when an update was skipped because its gradient was not finite, and what to do."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def check(self, metrics: Mapping[str, float], step: int) -> None:
        for name in ("actor/skipped_updates", "critic/skipped_updates"):
            if metrics.get(name, 0.0) > self._seen.get(name, 0.0):
                self._seen[name] = metrics[name]
                log.warning(
                    "step %d: a gradient was not finite, so the update was skipped (%s=%d); lower "
                    "optim.lr or grad_clip, and look for NaN in the rewards, if it goes on",
                    step,
                    name,
                    metrics[name],
                )


def mean_over_ranks(metrics: Mapping[str, float | list[float]]) -> dict[str, float]:
    """Worker metrics as one number each; ranks report the same global value or their own part."""
    return {
        name: float(sum(value) / len(value)) if isinstance(value, list) else float(value)
        for name, value in metrics.items()
    }


def spread(name: str, values: Tensor) -> dict[str, float]:
    """mean, max, min; nothing where there are no values."""
    if values.numel() == 0:
        return {}
    values = values.float()
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def data_metrics(batch: DataProto, *, prompt_limit: int, response_limit: int) -> dict[str, float]:
    """Scores, rewards, advantages, lengths, turns of one batch."""
    columns = batch.batch
    mask = columns["response_mask"].bool()
    attention = columns["attention_mask"]
    prompt_width = attention.shape[1] - columns["responses"].shape[1]
    prompt_length = attention[:, :prompt_width].sum(1)
    response_length = attention[:, prompt_width:].sum(1)
    scores = columns["token_level_scores"].sum(-1)
    metrics = {
        **spread("critic/score", scores),
        **spread("critic/rewards", columns["token_level_rewards"].sum(-1)),
        **spread("critic/advantages", columns["advantages"][mask]),
        **spread("critic/returns", columns["returns"][mask]),
        **spread("response_length", response_length),
        **spread("prompt_length", prompt_length),
        "response_length/clip_ratio": _share(response_length >= response_limit),
        "prompt_length/clip_ratio": _share(prompt_length >= prompt_limit),
        "reward/mean": scores.mean().item(),
    }
    if "values" in columns.keys():  # noqa: SIM118
        values, returns = columns["values"][mask], columns["returns"][mask]
        metrics |= spread("critic/values", values)
        if len(values) > 1:  # one value has no variance
            error = torch.var(returns - values) / (torch.var(returns) + 1e-5)
            metrics["critic/vf_explained_var"] = 1.0 - error.item()
    if "step_mask" in columns.keys():  # noqa: SIM118
        metrics |= spread("num_of_steps", columns["step_mask"].sum(-1))
    facts = batch.non_tensor_batch
    # A data set may have a column `acc` of its own: only what a scorer or a loop said is a measure.
    measured = {
        n for key in ("reward_extra_names", "loop_facts") for n in batch.meta_info.get(key, ())
    }
    if "acc" in measured and are_numbers(facts.get("acc", ())):
        known = [float(a) for a in facts["acc"] if a is not None]
        metrics["accuracy"] = sum(known) / len(known)
    for name in ("num_turns", "tool_call_counts", "tool_failures"):
        counts = torch.tensor([float(n) for n in facts.get(name, ()) if n is not None])
        metrics |= spread(name, counts)
    for name in environment_counts(batch):
        statistics = spread(name, torch.tensor([float(n) for n in facts[name] if n is not None]))
        actions = name == "env/number_of_actions"
        metrics |= statistics if actions else {name: statistics[f"{name}/mean"]}
    return metrics


def environment_counts(batch: DataProto) -> list[str]:
    """The columns of numbers that loops wrote under `env/`."""
    names = [n for n in batch.meta_info.get("loop_facts", ()) if n.startswith("env/")]
    return [name for name in names if are_numbers(batch.non_tensor_batch[name])]


def are_numbers(values: Iterable[JsonValue]) -> bool:
    """Whether all values that are there are numbers a float can hold, and there is one."""
    known = [v for v in values if v is not None]
    return bool(known) and all(
        abs(v) <= _LARGEST if isinstance(v, int) else isinstance(v, (float, np.bool_, np.number))
        for v in known
    )


def agreement_metrics(batch: DataProto) -> dict[str, float]:
    """How far the rollout's log-probs are from the trainer's on the same tokens."""
    columns = batch.batch
    names = set(columns.keys())
    if not {"rollout_log_probs", "old_log_probs"} <= names:
        return {}
    mask = columns["response_mask"].bool()
    ours, theirs = columns["old_log_probs"], columns["rollout_log_probs"]
    gap = (ours - theirs)[mask]
    if gap.numel() == 0:
        return {}
    probability_gap = (ours.exp() - theirs.exp())[mask].abs()
    means, maxima = gap_metrics(ours, theirs, mask)
    return {
        **{f"rollout_corr/{name}": value.item() for name, value in (means | maxima).items()},
        "rollout_corr/k3_kl": (gap.exp() - 1 - gap).mean().item(),
        "training/rollout_probs_diff_mean": probability_gap.mean().item(),
        "training/rollout_probs_diff_max": probability_gap.max().item(),
    }


def entropy_metric(batch: DataProto) -> dict[str, float]:
    columns = batch.batch
    if "entropys" not in columns.keys():  # noqa: SIM118
        return {}
    return {"actor/entropy": masked_mean(columns["entropys"], columns["response_mask"]).item()}


def throughput_metrics(
    batch: DataProto, timing: Mapping[str, float], ranks: int
) -> dict[str, float]:
    """Tokens and seconds a token: per response token for generation, per token for the rest."""
    tokens = int(batch.batch["attention_mask"].sum())
    written = int(batch.batch["response_mask"].sum())
    seconds = timing.get("timing_s/step", 0.0)
    metrics: dict[str, float] = {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / seconds / ranks if seconds else 0.0,
    }
    for phase in ("gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"):
        spent = timing.get(f"timing_s/{phase}")
        if spent is not None:
            per = written if phase == "gen" else tokens
            metrics[f"timing_per_token_ms/{phase}"] = spent * 1000 / max(per, 1)
    return metrics


def _share(flags: Tensor) -> float:
    return flags.float().mean().item()
