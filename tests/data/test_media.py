from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hone.data.dataset import RLHFDataset
from hone.data.media import with_typed_parts
from hone.data.messages import PromptError


def test_image_marks_become_typed_parts_and_must_match_the_images() -> None:
    messages = [{"role": "user", "content": "<image>what is <image>this?"}]
    typed = with_typed_parts(messages, {"images": ["a", "b"]}, "images", "videos")
    assert typed[0]["content"] == [
        {"type": "image"},
        {"type": "text", "text": "what is "},
        {"type": "image"},
        {"type": "text", "text": "this?"},
    ]
    with pytest.raises(PromptError, match="prompt has 2 <image>, column 'images' has 1"):
        with_typed_parts(messages, {"images": ["a"]}, "images", "videos")


def test_a_data_set_with_a_processor_gives_typed_parts_to_agent_loops(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str]
) -> None:
    row = {"prompt": [{"role": "user", "content": "<image>what?"}], "images": ["a"]}
    data = RLHFDataset(write_jsonl([row]), tokenizer, config(), processor=object())
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    assert data[0]["raw_prompt"] == [{"role": "user", "content": parts}]
