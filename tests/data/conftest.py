"""Fixtures: a character tokenizer with a ChatML template, settings, and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hone.config.data import DataConfig

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(chat_template: str | None) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>"]
    characters = [*map(chr, range(32, 127)), "\n"]
    vocab = {token: i for i, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
    )
    fast.chat_template = chat_template
    return fast


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return build_tokenizer(CHATML)


@pytest.fixture(scope="session")
def plain_tokenizer() -> Any:
    """A tokenizer without a chat template."""
    return build_tokenizer(None)


@pytest.fixture(scope="session")
def tool_tokenizer() -> Any:
    """A tokenizer whose template starts with the first tool's name."""
    return build_tokenizer("{% if tools %}{{ tools[0].function.name }}\n{% endif %}" + CHATML)


@pytest.fixture(scope="session")
def forgetful_tokenizer() -> Any:
    """A tokenizer whose template drops `THINK` from all assistant turns but the last."""
    dropped = CHATML.replace(
        "m['content'] +",
        "(m['content'] if loop.last else m['content'].replace('THINK ', '')) +",
    )
    return build_tokenizer(dropped)


@pytest.fixture
def config() -> Callable[..., DataConfig]:
    """`config(max_prompt_length=8)`: the data settings of the package, with some changed."""
    base = DataConfig(tool_config_path=None, trust_remote_code=False)
    return lambda **changes: replace(base, **changes)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(rows: list[Any], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


def make_rows(count: int, start: int = 0, source: str = "arithmetic") -> list[dict[str, Any]]:
    return [
        {
            "data_source": source,
            "prompt": f"{i}+1=",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(start, start + count)
    ]


@pytest.fixture(name="make_rows")
def make_rows_fixture() -> Callable[..., list[dict[str, Any]]]:
    return make_rows
