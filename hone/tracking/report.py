"""`hone report RUN…`: writes one HTML page for a run, or for several runs overlaid.

The template (`report.html`) escapes all text, and the content security policy allows only the page's script
and style.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hone.tracking.atomic import atomic_write_text
from hone.tracking.curve import DEFAULT_SMOOTHING, bucket_means, envelope, is_unsmoothed
from hone.tracking.metrics_file import find_metrics_file
from hone.tracking.panels import PURE_METRIC, SECTIONS, Section
from hone.tracking.report_data import RunData, load_run
from hone.tracking.run_folder import RunFolder, unique_labels
from hone.tracking.timer import TIMING_PREFIX
from hone.types import JsonObject, JsonValue

CHARACTERS_SHOWN = 4000
POINTS_DRAWN = 500
OVERVIEW_METRICS = re.compile(
    r"val-core/.*(?<!/std)|accuracy|reward/(mean|distinct_answers)|critic/(score|rewards)/mean|critic/vf_explained_var"
    r"|actor/(kl_loss|ppo_kl|entropy|pg_loss|grad_norm)|response_length/(mean|clip_ratio)"
    r"|perf/throughput|(train|val)/loss"
)
"""Metrics whose charts are open at first; other metrics are grouped by the first part of their name."""
SUMMARY_METRICS = re.compile(
    r"val-core/.*(?<!/std)|accuracy|reward/mean|critic/score/mean|(train|val)/loss"
)
TIMERS_OUTSIDE_STEP = ("testing", "save_checkpoint")
"""Timers that `timing_s/step` does not include."""
RUN_COLOURS = (
    *("#2f6f9f", "#c2553a", "#3f8f6b", "#db2777"),
    *("#7c3aed", "#0891b2", "#65a30d", "#dc2626"),
)
PART_COLOURS = (*RUN_COLOURS, "#a16207", "#94a3b8")
BAR_WIDTH = 1000
"""Width of the bar of time parts, in units of its SVG in `report.html`."""
EQUAL_RATIO = 1e-5
"""Curves that differ by less than this fraction of their largest value are equal, as rounding differs."""
GOLDEN_ANGLE = 137.508
"""Runs beyond RUN_COLOURS get hues that are this many degrees apart."""

# Control characters, and Unicode marks that reverse or hide text.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\U000e0000-\U000e007f]"
)


def write_report(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Reads the run folders and writes the page to `out`."""
    if not runs:
        raise ValueError("a report needs at least one run folder")
    return atomic_write_text(out, render(load_runs(runs)))


def load_runs(runs: Sequence[str | os.PathLike[str]]) -> list[RunData]:
    """Loads runs; a run has the name of its experiment, or else of its folder."""
    names = [RunFolder(find_metrics_file(path).parent).experiment_name() for path in runs]
    labels = unique_labels(runs)
    if len(set(names)) == len(names):
        labels = [name or label for name, label in zip(names, labels, strict=True)]
    return [load_run(path, label) for path, label in zip(runs, labels, strict=True)]


def render(runs: Sequence[RunData], *, is_live: bool = False) -> str:
    """Renders the whole page; a live page asks its server for changes."""
    from jinja2 import Environment, FileSystemLoader

    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"excerpt": excerpt, "number": format_number}
    css = (folder / "report.css").read_text(encoding="utf-8") + _colour_rules(len(runs))
    script = (folder / "report.js").read_text(encoding="utf-8")
    security_policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src '{_csp_hash(css)}'; script-src '{_csp_hash(script)}'"
        + ("; connect-src 'self'" if is_live else "")
    )
    metric_names = sorted({key for run in runs for key in run.metric_names()})
    summary_keys = [key for key in metric_names if SUMMARY_METRICS.fullmatch(key)]
    constants = [key for key in metric_names if _is_constant(runs, key)]
    equal_metrics = _equal_metrics(runs, _overview_first(set(metric_names).difference(constants)))
    groups = _group_metrics(list(equal_metrics), SECTIONS if PURE_METRIC in metric_names else ())
    charts = [_curves(key, runs) for keys in groups.values() for key in keys]
    data = json.dumps({"runs": [run.label for run in runs], "charts": charts}, allow_nan=False)
    *others, last = (run.label for run in runs)
    return environment.get_template("report.html").render(
        runs=runs,
        title=f"{', '.join(others)} and {last}" if others else last,
        policy=security_policy,
        css=css,
        script=script,
        # Inside a script element only `<` can end the element or open a comment.
        chart_data=data.replace("<", "\\u003c"),
        weight=DEFAULT_SMOOTHING,
        summary_metrics=_equal_metrics(runs, summary_keys),
        metric_result=metric_result,
        headline=headline,
        curve_groups=groups,
        equal_metrics=equal_metrics,
        constants=constants,
        is_live=is_live,
        open_groups=["overview", *(section.name for section in SECTIONS if section.is_open)],
        time_breakdown=time_breakdown,
        config_rows=_config_rows(runs),
    )


