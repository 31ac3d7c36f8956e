"""A learning curve as a PNG: chosen metrics of one or several runs, raw and smoothed.

One panel a key, one colour a run. For everything a run recorded there is the report.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hone.tracking.atomic import atomic_path
from hone.tracking.metrics_file import read_metrics, series
from hone.tracking.smoothing import DEFAULT_WEIGHT, drawn_as_is, smooth
from hone.types import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PathLike = str | os.PathLike[str]


def draw_curve(
    metrics_path: PathLike | Sequence[PathLike] | Mapping[str, PathLike],
    keys: Sequence[str],
    out_png: PathLike,
    title: str,
    *,
    smoothing: float = DEFAULT_WEIGHT,
) -> Path:
    """Draw `keys` of one run, several, or several with labels; each a `metrics.jsonl` or a folder.

    A run that lacks a key is left out of its panel; a key that no run has is an error.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = {label: read_metrics(path) for label, path in _labelled(metrics_path).items()}
    _check_keys(runs, keys)
    # The canvas is named here and pyplot is not used: no display, and no state left behind.
    figure = Figure(figsize=(7.0, 1.0 + 2.6 * len(keys)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(keys), 1, squeeze=False, sharex=True)[:, 0]
    for panel, key in zip(panels, keys, strict=True):
        for number, (label, rows) in enumerate(runs.items()):
            _draw(
                panel, key, *series(rows, key), color=f"C{number}", label=label, smoothing=smoothing
            )
        panel.set_ylabel(key)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("step")
    if len(runs) > 1:
        panels[0].legend(frameon=False)
    figure.suptitle(title)
    with atomic_path(out_png) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return Path(out_png)


def _labelled(
    paths: PathLike | Sequence[PathLike] | Mapping[str, PathLike],
) -> dict[str, PathLike]:
    if isinstance(paths, Mapping):
        return dict(paths)
    several: Sequence[PathLike] = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    labelled: dict[str, PathLike] = {}
    for path in several:
        resolved = Path(path).resolve()
        label = resolved.parent.name if resolved.suffix else resolved.name
        labelled[label if label not in labelled else str(path)] = path
    return labelled


def _check_keys(runs: Mapping[str, list[Row]], keys: Sequence[str]) -> None:
    known = sorted({key for rows in runs.values() for row in rows for key in row})
    for key in keys:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=3) or known[:20]
            raise ValueError(
                f"no run has the metric {key!r}; close: {', '.join(close) or 'none at all'}"
            )


def _draw(
    panel: Axes,
    key: str,
    steps: list[int],
    values: list[float],
    *,
    color: str,
    label: str,
    smoothing: float,
) -> None:
    if not steps:
        return
    if drawn_as_is(key, len(steps)):
        panel.plot(steps, values, color=color, label=label, marker="o", markersize=3.5)
        return
    panel.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
    panel.plot(steps, smooth(values, smoothing), color=color, label=label, linewidth=1.8)
