"""The sections of a report as HTML. Everything that came from a run is escaped on its way in.

Two locks: `shown` escapes every text, and the page's own policy (see `report.py`) runs no script
and loads nothing that is not part of the page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import islice

from hone.tracking.report_chart import ChartData, Curve, chart, stacked_bar
from hone.tracking.report_data import RunData
from hone.tracking.report_samples import Sample, Turn
from hone.tracking.timing import PREFIX

CHARACTERS_SHOWN = 4000
CALL_CHARACTERS_SHOWN = 300
TURNS_SHOWN = 40
ROLES = ("assistant", "tool", "user", "environment")
"""Those with a look of their own; another role looks like the environment."""
NOTES_SHOWN = 20
OVERVIEW = re.compile(
    r"val-core/.*(?<!/std)|accuracy|reward/mean|critic/(score|rewards)/mean|critic/vf_explained_var"
    r"|actor/(kl_loss|ppo_kl|entropy|pg_loss|grad_norm)|response_length/(mean|clip_ratio)"
    r"|perf/throughput|(train|val)/loss"
)
"""What is looked at first; the rest is one click away, by the first part of its name."""
SUMMARY = re.compile(r"val-core/.*(?<!/std)|accuracy|reward/mean|critic/score/mean|val/loss")
LESS_IS_BETTER = re.compile(r".*loss")
BESIDE_THE_STEP = ("testing", "save_checkpoint")
"""Parts that `timing_s/step` does not hold."""

# Control characters, and the marks that make text run backwards, hide or mislead.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)


def shown(text: str, limit: int = CHARACTERS_SHOWN) -> str:
    """Text as HTML that shows it and does nothing else; invisible characters become visible."""
    whole = text.replace("\r\n", "\n")
    visible = _INVISIBLE.sub(lambda m: f"\\u{ord(m[0]):04x}", whole[:limit])
    more = len(whole) - limit
    return escape(visible) + (f" … {more:,} more characters" if more > 0 else "")


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def run_name(index: int, label: str) -> str:
    return f'<span class="key r{index}"></span>{shown(label)}'


def _of_run(index: int, html: str) -> str:
    """A part of the page that is there while its run is shown."""
    return f'<div class="of{index}">{html}</div>'


def summary_section(runs: Sequence[RunData]) -> str:
    """First, last and best of what a run is judged by."""
    keys = sorted({key for run in runs for key in run.metric_names() if SUMMARY.fullmatch(key)})
    head = "".join(f'<th class="of{i}">{run_name(i, run.label)}</th>' for i, run in enumerate(runs))
    steps = "".join(f'<td class="n of{i}">{_steps(run)}</td>' for i, run in enumerate(runs))
    body = [f"<tr><td>steps</td>{steps}</tr>"]
    for key in keys:
        cells = "".join(
            f'<td class="n of{i}">{_story(run, key)}</td>' for i, run in enumerate(runs)
        )
        body.append(f"<tr><td>{shown(key)}</td>{cells}</tr>")
    notes = "".join(_of_run(i, _notes(run)) for i, run in enumerate(runs))
    table = f"<table><tr><th></th>{head}</tr>{''.join(body)}</table>"
    return f"{_tiles(runs, keys)}{table}{notes}"


def _notes(run: RunData) -> str:
    notes = run.notes
    more = len(notes) - NOTES_SHOWN
    if more > 0:
        notes = [*notes[:NOTES_SHOWN], f"and {more} more of this kind"]
    return "".join(f'<p class="note">{shown(run.label)}: {shown(note)}</p>' for note in notes)


def _tiles(runs: Sequence[RunData], keys: Sequence[str]) -> str:
    """What each run came to, large: held-out results before all others."""
    by_rank = sorted(keys, key=lambda name: (not name.startswith("val"), name))
    tiles = []
    for index, run in enumerate(runs):
        results = ((key, run.metrics.of(key).finite().values) for key in by_rank)
        for key, values in islice((result for result in results if len(result[1])), 1):
            tiles.append(
                f'<div class="tile of{index}"><p>{run_name(index, run.label)}</p>'
                f"<b>{number(values[-1])}</b><p class='soft'>from {number(values[0])} · "
                f"{shown(key)}</p></div>"
            )
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _steps(run: RunData) -> str:
    return "{} to {}".format(*run.metrics.steps) if run.metrics.steps else "–"


def _story(run: RunData, key: str) -> str:
    steps, values = run.metrics.of(key).finite()
    if not len(values):
        return "–"
    at = values.argmin() if LESS_IS_BETTER.fullmatch(key) else values.argmax()
    first, last, best = number(values[0]), number(values[-1]), number(values[at])
    return f"{first} → {last} <span class='soft'>(best {best} at {steps[at]})</span>"


def curves_section(runs: Sequence[RunData]) -> tuple[str, list[ChartData]]:
    """A chart for every metric, by group, and the charts' data in the same order."""
    keys = sorted({key for run in runs for key in run.metric_names()})
    groups: dict[str, list[str]] = {"overview": _overview(runs, keys)}
    for key in keys:
        if key not in groups["overview"]:
            groups.setdefault(key.partition("/")[0], []).append(key)
    html, data = [], []
    for group, members in groups.items():
        figures = []
        for key in members:
            curves = [Curve(i, *run.metrics.of(key)) for i, run in enumerate(runs)]
            figure, numbers = chart(key, [curve for curve in curves if len(curve.steps)])
            figures.append(figure)
            data.append(numbers)
        state = " open" if group == "overview" else ""
        title = f'{shown(group)} <span class="count">({len(figures)})</span>'
        inside = f'<div class="charts">{"".join(figures)}</div>'
        html.append(f"<details{state}><summary>{title}</summary>{inside}</details>")
    empty = '<p class="soft" id="no-curves" hidden>No curve of a visible run has that name.</p>'
    return f'<div class="curves">{empty}{"".join(html)}</div>', data