def excerpt(text: str, limit: int = CHARACTERS_SHOWN) -> str:
    """Truncates the text at `limit` and escapes invisible characters; the template escapes HTML."""
    content = text.replace("\r\n", "\n")
    visible_text = _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", content[:limit])
    excess = len(content) - limit
    return visible_text + (f" … {excess:,} more characters" if excess > 0 else "")


def format_number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _colour_rules(num_runs: int) -> str:
    """Returns the CSS rules for the colours of runs (r0, r1, …) and of time parts (t0, t1, …)."""
    extra_hues = (i * GOLDEN_ANGLE % 360 for i in range(len(RUN_COLOURS), num_runs))
    extra_colours = (f"hsl({hue:.0f} 55% 45%)" for hue in extra_hues)
    rules = [
        f"path.r{i}{{stroke:{colour}}}circle.r{i}{{fill:{colour}}}.key.r{i}{{background:{colour}}}"
        f"body.hide-{i} .of{i}{{display:none}}"
        for i, colour in enumerate([*RUN_COLOURS[:num_runs], *extra_colours])
    ]
    for i, colour in enumerate(PART_COLOURS):
        rules.append(f"rect.t{i}{{fill:{colour}}}.key.t{i}{{background:{colour}}}")
    return "".join(rules)


class MetricResult(NamedTuple):
    """The first, last and best value of a metric in a run."""

    key: str
    first: float
    last: float
    best: float
    best_step: int


def metric_result(run: RunData, key: str) -> MetricResult | None:
    """Returns the result of a metric, or None if the metric has no finite value in this run."""
    steps, values = run.metrics.get(key).finite_points()
    if not len(values):
        return None
    best_index = values.argmin() if key.endswith("loss") else values.argmax()
    return MetricResult(key, values[0], values[-1], values[best_index], steps[best_index])


def headline(run: RunData) -> MetricResult | None:
    """Returns the result of the first metric that the run has; held-out metrics come first."""
    keys = filter(SUMMARY_METRICS.fullmatch, run.metric_names())
    ordered_keys = sorted(keys, key=lambda key: (not key.startswith("val"), key))
    return next(filter(None, (metric_result(run, key) for key in ordered_keys)), None)


def _is_constant(runs: Sequence[RunData], key: str) -> bool:
    """Whether a metric has one finite value in all steps of each run, and at least two steps in a run."""
    all_values = [run.metrics.get(key).values for run in runs]
    return max(map(len, all_values)) > 1 and all(
        _are_close(values, np.full_like(values, values[0])) for values in all_values if len(values)
    )


def _equal_metrics(runs: Sequence[RunData], names: Iterable[str]) -> dict[str, list[str]]:
    """Returns, by the first of each set of metrics with equal values, the names of the set."""
    names_by_first: dict[str, list[str]] = {}
    for key in names:
        equal_key = next((first for first in names_by_first if _are_equal(runs, first, key)), key)
        names_by_first.setdefault(equal_key, []).append(key)
    return names_by_first


def _are_equal(runs: Sequence[RunData], first_key: str, second_key: str) -> bool:
    for run in runs:
        first, second = run.metrics.get(first_key), run.metrics.get(second_key)
        if not np.array_equal(first.steps, second.steps):
            return False
        if not _are_close(first.values, second.values):
            return False
    return True


def _are_close(first: NDArray[np.float64], second: NDArray[np.float64]) -> bool:
    largest_value = np.abs(first[np.isfinite(first)]).max(initial=0.0)
    return np.allclose(first, second, rtol=0.0, atol=EQUAL_RATIO * largest_value, equal_nan=True)


def _overview_first(names: Iterable[str]) -> list[str]:
    """Returns the names in the order of the page: held-out metrics, other results, the rest."""
    return sorted(
        names,
        key=lambda key: (
            not OVERVIEW_METRICS.fullmatch(key),
            not key.startswith("val-core/"),
            not SUMMARY_METRICS.fullmatch(key),
            key,
        ),
    )


