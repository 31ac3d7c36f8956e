"""A tiny model folder and small data files for the programs around the loop."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.config.sft import SFTConfig
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.verl.dialect import load_config

MARKED_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
"""Like the tiny tokenizer's own, with an end token after each assistant turn."""


def tiny_model(folder: Path, seed: int = 0, **shape: Any) -> Path:
    """A fresh decoder of a few thousand parameters with a character tokenizer."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = MARKED_TEMPLATE
    sizes: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "mlp": 32}
    lm = tiny_lm(len(tokenizer), **sizes | shape, max_positions=256, seed=seed)
    return save_pretrained(lm, tokenizer, folder)


def write_jsonl(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def sums(count: int) -> list[dict[str, Any]]:
    """`question` and `answer` rows."""
    return [{"question": f"{i}+{i % 7}=", "answer": str(i + i % 7)} for i in range(count)]


def prompts(count: int, source: str = "arithmetic") -> list[dict[str, Any]]:
    """Rows in the family's schema."""
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{i}+1="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": i + 1},
            "extra_info": {"split": "test", "index": i},
        }
        for i in range(count)
    ]


def sft_settings(folder: Path, model: Path, *more: str) -> list[str]:
    """A quick supervised run over a few sums."""
    return [
        f"data.train_files={write_jsonl(folder / 'train.jsonl', sums(20))}",
        f"model.path={model}",
        "data.train_batch_size=4",
        "optim.lr=1e-2",
        "trainer.logger=[jsonl]",
        *more,
    ]


def sft_config(settings: Sequence[str], folder: Path, *overrides: str) -> SFTConfig:
    run_folder = f"trainer.default_local_dir={folder}"
    return load_config([*settings, run_folder, *overrides], config_name="sft_trainer")
