from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from hone.tracking.report import excerpt, render
from hone.tracking.report_data import RunData, collect_series
from hone.tracking.report_samples import Sample, ToolCall, Turn, read_samples


def run_of(label: str, rows: list[dict[str, Any]], **more: Any) -> RunData:
    return RunData(label, collect_series(rows), **more)


def section(name: str, runs: list[RunData]) -> str:
    """Returns the part of the page under one heading."""
    match = re.search(rf'<section id="{name}"><h2>.*?</h2>(.*?)</section>', render(runs), re.DOTALL)
    assert match is not None
    return match[1]


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub("<[^>]*>", " ", html))).strip()


@pytest.mark.parametrize("hostile", ["<b>", "</pre>", "&lt;", '"x"', "'x'"])
def test_text_is_escaped(hostile: str) -> None:
    html = section("summary", [run_of("r", [], notes=[hostile])])
    assert f"r: {hostile}" in text_of(html).replace("&lt;", hostile)
    assert f"r: {hostile}" not in html


def test_characters_that_hide_or_reverse_text_are_made_visible() -> None:
    assert excerpt("a\u202eb\x00c\x1b[31m\u200bd") == "a\\u202eb\\u0000c\\u001b[31m\\u200bd"
    assert excerpt("a\u061cb\xadc\U000e0041") == "a\\u061cb\\u00adc\\ue0041"
    assert excerpt("one\r\n\ttwo") == "one\n\ttwo"


def test_long_text_is_truncated_with_the_number_of_characters() -> None:
    assert excerpt("x" * 4100) == "x" * 4000 + " … 100 more characters"


def test_the_summary_gives_first_last_and_best() -> None:
    rows = [
        {"step": s, "reward/mean": v, "val/loss": v} for s, v in ((1, 0.5), (2, 0.75), (3, 0.25))
    ]
    rows.append({"step": 4, "reward/mean": float("nan")})
    text = text_of(section("summary", [run_of("r", rows)]))
    assert "steps 1 to 4" in text
    assert "reward/mean 0.5 → 0.25 (best 0.75 at 2)" in text
    assert "val/loss 0.5 → 0.25 (best 0.25 at 3)" in text


def test_a_run_without_a_metric_has_a_dash_in_the_summary() -> None:
    runs = [run_of("a", [{"step": 1, "accuracy": 1.0}]), run_of("b", [], notes=["nothing yet"])]
    text = text_of(section("summary", runs))
    assert "accuracy 1 → 1 (best 1 at 1) –" in text
    assert "b: nothing yet" in text


def test_every_metric_has_one_chart_and_its_data_in_the_same_order() -> None:
    rows = [
        {"step": 1, "val-core/x/acc/mean@1": 1.0, "actor/lr": 2.0, "actor/entropy": 3.0, "z": 4.0}
    ]
    page = render([run_of("r", rows)])
    html = page[page.index('<section id="curves">') : page.index('<section id="time">')]
    data = json.loads(re.findall('id="data">(.*?)</script>', page)[0])["charts"]
    names = re.findall('data-name="([^"]+)"', html)
    assert names == ["val-core/x/acc/mean@1", "actor/entropy", "actor/lr", "z"]
    assert [curves[0]["values"] for curves in data] == [[1.0], [3.0], [2.0], [4.0]]
    assert re.findall(r"<details( open)?><summary>([\w-]+)", html) == [
        (" open", "overview"),
        ("", "actor"),
        ("", "z"),
    ]


def test_time_is_summed_by_part_with_the_rest_as_other() -> None:
    rows = [
        {
            "step": s,
            "timing_s/gen": 6.0,
            "timing_s/update_actor": 2.0,
            "timing_s/step": 10.0,
            "timing_s/agent_loop/tool_calls/max": 99.0,
            "timing_s/gen_max": 6.0,
        }
        for s in (1, 2)
    ]
    text = text_of(section("time", [run_of("r", rows)]))
    assert "gen 12.00 60.0% 2 6 update_actor 4.00 20.0% 2 2 other 4.00 20.0%" in text
    assert "99" not in text
    assert "overlap" not in text


def test_parts_that_sum_to_more_than_the_step_are_noted() -> None:
    rows = [{"step": 1, "timing_s/gen": 6.0, "timing_s/adv": 6.0, "timing_s/step": 10.0}]
    assert "parts overlap" in section("time", [run_of("r", rows)])


def test_validation_and_checkpoints_are_not_part_of_the_step() -> None:
    rows = [
        {"step": 0, "timing_s/testing": 2.0},
        {"step": 1, "timing_s/gen": 9.0, "timing_s/testing": 5.0, "timing_s/step": 10.0},
    ]
    text = text_of(section("time", [run_of("r", rows)]))
    assert "gen 9.00 52.9% 1 9 testing 7.00 41.2% 2 3.5 other 1.00 5.9%" in text
    assert "overlap" not in text


def test_equal_metrics_share_one_chart_and_one_row_of_the_summary() -> None:
    def row(step: int) -> dict[str, float]:
        score = step / 3
        return {"step": step, "accuracy": score, "reward/mean": score * (1 + 1e-7), "x/y": score}

    runs = [run_of("r", [row(step) for step in range(3)])]
    html = section("curves", runs)
    assert re.findall('data-name="([^"]+)"', html) == ["accuracy = reward/mean = x/y"]
    summary = text_of(section("summary", runs))
    assert "accuracy = reward/mean 0 → 0.6667" in summary