def _overview(runs: Sequence[RunData], keys: Sequence[str]) -> list[str]:
    """The metrics looked at first, results before causes; one of those that are equal throughout."""
    wanted = [key for key in keys if OVERVIEW.fullmatch(key)]
    wanted.sort(key=lambda key: (not key.startswith("val-core/"), not SUMMARY.fullmatch(key)))
    by_values: dict[tuple[bytes, ...], str] = {}
    for key in wanted:
        alike = tuple(numbers.tobytes() for run in runs for numbers in run.metrics.of(key))
        by_values.setdefault(alike, key)
    return list(by_values.values())


def timing_section(runs: Sequence[RunData]) -> str:
    parts = (f"<h3>{run_name(i, run.label)}</h3>{_timing(run)}" for i, run in enumerate(runs))
    return "".join(_of_run(i, part) for i, part in enumerate(parts))


def _timing(run: RunData) -> str:
    """Total seconds by part; what `timing_s/step` holds beyond its parts is "other"."""
    spent: dict[str, list[float]] = {}
    for key in run.metric_names():
        name = key.removeprefix(PREFIX)
        # Deeper names (`timing_s/agent_loop/…`) are details of a part that is already counted.
        if name != key and "/" not in name:
            spent[name] = run.metrics.of(key).finite().values.tolist()
    whole = sum(spent.pop("step", []))
    whole += sum(sum(spent.get(name, [])) for name in BESIDE_THE_STEP) if whole else 0.0
    spent.pop("gen_max", None)  # the slowest worker's share of `gen`
    totals = sorted(((sum(v), name) for name, v in spent.items() if v), reverse=True)
    if not totals:
        return '<p class="soft">no timing_s/… metrics</p>'
    inside = sum(seconds for seconds, _ in totals)
    overlap = whole and inside > whole * 1.02
    if whole > inside:
        totals.append((whole - inside, "other"))
    total = max(whole, inside)
    rows = "".join(
        f'<tr><td><span class="key t{i % 10}"></span>{shown(name)}</td>'
        f'<td class="n">{seconds:,.2f}</td><td class="n">{seconds / total:.1%}</td>'
        f'<td class="n">{len(spent.get(name, [])) or ""}</td>'
        f'<td class="n">{_mean(spent.get(name, []))}</td></tr>'
        for i, (seconds, name) in enumerate(totals)
    )
    note = '<p class="note">parts overlap: their sum is over timing_s/step</p>' if overlap else ""
    head = "".join(
        f'<th class="n">{title}</th>' for title in ("seconds", "share", "times", "each, s")
    )
    head = f"<tr><th>part</th>{head}</tr>"
    bar = stacked_bar([(name, seconds) for seconds, name in totals])
    return f"{bar}{note}<table>{head}{rows}</table>"


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.4g}" if values else ""


