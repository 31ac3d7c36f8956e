"""docs/config.md is generated and current."""

from __future__ import annotations

from pathlib import Path

from hone.config.describe import describe_keys, field_docs
from hone.config.document import STATES, counts, document
from hone.config.rollout import RolloutConfig
from hone.config.trees import TREES

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_what_the_schema_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), (
        "run: python -m hone.config.document > docs/config.md"
    )


def test_counts_cover_every_key() -> None:
    for name, count in counts().items():
        assert sum(count.values()) == len(describe_keys(TREES[name]))
        assert set(count) <= set(STATES)


def test_every_key_has_its_row() -> None:
    page = document()
    for tree in TREES.values():
        for info in describe_keys(tree):
            assert f"| `{info.key.rpartition('.')[2]}` | " in page, info.key


def test_docstrings_of_parents_are_found() -> None:
    assert field_docs(RolloutConfig)["temperature"].startswith("Softmax temperature")
