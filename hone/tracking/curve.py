"""A learning curve as a PNG: chosen metrics of one or several runs, raw and smoothed.

One panel per key, one colour per run.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hone.tracking.atomic import atomic_path
from hone.tracking.metrics_file import read_metrics, series
from hone.tracking.smoothing import DEFAULT_WEIGHT, drawn_as_is, smooth

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
    names = sorted({key for rows in runs.values() for row in rows for key in row})
    for key in keys:
        if key not in names:
            close = ", ".join(difflib.get_close_matches(key, names, n=3) or names[:20])
            raise ValueError(f"no run has the metric {key!r}; close: {close or 'none at all'}")
    # The canvas is named here and pyplot is not used: no display, and no state left behind.
    figure = Figure(figsize=(7.0, 1.0 + 2.6 * len(keys)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(keys), 1, squeeze=False, sharex=True)[:, 0]
    for panel, key in zip(panels, keys, strict=True):
        for number, (label, rows) in enumerate(runs.items()):
            steps, values = series(rows, key)
            look = {"color": f"C{number}", "label": label}
            if steps and drawn_as_is(key, len(steps)):
                panel.plot(steps, values, **look, marker="o", markersize=3.5)
            elif steps:
                panel.plot(steps, values, color=f"C{number}", alpha=0.25, linewidth=0.8)
                panel.plot(steps, smooth(values, smoothing), **look, linewidth=1.8)
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
    labelled: dict[str, PathLike] = {}
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        resolved = Path(path).resolve()
        label = resolved.parent.name if resolved.suffix else resolved.name
        labelled[label if label not in labelled else str(path)] = path
    return labelled
