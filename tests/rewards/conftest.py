"""Fixtures: batches of text for reward managers, in which every character is one token."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hone.protocol import DataProto

EOS = 1


class CharTokenizer:
    """Token id = code point + 2; 0 is padding, 1 is the special end-of-turn token."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join("" if i < 2 and skip_special_tokens else chr(i - 2) for i in ids)


@pytest.fixture(scope="session")
def needs_sandbox() -> None:
    """Skips the test if programs cannot run in a box on this machine."""
    from hone.sandbox import SandboxUnavailable, run_python

    try:
        run_python("print(1)", timeout_s=30.0)
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox here: {error}")


@pytest.fixture
def tokenizer() -> CharTokenizer:
    return CharTokenizer()


@pytest.fixture
def make_batch() -> Callable[..., DataProto]:
    """`make_batch(texts, source, truths, masks=…, **columns)`; in masks '0' is an observation."""

    def make(
        texts: list[str],
        source: str | list[str] = "custom",
        truths: list[Any] | None = None,
        masks: list[str] | None = None,
        **columns: list[Any],
    ) -> DataProto:
        rows, width, prompt = len(texts), max(map(len, texts)) + 2, 3
        responses = torch.zeros(rows, width, dtype=torch.long)
        mask = torch.zeros(rows, width, dtype=torch.long)
        attention = torch.ones(rows, prompt + width, dtype=torch.long)
        for i, text in enumerate(texts):
            ids = [ord(c) + 2 for c in text] + ([EOS] if text else [])
            responses[i, : len(ids)] = torch.tensor(ids, dtype=torch.long)
            attention[i, prompt + len(ids) :] = 0
            digits = masks[i] if masks else "1" * len(ids)
            mask[i, : len(digits)] = torch.tensor([int(d) for d in digits], dtype=torch.long)
        sources = [source] * rows if isinstance(source, str) else source
        truths = truths if truths is not None else [None] * rows
        columns = {
            "data_source": sources,
            "reward_model": [{"style": "rule", "ground_truth": t} for t in truths],
            **columns,
        }
        return DataProto.from_dict(
            tensors={
                "prompts": torch.full((rows, prompt), 99),
                "responses": responses,
                "response_mask": mask,
                "attention_mask": attention,
            },
            non_tensors={name: object_array(values) for name, values in columns.items()},
        )

    return make


def object_array(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


@pytest.fixture
def scorer_file(tmp_path: Path) -> Callable[[str], str]:
    """Writes a user's reward file and returns its path."""

    def write(source: str, name: str = "my_reward.py") -> str:
        path = tmp_path / name
        path.write_text(source)
        return str(path)

    return write


@pytest.fixture
def shared_rows() -> Callable[[str], list[dict[str, Any]]]:
    """Reads the rows of a file in the shared data folder; skips the test if it is missing."""

    def read(name: str) -> list[dict[str, Any]]:
        root = Path(os.environ.get("HONE_SHARED_DATA", Path(__file__).parents[3] / "shared/data"))
        path = root / name
        if not path.is_file():
            pytest.skip(f"no shared data: {name}")
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt") as lines:
            return [json.loads(line) for line in lines]

    return read
