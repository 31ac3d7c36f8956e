"""`hone report RUN…`: one HTML page for a run, or for several laid over each other.

The page is self-contained (nothing is loaded, from disk or network) and safe to open: model text
is escaped, and its content policy allows only the script and style that are part of it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from hone.tracking import report_chart as geometry
from hone.tracking import report_page as page
from hone.tracking.atomic import atomic_write_text
from hone.tracking.report_chart import ChartData
from hone.tracking.report_data import RunData, labels_of, load_run
from hone.tracking.report_style import SCRIPT, style
from hone.tracking.smoothing import DEFAULT_WEIGHT


def write_report(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Read the run folders and write the page to `out`."""
    if not runs:
        raise ValueError("a report needs at least one run folder")
    loaded = [load_run(path, label) for path, label in zip(runs, labels_of(runs), strict=True)]
    return atomic_write_text(out, render(loaded))


def render(runs: Sequence[RunData]) -> str:
    """The whole page as text."""
    curves, charts = page.curves_section(runs)
    sections = {
        "Summary": page.summary_section(runs),
        "Curves": curves,
        "Time": page.timing_section(runs),
        "Validation samples": page.validation_section(runs),
        "Best and worst responses": page.extremes_section(runs),
        "Config": page.config_section(runs),
    }
    body = "".join(
        f'<section id="{_anchor(title)}"><h2>{title}</h2>{html}</section>'
        for title, html in sections.items()
    )
    *others, last = (run.label for run in runs)
    title = page.shown(f"{', '.join(others)} and {last}" if others else last)
    css, script = style(len(runs)), SCRIPT
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src '{_hash(css)}'; script-src '{_hash(script)}'"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{css}</style></head><body><h1>{title}</h1>"
        f"{_navigation(runs, list(sections))}{body}"
        f'<script type="application/json" id="data">{_chart_data(runs, charts)}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def _navigation(runs: Sequence[RunData], titles: Sequence[str]) -> str:
    links = "".join(f'<a href="#{_anchor(title)}">{title}</a>' for title in titles)
    toggles = "".join(
        f'<label><input type="checkbox" data-run="{i}" checked> '
        f"{page.run_name(i, run.label)}</label>"
        for i, run in enumerate(runs)
    )
    slider = (
        '<label>smoothing <input type="range" id="smoothing" min="0" max="0.99" step="0.01" '
        f'value="{DEFAULT_WEIGHT}"></label>'
    )
    search = '<input type="search" placeholder="filter curves" data-filter=".chart">'
    return f'<nav>{links}<span class="break"></span>{toggles}{slider}{search}</nav>'


def _chart_data(runs: Sequence[RunData], charts: list[ChartData]) -> str:
    box = {
        "total": geometry.WIDTH,
        "left": geometry.LEFT,
        "top": geometry.TOP,
        "width": geometry.WIDTH - geometry.LEFT - geometry.RIGHT,
        "height": geometry.HEIGHT - geometry.TOP - geometry.BOTTOM,
    }
    data = {"box": box, "runs": [run.label for run in runs], "charts": charts}
    text = json.dumps(data, allow_nan=False)
    # Inside a script element only `<` can end the element or open a comment.
    return text.replace("<", "\\u003c")


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return "sha256-" + base64.b64encode(digest).decode("ascii")