def test_constant_metrics_have_no_chart_but_a_row_with_their_value() -> None:
    rows = [
        {"step": s, "actor/ppo_kl": 0.0, "actor/lr": 1e-6, "reward/mean": s / 2} for s in (1, 2)
    ]
    html = section("curves", [run_of("r", rows), run_of("other", [{"step": 1, "actor/lr": 2e-6}])])
    assert re.findall('data-name="([^"]+)"', html) == ["reward/mean"]
    assert "r other actor/lr 1e-06 2e-06 actor/ppo_kl 0 –" in text_of(html)


@pytest.mark.parametrize(
    ("ground_truth", "shown"),
    [('"42"', "expected 42"), ("[1, 2]", "expected [1, 2]"), ("null", None), (None, None)],
)
def test_the_expected_answer_is_beside_a_response(
    ground_truth: str | None, shown: str | None, tmp_path: Path, write_parquet: Any, rows_of: Any
) -> None:
    file = tmp_path / "step_1.parquet"
    write_parquet(file, [rows_of(1, "u", 1.0, ground_truth=ground_truth)])
    samples = read_samples(1, file, [])
    run = run_of("r", [], best=samples, validation={"prompt u": samples})
    for name in ("best-and-worst-responses", "validation-samples"):
        text = text_of(section(name, [run]))
        assert "response u at 1" in text
        assert ("expected" in text) == (shown is not None)
        assert shown is None or shown in text


def test_the_headline_is_the_last_held_out_result() -> None:
    rows = [{"step": s, "reward/mean": 0.5, "val-core/x/acc/mean@1": s / 10} for s in (1, 4)]
    html = section("summary", [run_of("r", rows)])
    assert "<b>0.4</b>" in html
    assert "from 0.1" in html


def test_each_run_has_a_headline_of_its_own_metrics() -> None:
    runs = [run_of(n, [{"step": 1, f"val-core/{n}/acc/mean@1": 0.5}]) for n in ("a", "b")]
    tiles = section("summary", runs).partition("<table>")[0]
    assert (
        text_of(tiles)
        == "a 0.5 from 0.5 · val-core/a/acc/mean@1 b 0.5 from 0.5 · val-core/b/acc/mean@1"
    )


def test_hiding_a_run_hides_all_of_its_content() -> None:
    runs = [
        run_of(name, [{"step": 1, "accuracy": 1.0, "timing_s/step": 1.0}], config={"lr": "1"})
        for name in ("first", "second")
    ]
    for name in ("summary", "time", "validation-samples", "best-and-worst-responses", "config"):
        html = section(name, runs)
        assert 'class="of1"' in html
        without = re.sub(r'<(\w+) class="[^"]*\bof1\b[^"]*">.*?</\1>', "", html, flags=re.DOTALL)
        assert "second" in html
        assert "second" not in without, name


MULTI_TURN = Sample(
    step=7,
    uid="u",
    prompt="6*7?",
    response="all of it",
    score=1.0,
    turns=(
        Turn("assistant", "let me <look>", None, (ToolCall('find(x="</pre>")', -0.05),)),
        Turn("tool", "41"),
        Turn("assistant", "42", 0.5, reward=0.25, tokens=2),
        Turn("<judge>", "well done"),
    ),
    trajectory_scores={"find": 0.25},
)


def test_a_multi_turn_response_shows_roles_and_rewards() -> None:
    run = run_of("r", [], best=[MULTI_TURN], validation={"6*7?": [MULTI_TURN]})
    for html in (section("best-and-worst-responses", [run]), section("validation-samples", [run])):
        assert (
            'assistant let me <look> called find(x="</pre>") · reward -0.05 tool 41 '
            "assistant · 2 tokens, mask 1 · reward 0.25 · score 0.5 42 <judge> well done "
            "score of the trajectory: find 0.25"
        ) in text_of(html)
        assert "all of it" not in html
        classes = re.findall('class="turn (\\w+)"', html)
        assert classes == ["assistant", "tool", "assistant", "environment"]
        assert not re.search("<(look|judge)>", html)


def test_a_run_without_responses_has_one_message() -> None:
    text = text_of(section("best-and-worst-responses", [run_of("r", [])]))
    assert text == "r no scored responses of training steps"


def test_a_run_without_timers_has_a_message() -> None:
    assert "no timing_s/" in section("time", [run_of("r", [{"step": 1, "a": 1.0}])])


def test_config_rows_carry_origins_and_mark_differences() -> None:
    a = run_of("a", [], config={"lr": "1", "clip": "0.2"}, origins={"lr": "command line"})
    b = run_of("b", [], config={"lr": "2", "clip": "0.2", "new": "<x>"})
    html = section("config", [a, b])
    rows = {
        m[1]: (m[0], text_of(m[2]))
        for m in re.findall(r'<tr class="([^"]+)" data-name="([^"]+)">(.*?)</tr>', html, re.DOTALL)
    }
    assert rows["lr"] == ("setting differs", "lr 1 command line 2")
    assert rows["clip"] == ("setting", "clip 0.2 default 0.2")
    assert rows["new"] == ("setting differs", "new – <x>")


def test_many_notes_are_truncated_and_counted() -> None:
    text = text_of(section("summary", [run_of("r", [], notes=[f"note {i}" for i in range(25)])]))
    assert "note 19" in text
    assert "note 20" not in text
    assert "and 5 more" in text
