"""The script of `hone completion bash` completes verbs and short keys in bash."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from hone import cli


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["quick"], "quickstart"),
        (["train", "ba"], "batch_size="),
        (["sft", "rew"], ""),
        (["report", "b"], ""),
    ],
)
def test_bash_completes_verbs_and_short_keys(
    words: list[str], completions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", "bash"]) == 0
    asks = f'COMP_WORDS=(hone {" ".join(words)}); COMP_CWORD={len(words)}; _hone; echo "${{COMPREPLY[@]}}"'
    script = f"{capsys.readouterr().out}\n{asks}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == (completions, "")


def test_the_script_of_zsh_names_verbs_and_short_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "zsh"]) == 0
    text = capsys.readouterr().out
    assert "compdef _hone hone" in text
    assert "train) compadd -S '' -- model= data=" in text
