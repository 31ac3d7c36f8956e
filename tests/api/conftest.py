"""A tiny policy, and a folder to work in."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = character_tokenizer()
    lm = tiny_lm(len(tokenizer), hidden=32, layers=1, mlp=48, max_positions=64, seed=3)
    return save_pretrained(lm, tokenizer, tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path
