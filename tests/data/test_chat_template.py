"""Chat templates are third-party code with limits on time, memory and text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hone.data import chat_template, template_trial
from hone.data.chat_template import BrokenTemplate, render_chat
from hone.data.check import check_file
from hone.data.dataset import RLHFDataset
from hone.data.messages import PromptError
from hone.data.prompt_ids import render_prompt

from .conftest import CHATML, build_tokenizer

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits renderings to 0.2 CPU seconds and clears the cache of templates."""
    monkeypatch.setattr(chat_template, "RENDER_CPU_S", 0.2)
    monkeypatch.setattr(chat_template, "_template_faults", {})


def test_a_template_knows_one_date_and_no_other_day() -> None:
    date = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert render_chat(MESSAGES, build_tokenizer(date)) == "26 Jul 2024hi"
    own = "{{ date_string or strftime_now('%d') }}"
    options = {"date_string": "1 Jan 2030"}
    assert render_chat(MESSAGES, build_tokenizer(own), None, options) == "1 Jan 2030"


@pytest.mark.parametrize("draw", ["{{ [1, 2] | random }}", "{{ lipsum() }}"])
def test_a_template_that_draws_at_random_is_refused(draw: str) -> None:
    with pytest.raises(PromptError, match=r"cannot render .* uses `random` or `lipsum`"):
        render_prompt(MESSAGES, build_tokenizer(draw))


DOUBLING = (
    "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}"
)


@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (LOOP, "does not end within 0.2 s"),
        ("{{ 9 ** (9 ** 9) }}", "does not end within 0.2 s"),
        ("{{ 'x' * 10 ** 10 }}", "writes more than"),
        ("{{ 'x' * 10 ** 5 }}", "writes more than"),
        (DOUBLING, "writes more than"),
    ],
)
def test_a_template_that_never_ends_or_writes_too_much_is_named(
    template: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "writes more than":
        monkeypatch.setattr(chat_template, "RENDER_CPU_S", 5.0)
        monkeypatch.setattr(chat_template, "TRIAL_MEMORY_BYTES", 1 << 28)
        monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 1 << 16)
    tokenizer = build_tokenizer(template)
    tokenizer.name_or_path = "models/hostile"
    for _ in range(2):  # the second time without another trial
        with pytest.raises(BrokenTemplate, match=rf"template of models/hostile {fault}"):
            render_prompt(MESSAGES, tokenizer)


@pytest.mark.usefixtures("short_limits")
def test_a_loop_that_only_some_rows_enter_is_interrupted() -> None:
    tokenizer = build_tokenizer("{% if messages|length > 1 %}" + LOOP + "{% endif %}ok")
    assert tokenizer.decode(render_prompt(MESSAGES, tokenizer)) == "ok"
    with pytest.raises(BrokenTemplate, match="does not end"):
        render_prompt(MESSAGES * 2, tokenizer)
    assert tokenizer.decode(render_prompt(MESSAGES, tokenizer)) == "ok"


@pytest.mark.usefixtures("short_limits")
def test_a_broken_template_is_no_bad_row(config: Any, write_jsonl: Any) -> None:
    """Skipping the row would not help, because every row has the same template."""
    path = write_jsonl([{"prompt": "a"}] * 3)
    settings = config(on_bad_row="skip", filter_overlong_prompts=True)
    with pytest.raises(BrokenTemplate):
        RLHFDataset(path, build_tokenizer(LOOP), settings)
    status, report = check_file(path, tokenizer=build_tokenizer(LOOP))
    assert (status, "does not end" in report) == (1, True)


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ messages.nothing.at_all }}", "{% for %}", "{{ [1][7] + 1 }}"]
)
def test_a_template_that_raises_is_a_prompt_error(template: str) -> None:
    with pytest.raises(PromptError, match="cannot render"):
        render_prompt(MESSAGES, build_tokenizer(template))


def test_a_template_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried_templates: list[str] = []

    def trial(template: str, variables: Any) -> None:
        tried_templates.append(template)

    monkeypatch.setattr(chat_template, "_template_faults", {})
    monkeypatch.setattr(chat_template, "_find_fault", trial)
    for text in ("a", "b", "c"):
        render_prompt(text, build_tokenizer(CHATML))
    assert tried_templates == [CHATML]


def test_a_template_that_cannot_be_tried_is_still_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_template_faults", {})
    monkeypatch.setattr("sys.executable", "/no/such/python")
    assert render_prompt(MESSAGES, build_tokenizer(CHATML))


def test_a_trial_that_a_signal_to_the_whole_program_ends_finds_no_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number, fault in ((2, None), (15, None), (11, "crashes Python (signal 11)")):
        script = tmp_path / f"trial_{number}.py"
        script.write_text(
            "import os, signal\n"
            f"signal.signal({number}, signal.SIG_DFL)\n"
            f"os.kill(os.getpid(), {number})\n"
        )
        monkeypatch.setattr(template_trial, "__file__", str(script))
        assert chat_template._find_fault("{{ messages }}", {"messages": MESSAGES}) == fault