def _group_metrics(names: Sequence[str], sections: Sequence[Section]) -> dict[str, list[str]]:
    """Returns metric names by group: the overview, the sections, and a group per prefix."""
    groups = {"overview": [key for key in names if OVERVIEW_METRICS.fullmatch(key)]}
    section_metrics = {section.name: section.metrics_among(names) for section in sections}
    groups |= {name: keys for name, keys in section_metrics.items() if keys}
    grouped_names = {key for keys in groups.values() for key in keys}
    for key in names:
        if key not in grouped_names:
            groups.setdefault(key.partition("/")[0], []).append(key)
    return groups


def _curves(key: str, runs: Sequence[RunData]) -> list[JsonObject]:
    """Returns the curve of each run; a long curve has the mean of each bucket, and in `raw` its extremes."""
    curves: list[JsonObject] = []
    for index, run in enumerate(runs):
        steps, values = run.metrics.get(key)
        if not len(steps):
            continue
        curve: JsonObject = {"run": index, "as_is": is_unsmoothed(key, len(steps))}
        if len(steps) > POINTS_DRAWN:
            num_buckets = POINTS_DRAWN // 2
            curve["raw"] = _points(*envelope(steps, values, num_buckets - 1))
            means = bucket_means(steps, values, num_buckets)
            curve |= {"counts": list(means.counts), **_points(means.steps, means.values)}
        else:
            curve |= _points(steps.tolist(), values.tolist())
        curves.append(curve)
    return curves


def _points(steps: list[int], values: list[float]) -> dict[str, JsonValue]:
    json_values: list[JsonValue] = [value if math.isfinite(value) else None for value in values]
    return {"steps": list(steps), "values": json_values}


class TimePart(NamedTuple):
    """The total seconds of a timer, and the timer's place in the bar of the run."""

    name: str
    seconds: float
    share: float
    """Fraction of the run's total."""
    num_steps: int
    """Number of steps that have the timer."""
    bar_start: float
    """Where the part begins in the bar, from 0 to BAR_WIDTH."""


def time_breakdown(run: RunData) -> tuple[list[TimePart], bool]:
    """Returns the timers of a run, the untimed seconds as "other", and whether timers overlap."""
    # Timers with nested names (`timing_s/agent_loop/…`) and `gen_max` are parts of other timers.
    timers = [key for key in run.metric_names() if re.fullmatch(f"{TIMING_PREFIX}[^/]+", key)]
    timer_values = {
        key.removeprefix(TIMING_PREFIX): run.metrics.get(key).finite_points().values
        for key in timers
    }
    timer_values.pop("gen_max", None)
    step_seconds = float(sum(timer_values.pop("step", [])))
    if step_seconds:
        step_seconds += sum(float(sum(timer_values.get(name, []))) for name in TIMERS_OUTSIDE_STEP)
    totals = {name: float(sum(values)) for name, values in timer_values.items() if len(values)}
    ordered_names = sorted(totals, key=lambda name: (totals[name], name), reverse=True)
    timed_seconds = sum(totals.values())
    if totals and step_seconds > timed_seconds:
        totals["other"] = step_seconds - timed_seconds
        ordered_names.append("other")
    total_seconds = max(step_seconds, timed_seconds) or 1.0
    parts: list[TimePart] = []
    for name in ordered_names:
        bar_start = parts[-1].bar_start + BAR_WIDTH * parts[-1].share if parts else 0.0
        share, num_steps = totals[name] / total_seconds, len(timer_values.get(name, ()))
        parts.append(TimePart(name, totals[name], share, num_steps, bar_start))
    has_overlap = timed_seconds > step_seconds * 1.02  # 2 % is noise of the timers
    return parts, bool(step_seconds) and has_overlap


def _config_rows(runs: Sequence[RunData]) -> list[tuple[str, bool, list[tuple[str, str]]]]:
    """Returns every config key, whether the runs differ in it, and its value and origin per run."""

    def value_and_origin(run: RunData, key: str) -> tuple[str, str]:
        if key not in run.config:
            return "–", ""
        return run.config[key], "" if run.origins is None else str(run.origins.get(key, "default"))

    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.config):
        is_different = len({run.config.get(key) for run in runs}) > 1
        rows.append((key, is_different, [value_and_origin(run, key) for run in runs]))
    return rows