def validation_section(runs: Sequence[RunData]) -> str:
    parts = []
    for index, run in enumerate(runs):
        html = [f"<h3>{run_name(index, run.label)}</h3>"]
        if not run.validation:
            html.append('<p class="soft">no validation samples (validation/step_N.parquet)</p>')
        for prompt, samples in run.validation.items():
            rows = "".join(
                f'<tr><td class="n">{s.step}</td><td class="n">{number(s.score)}</td>'
                f"<td>{_response(s)}</td></tr>"
                for s in samples
            )
            table = f"<table><tr><th>step</th><th>score</th><th>response</th></tr>{rows}</table>"
            html.append(f'<div class="sample"><pre>{shown(prompt)}</pre>{table}</div>')
        parts.append(_of_run(index, "".join(html)))
    return "".join(parts)


def extremes_section(runs: Sequence[RunData]) -> str:
    parts = []
    for index, run in enumerate(runs):
        name = run_name(index, run.label)
        html = [
            f"<h3>{name}: {title}</h3>" + "".join(_sample(sample) for sample in samples)
            for title, samples in (("best", run.best), ("worst", run.worst))
            if samples
        ]
        absent = f'<h3>{name}</h3><p class="soft">no scored responses of training steps</p>'
        parts.append(_of_run(index, "".join(html) or absent))
    return "".join(parts)


def _sample(sample: Sample) -> str:
    parts = "".join(f" · {shown(name)} {number(value)}" for name, value in sample.parts.items())
    return (
        f'<div class="sample"><p class="soft">step {sample.step} · '
        f"<b>score {number(sample.score)}</b>{parts}</p>"
        f"<pre>{shown(sample.prompt)}</pre><hr>{_response(sample)}</div>"
    )


def _response(sample: Sample) -> str:
    """The response: its text, or its turns one below the other."""
    if not sample.turns:
        return f"<pre>{shown(sample.response)}</pre>"
    html = [_turn(turn) for turn in sample.turns[:TURNS_SHOWN]]
    if (more := len(sample.turns) - TURNS_SHOWN) > 0:
        html.append(f'<p class="soft">… {more} more turns</p>')
    scores = " · ".join(
        f"{shown(name)} {number(value)}" for name, value in sample.trajectory_scores.items()
    )
    whole = f'<p class="soft">score of the trajectory: {scores}</p>' if scores else ""
    return f'<div class="turns">{"".join(html)}{whole}</div>'


def _turn(turn: Turn) -> str:
    """Who wrote it, what, its score, and the tools it called with their rewards."""
    role = turn.role if turn.role in ROLES else "environment"
    score = "" if turn.score is None else f" · score {number(turn.score)}"
    calls = "".join(
        f'<p class="call">called {shown(call.text, CALL_CHARACTERS_SHOWN)}'
        + ("" if call.reward is None else f" · reward {number(call.reward)}")
        + "</p>"
        for call in turn.calls
    )
    return (
        f'<div class="turn {role}"><p class="who">{shown(turn.role, 40)}{score}</p>'
        f"<pre>{shown(turn.text)}</pre>{calls}</div>"
    )


def config_section(runs: Sequence[RunData]) -> str:
    """Every key, its value and origin in each run; rows where runs differ are marked."""
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    head = "".join(
        f'<th class="of{i}">{run_name(i, run.label)}</th><th class="of{i}">origin</th>'
        for i, run in enumerate(runs)
    )
    rows = []
    for key in keys:
        values = [run.config.get(key) for run in runs]
        cells = "".join(_config_cells(i, run, key) for i, run in enumerate(runs))
        mark = " differs" if len(set(values)) > 1 else ""
        name = shown(key)
        row = f'<tr class="setting{mark}" data-name="{name}"><td>{name}</td>{cells}</tr>'
        rows.append(row)
    search = '<input type="search" placeholder="filter keys" data-filter=".setting">'
    empty = '<p class="soft" id="no-settings" hidden>No key has that name.</p>'
    table = f"<table><tr><th>key</th>{head}</tr>{''.join(rows)}</table>"
    return f"{search}{empty}{table}"


def _config_cells(index: int, run: RunData, key: str) -> str:
    of = f"of{index}"
    if key not in run.config:
        return f'<td class="{of}">–</td><td class="{of}"></td>'
    origin = "" if run.origins is None else run.origins.get(key, "default")
    weight = "" if origin in ("", "default") else " set"
    return (
        f'<td class="{of}{weight}">{shown(run.config[key])}</td>'
        f'<td class="soft {of}">{shown(origin)}</td>'
    )
