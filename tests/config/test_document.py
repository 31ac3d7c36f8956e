"""docs/config.md is generated and current."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

import hone
from hone.config.document import document, rollout_yaml
from hone.config.keys import leaves
from hone.config.states import rules
from hone.config.trees import TREES

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_what_the_schema_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), (
        "run: python -m hone.config.document > docs/config.md"
    )


def test_verls_rollout_file_holds_the_defaults_of_the_schema() -> None:
    file = Path(hone.__file__).parent / "trainer" / "config" / "rollout" / "rollout.yaml"
    assert file.read_text(encoding="utf-8") == rollout_yaml(), (
        "run: python -m hone.config.document rollout > hone/trainer/config/rollout/rollout.yaml"
    )
    rollout = OmegaConf.load(file)
    assert "function_tool_path" in rollout.multi_turn
    assert rollout.multi_turn.function_tool_path is None


def test_the_appendix_holds_every_neutral_and_refused_key() -> None:
    appendix = document().partition("## Other keys and values")[2]
    assert all(
        f"`{rule.pattern}` | {rule.state} |" in appendix for rule in rules("refused", "neutral")
    )


def test_every_key_has_its_row() -> None:
    page = document()
    for tree in TREES.values():
        for info in leaves(tree.root).values():
            assert f"| `{info.key.rpartition('.')[2]}` | " in page, info.key


def test_docstrings_of_parents_are_found() -> None:
    leaf = leaves(TREES["ppo_trainer"].root)["actor_rollout_ref.rollout.temperature"]
    assert leaf.doc.startswith("Softmax temperature")
