from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hone.tracking import RunFolder
from hone.tracking.report import write_report

MakeRun = Callable[..., RunFolder]
HOSTILE = (
    "</script></pre></title><script>alert(1)</script><img src=http://x/y onerror=alert(2)><!--\"'>"
)


class Page(HTMLParser):
    """The elements, attributes and texts of a page."""

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


def test_two_runs_are_overlaid(make_run: MakeRun, tmp_path: Path) -> None:
    html = report(tmp_path, make_run("slow"), make_run("fast", lr=2e-6))
    data = json.loads(Page(html).scripts[0])
    assert data["runs"] == ["slow", "fast"]
    assert all([c["run"] for c in curves] == [0, 1] for curves in data["charts"])
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


def test_hostile_text_of_a_run_is_shown_as_text(
    make_run: MakeRun, write_parquet: Any, rows_of: Any, tmp_path: Path
) -> None:
    clean = Page(report(tmp_path, make_run("clean")))
    run = make_run("a<b>&'")
    evil = rows_of(3, HOSTILE, 9.0, **{f"reward/{HOSTILE}": 1.0})
    evil |= {"prompt_text": HOSTILE, "response_text": HOSTILE}
    write_parquet((run.rollouts / "step_3.parquet"), [evil])
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


def test_a_report_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], tmp_path / "x.html")


def test_any_number_of_runs_is_overlaid_each_in_its_colour(
    make_run: MakeRun, tmp_path: Path
) -> None:
    html = report(tmp_path, *[make_run(f"run-{i}") for i in range(12)])
    assert re.search("<h1>run-0, run-1, .*, run-10 and run-11</h1>", html)
    colours = re.findall(r"path\.r(\d+)\{stroke:([^}]+)\}", html)
    assert [int(number) for number, _ in colours] == list(range(12))
    assert len({colour for _, colour in colours}) == 12
    assert all(f"body.hide-{i} .of{i}{{" in html for i in range(12))
    data = json.loads(Page(html).scripts[0])
    assert [curve["run"] for curve in data["charts"][0]] == list(range(12))


def test_unreadable_parts_are_skipped_and_named_in_the_page(
    write_parquet: Any, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "broken")
    run.path.mkdir()
    lines = [
        {"step": 1, "fine": 0.25, "null": None, "text": "abc", "huge": 1e308, "least": 5e-324},
        {"step": 2, "fine": 0.75, "null": None, "list": [1], "huge": -1e308, "least": 0.0},
        {"step": 3, "whole": 10**400, "strange": None, "_nonfinite": {"strange": "oops"}},
        {"step": 10**30, "fine": 9.0, "timing_s/gen": 1e308},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    run.metrics_file.write_text(text + '{"step": 4, "fi')
    run.config_file.write_text("a: [1, 2")
    run.config_origins_file.write_text('{"a": "co')
    row = {"score": "high", "uid": "u", "prompt_text": "p", "response_text": "r"}
    write_parquet((run.rollouts / "step_1.parquet"), [row])
    write_parquet(run.validation_file(1), [row])
    page = Page(report(tmp_path, run))
    for note in (
        "null: skipped where it is not a number (2 lines)",
        "text: skipped where it is not a number (1 line)",
        "list: skipped where it is not a number (1 line)",
        "whole: skipped where it is not a number (1 line)",
        "strange: skipped where it is not a number (1 line)",
        "huge: not drawn where it is beyond ±1e+300 (2 lines)",
        "1 line skipped: the step is beyond",
        "skipped lines that are not metrics (1 line, the first being line 5)",
        "config.yaml cannot be read and is skipped: while parsing a flow sequence",
        "config_origins.json cannot be read and is skipped: Unterminated string",
        "rollouts/step_1.parquet: 'score' is skipped where it is not a number",
        "validation/step_1.parquet: 'score' is skipped where it is not a number",
    ):
        assert note in page.text, note
    drawn = [value for _, name, value in page.attributes if name == "data-name"]
    assert drawn == ["fine", "huge", "least"]
    assert not re.search("nan|inf", page.scripts[0])
    assert re.search(r"steps\s*1 to 3", page.text)


@pytest.mark.parametrize(
    "config", ["- 1\n", "x\n", "\x00", "a: &a [*a]\n", "a: [{2026-11-15: 1}]\n", "1: {2: 3}\n"]
)
@pytest.mark.parametrize("origins", ["", "[1]", "null", '{"a": 1}', "[" * 100_000])
def test_an_invalid_config_does_not_break_the_report(
    config: str, origins: str, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "odd")
    run.metrics.append({"a": 1.0}, 1)
    run.config_file.write_text(config)
    run.config_origins_file.write_text(origins)
    text = Page(report(tmp_path, run)).text
    assert "config.yaml" in text or "1.2" in text  # a note, or the keys
    assert ("config_origins.json" in text) == (origins != '{"a": 1}')


def test_a_run_has_the_name_of_its_experiment_or_else_of_its_folder(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run("run")
    config = {"trainer": {"experiment_name": "sums"}}
    run.write_config(config, {})
    assert "<title>run</title>" in report(tmp_path, run)
    run.write_config(config, {"trainer.experiment_name": "command line"})
    assert "<title>sums</title>" in report(tmp_path, run)
    twin = make_run("twin")
    twin.write_config(config, {"trainer.experiment_name": "command line"})
    assert "<title>run and twin</title>" in report(tmp_path, run, twin)
