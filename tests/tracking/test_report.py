from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hone.tracking import RunFolder
from hone.tracking.report import write_report
from hone.tracking.report_style import SCRIPT
from hone.tracking.smoothing import smooth

MakeRun = Callable[..., RunFolder]
HOSTILE = (
    "</script></pre></title><script>alert(1)</script><img src=http://x/y onerror=alert(2)><!--\"'>"
)


class Page(HTMLParser):
    """The elements, attributes and texts a browser would see."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def report(tmp_path: Path, *runs: RunFolder) -> str:
    return write_report([run.path for run in runs], tmp_path / "report.html").read_text()


def test_the_page_has_every_section_of_a_run(make_run: MakeRun, tmp_path: Path) -> None:
    page = Page(report(tmp_path, make_run()))
    for text in (
        "Summary",
        "0.05 → 1",
        "val-core/x/acc/mean@1",
        "response a at 20",
        "prompt b",
        "score 0.875",
        "response u7 at 2",
        "rule 0.875",
        "actor.lr",
        "command line",
        "gen",
        "60.00",
    ):
        assert text in page.text, text


def test_two_runs_are_laid_over_each_other(make_run: MakeRun, tmp_path: Path) -> None:
    html = report(tmp_path, make_run("slow"), make_run("fast", lr=2e-6))
    data = json.loads(Page(html).scripts[0])
    assert data["runs"] == ["slow", "fast"]
    assert all([c["run"] for c in chart["curves"]] == [0, 1] for chart in data["charts"])
    assert re.search(r'class="setting differs" data-name="actor\.lr"', html)
    assert re.search(r'class="setting" data-name="actor\.clip"', html)


def test_the_page_loads_nothing_and_allows_only_its_own_script(
    make_run: MakeRun, tmp_path: Path
) -> None:
    page = Page(report(tmp_path, make_run()))
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert name not in ("src", "style", "srcset", "action"), (tag, name)
        assert not name.startswith("on"), (tag, name)
        if name == "href":
            assert value is not None
            assert value.startswith("#")
    (policy,) = [v for tag, _, v in page.attributes if tag == "meta" and v and "default-src" in v]
    digest = base64.b64encode(hashlib.sha256(page.scripts[-1].encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_hostile_text_from_anywhere_in_a_run_stays_text(
    make_run: MakeRun, write_parquet: Any, rows_of: Any, tmp_path: Path
) -> None:
    clean = Page(report(tmp_path, make_run("clean")))
    run = make_run("a<b>&'")
    evil = rows_of(3, HOSTILE, 9.0, **{f"reward/{HOSTILE}": 1.0})
    evil |= {"prompt_text": HOSTILE, "response_text": HOSTILE}
    write_parquet(run.rollout_file(3), [evil])
    write_parquet(run.validation_file(20), [evil])
    run.write_config({HOSTILE: {HOSTILE: HOSTILE}}, {f"{HOSTILE}.{HOSTILE}": HOSTILE})
    run.metrics.append({HOSTILE: 1.0, f"{HOSTILE}/x": 2.0, f"timing_s/{HOSTILE}": 3.0}, 21)
    page = Page(report(tmp_path, run))
    assert page.text.count(HOSTILE) >= 8
    assert set(page.tags) == set(clean.tags)
    assert page.tags.count("script") == 2
    assert not [name for _, name, _ in page.attributes if name.startswith("on") or name == "src"]
    assert json.loads(page.scripts[0])["runs"] == ["a<b>&'"]
    assert "<" not in page.scripts[0]


def test_a_run_with_only_metrics_has_a_report(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "bare")
    run.metrics.append({"reward/mean": math.nan, "x": math.inf}, 1)
    text = Page(report(tmp_path, run)).text
    assert "no config.yaml" in text
    assert "no validation samples" in text


def test_a_run_that_has_not_finished_a_step_has_a_report(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "young")
    run.path.mkdir()
    run.metrics_file.write_text("")
    assert "has not finished a step" in report(tmp_path, run)


def test_no_runs_and_too_many_runs_are_refused(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], tmp_path / "x.html")
    with pytest.raises(ValueError, match="at most 8 runs, got 9"):
        write_report([make_run().path] * 9, tmp_path / "x.html")


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_script_draws_what_the_page_was_drawn_with(make_run: MakeRun, tmp_path: Path) -> None:
    html = report(tmp_path, make_run())
    data = Page(html).scripts[0]
    program = SCRIPT + (
        f"const data = {data};\n"
        "console.log(JSON.stringify(data.charts.map(c => c.curves.map(curve => pathOf(c, data.box,"
        "curve.steps, smooth(curve.values, curve.steps.length <= data.few ? 0 : 0.6))))));\n"
        "console.log(JSON.stringify(smooth([1, null, 3, 2], 0.9)));"
    )
    done = subprocess.run(
        ["node", "-"], input=program, capture_output=True, text=True, check=True, timeout=60
    )
    paths, smoothed = (json.loads(line) for line in done.stdout.splitlines())
    assert [path for chart in paths for path in chart] == re.findall(
        r'class="line r0" d="([^"]*)"', html
    )
    want = smooth([1.0, math.nan, 3.0, 2.0], 0.9)
    assert smoothed[1] is None
    assert [smoothed[i] for i in (0, 2, 3)] == pytest.approx([want[i] for i in (0, 2, 3)])
