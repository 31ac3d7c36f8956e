"""Mistakes of a new user: each is told in a few lines that name what, got, where and what to do.

`HONE_WRITE_MISTAKES=1 python -m pytest tests/mistakes` writes docs/mistakes.md, which this test keeps true.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hone import cli
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.tracking.console import screen

from . import data, folders, plugins, programs, settings
from .cases import FILES, Mistake

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mistakes.md"
AREAS = {
    "Command line and settings": settings.MISTAKES,
    "Data": data.MISTAKES,
    "Models, run folders, resuming": folders.MISTAKES,
    "Your own code: rewards, tools, loops": plugins.MISTAKES,
    "SFT, generate, eval and the other programs": programs.MISTAKES,
}
ALL = [mistake for mistakes in AREAS.values() for mistake in mistakes]
PAGE_PYTHON = (3, 11)
MOST_LINES = 3
LONGEST = 500
HEAD = """# Mistakes and their error messages

To look up an error message, search this page for a part of it. A mistake ends a program with exit code
2 (a failed check: 1) and one sentence; the traceback, if it helps, is in `error.log` of the run folder.
Mistakes that can be detected before the models load are reported before. Lines marked *goes on* are
warnings. A test makes each of these mistakes and writes this page.
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    tokenizer = character_tokenizer()
    lm = tiny_lm(len(tokenizer), hidden=16, layers=1, heads=2, mlp=16, max_positions=512)
    return save_pretrained(lm, tokenizer, folder / "model")


@pytest.fixture(scope="module")
def answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """From a mistake to (exit code, standard output, standard error); each is made once."""
    known: dict[str, tuple[int, str, str]] = {}

    def answer(mistake: Mistake) -> tuple[int, str, str]:
        if mistake.title not in known:
            known[mistake.title] = _made(mistake, model, tmp_path_factory.mktemp("place"))
        return known[mistake.title]

    return answer


def _made(mistake: Mistake, model: Path, root: Path) -> tuple[int, str, str]:
    _furnish(root, model, mistake)
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        if mistake.arrange is not None:
            mistake.arrange(root)
        if not mistake.loads_model:
            _refuse_models(patch)
        screen.cache_clear()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main(mistake.command)
            except SystemExit as end:  # argparse
                code = int(end.code or 0)
    places = (str(root), str(model.parent))
    return code, *(_normalised(stream.getvalue(), places) for stream in (out, err))


def _furnish(root: Path, model: Path, mistake: Mistake) -> None:
    (root / "model").symlink_to(model)
    for name, content in {**FILES, **mistake.files}.items():
        text = content.encode() if isinstance(content, str) else content
        (root / name).write_bytes(text)


def _refuse_models(patch: pytest.MonkeyPatch) -> None:
    import transformers

    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("a model was loaded")

    patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)


def _normalised(text: str, places: tuple[str, ...]) -> str:
    for place in places:
        text = text.replace(f"{place}/", "").replace(place, "FOLDER")
    text = re.sub(r"process \d+ on \S+, since [^)]*", "process 123 on HOST", text)
    return re.sub(r"\S*/hone/", "hone/", text)


def _message(mistake: Mistake, out: str, err: str) -> list[str]:
    """The lines that answer the mistake: all of the error output, or the line of a warning."""
    if mistake.code == 0 or mistake.command[0] in ("data", "config"):
        lines = [line for line in (out + err).splitlines() if mistake.words[0] in line]
        return lines[:1] or err.splitlines()
    return [line for line in err.splitlines() if not line.startswith(("usage:", "   "))]


@pytest.mark.parametrize("mistake", ALL, ids=lambda mistake: mistake.title)
def test_a_mistake_is_told_in_a_few_words_before_models_load(
    mistake: Mistake, answers: Any
) -> None:
    code, out, err = answers(mistake)
    assert code == mistake.code, err
    assert "Traceback" not in out + err
    lines = _message(mistake, out, err)
    assert 1 <= len(lines) <= MOST_LINES, err
    told = "\n".join(lines)
    assert len(told) <= LONGEST, told
    for word in mistake.words:
        assert word in told
    assert not re.search(r"hone_extern_|object at 0x", told)


@pytest.mark.parametrize(
    "title",
    [
        "a misspelt verb",
        pytest.param("a misspelt estimator", marks=pytest.mark.slow),
        pytest.param("a data file that is not there", marks=pytest.mark.slow),
    ],
)
def test_the_command_in_a_process_of_its_own_says_the_same(
    title: str, answers: Any, model: Path, tmp_path: Path
) -> None:
    mistake = next(mistake for mistake in ALL if mistake.title == title)
    _furnish(tmp_path, model, mistake)
    done = subprocess.run(
        [sys.executable, "-m", "hone.cli", *mistake.command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PAGE.parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    code, _, err = answers(mistake)
    assert done.returncode == code
    assert _normalised(done.stderr, (str(tmp_path),)).splitlines()[-1] in err


def test_there_are_more_than_sixty_and_none_twice() -> None:
    titles = [mistake.title for mistake in ALL]
    assert len(titles) == len(set(titles)) > 60


@pytest.mark.skipif(
    sys.version_info[:2] != PAGE_PYTHON,
    reason="some words are Python's own, and the page is of 3.11",
)
def test_the_page_shows_every_mistake_with_its_message(answers: Any) -> None:
    sections = [HEAD]
    for area, mistakes in AREAS.items():
        sections.append(f"\n## {area}\n\n| mistake | message |\n|---|---|\n")
        for mistake in mistakes:
            told = " ⏎ ".join(_message(mistake, *answers(mistake)[1:]))
            goes_on = " *goes on*" if mistake.code == 0 else ""
            cell = told.replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
            sections.append(f"| {mistake.title}{goes_on} | {cell} |\n")
    page = "".join(sections)
    if os.environ.get("HONE_WRITE_MISTAKES"):
        PAGE.write_text(page, encoding="utf-8")
    told = (
        "a message changed: HONE_WRITE_MISTAKES=1 python -m pytest tests/mistakes writes the page"
    )
    assert PAGE.read_text(encoding="utf-8") == page, told
