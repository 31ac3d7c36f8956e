"""Curves as inline SVG: axes, one faint and one smoothed line a run, drawn without a browser.

A long curve is drawn in stretches: the faint line goes through their lowest and highest values,
the smoothed one is made of their means. The page's script redraws it when the slider is moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from typing_extensions import NotRequired, TypedDict

from hone.tracking.smoothing import (
    DEFAULT_WEIGHT,
    Means,
    Steps,
    Values,
    drawn_as_is,
    smooth,
    stretch_means,
    thin,
)

WIDTH, HEIGHT = 380, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 24
POINTS_DRAWN = 500
SMALLEST_SPAN = 1e-300
"""A narrower range is drawn as a constant: floats cannot divide it into ticks."""


@dataclass(frozen=True)
class Curve:
    """One run's values of one metric."""

    run: int
    steps: Steps
    values: Values


class Scale:
    """Data to pixels, with a little air above and below."""

    def __init__(self, curves: Sequence[Curve]) -> None:
        steps = [int(step) for curve in curves for step in curve.steps]
        values = [float(v) for curve in curves for v in curve.values if math.isfinite(v)] or [0.0]
        self.x0, self.x1 = _spread(min(steps), max(steps))
        low, high = _spread(min(values), max(values))
        air = 0.05 * (high - low)
        self.y0, self.y1 = low - air, high + air

    def x(self, step: float) -> float:
        return LEFT + (step - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        span = HEIGHT - TOP - BOTTOM
        return TOP + (1 - (value - self.y0) / (self.y1 - self.y0)) * span


class CurveData(TypedDict):
    """What the page's script draws one curve from."""

    run: int
    steps: list[int]
    values: list[float | None]
    as_is: bool
    range: list[float]
    counts: NotRequired[list[int]]


class ChartData(TypedDict):
    curves: list[CurveData]


def chart(key: str, curves: Sequence[Curve]) -> tuple[str, ChartData]:
    """The figure as HTML, and the data its script needs."""
    raw = [Curve(c.run, *thin(c.steps, c.values, POINTS_DRAWN)) for c in curves]
    means = [stretch_means(c.steps, c.values, POINTS_DRAWN) for c in curves]
    scale = Scale(raw)
    lines = "".join(_lines(key, scale, *both) for both in zip(raw, means, strict=True))
    name = escape(key)
    figure = (
        f'<figure class="chart" data-name="{name}"><figcaption>{name}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name} over steps">'
        f'<g class="axes">{_axes(scale)}</g>{lines}</svg>'
        '<output class="readout" hidden></output></figure>'
    )
    data: ChartData = {"curves": [_curve_data(key, c, m) for c, m in zip(raw, means, strict=True)]}
    return figure, data


def _curve_data(key: str, raw: Curve, means: Means) -> CurveData:
    """What the script draws a curve from; `range` is that of its unsmoothed points."""
    heights = [float(v) for v in raw.values if math.isfinite(v)] or [0.0]
    data: CurveData = {
        "run": raw.run,
        "steps": means.steps,
        "values": [_json_number(value) for value in means.values],
        "as_is": drawn_as_is(key, len(raw.steps)),
        "range": [int(min(raw.steps)), int(max(raw.steps)), min(heights), max(heights)],
    }
    if means.counts is not None:
        data["counts"] = means.counts
    return data


def _lines(key: str, scale: Scale, curve: Curve, means: Means) -> str:
    as_is = drawn_as_is(key, len(curve.steps))
    raw = path_of(scale, curve.steps, curve.values)
    smoothed = smooth(means.values, 0 if as_is else DEFAULT_WEIGHT, means.counts)
    line = path_of(scale, means.steps, smoothed)
    points = "".join(
        f'<circle class="r{curve.run}" cx="{scale.x(step):.1f}" cy="{scale.y(value):.1f}" r="2.5" '
        f'data-step="{int(step)}" data-value="{float(value)!r}"/>'
        for step, value in zip(curve.steps, curve.values, strict=True)
        if as_is and math.isfinite(value)
    )
    number = f"r{curve.run}"
    return f'<path class="raw {number}" d="{raw}"/><path class="line {number}" d="{line}"/>{points}'


def path_of(scale: Scale, steps: Steps, values: Values) -> str:
    """An SVG path; values that are not finite leave a gap."""
    parts, pen_down = [], False
    for step, value in zip(steps, values, strict=True):
        if math.isfinite(value):
            parts.append(f"{'L' if pen_down else 'M'}{scale.x(step):.1f} {scale.y(value):.1f}")
        pen_down = math.isfinite(value)
    return "".join(parts)


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers inside [low, high]: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step) + 1)]


def tick_text(value: float) -> str:
    """0.05, 250, 40k, 1.5M."""
    for least, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"


def _axes(scale: Scale) -> str:
    parts = []
    for value in ticks(scale.y0, scale.y1):
        y = scale.y(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{y + 3:.1f}">{tick_text(value)}</text>')
    for step in ticks(scale.x0, scale.x1):
        label = f'<text class="x" x="{scale.x(step):.1f}" y="{HEIGHT - 8}">{step:.6g}</text>'
        parts.append(label)
    return "".join(parts)


def _spread(low: float, high: float) -> tuple[float, float]:
    """Never an empty range: a constant curve is drawn through the middle."""
    if high - low > max(SMALLEST_SPAN, 1e-12 * max(abs(low), abs(high))):
        return low, high
    half = 0.1 * abs(low)
    if half <= SMALLEST_SPAN:
        half = 0.5
    return low - half, high + half


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def stacked_bar(parts: Sequence[tuple[str, float]], height: int = 26) -> str:
    """One horizontal bar split in proportion; class t0, t1, … colours the parts in order."""
    total = sum(seconds for _, seconds in parts) or 1.0
    x, pieces = 0.0, []
    for number, (name, seconds) in enumerate(parts):
        width = 1000 * seconds / total
        title = f"<title>{escape(name)}: {seconds:.4g} s ({seconds / total:.1%})</title>"
        box = f'x="{x:.2f}" width="{width:.2f}" height="{height}"'
        pieces.append(f'<rect class="t{number % 10}" {box}>{title}</rect>')
        x += width
    view = f'viewBox="0 0 1000 {height}" preserveAspectRatio="none"'
    return f'<svg class="stack" {view} role="img" aria-label="time">{"".join(pieces)}</svg>'
