from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone.config.data import CustomClassConfig
from hone.data.create import create_rl_dataset, create_train_loader
from hone.data.dynamic import DynamicGenDataset
from hone.data.rows import DataError

GENERATOR = """
from hone.data import AbstractDataGenerator

class Counting(AbstractDataGenerator):
    made = 0
    def generate(self, dataset):
        self.made += 1
        return [{"prompt": f"new {self.made} of {len(dataset)}"}]
    def state_dict(self):
        return {"made": self.made}
    def load_state_dict(self, state):
        self.made = state["made"]

class Idle:
    def __init__(self, config):
        pass
"""


def test_a_generator_adds_rows_after_each_batch_and_resumes(
    tokenizer: Any,
    config: Any,
    write_jsonl: Callable[..., str],
    make_rows: Any,
    tmp_path: Path,
) -> None:
    file = tmp_path / "generator.py"
    file.write_text(GENERATOR)
    settings = config(datagen=CustomClassConfig(str(file), "Counting"))
    path = write_jsonl(make_rows(4))

    def start() -> Any:
        data = create_rl_dataset(path, settings, tokenizer)
        return create_train_loader(settings, data, 2, run_seed=0)

    def run(loader: Any, count: int) -> list[Any]:
        batches = []
        for _ in range(count):
            batch = loader.next_batch()
            batches.append([list(batch["uid"]), [m[0]["content"] for m in batch["raw_prompt"]]])
            assert loader.on_batch_end(batch) == 1
        return batches

    expected = run(start(), 12)
    stopped = start()
    run(stopped, 5)
    resumed = start()
    resumed.load_state_dict(stopped.state_dict())
    assert run(resumed, 7) == expected[5:]
    assert any("new" in text for _, texts in expected for text in texts)


def test_added_prompts_that_are_too_long_are_left_out_like_those_of_files(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str], make_rows: Any
) -> None:
    settings = config(filter_overlong_prompts=True, max_prompt_length=64)
    data = create_rl_dataset(write_jsonl(make_rows(2)), settings, tokenizer)
    data.append([{"prompt": "x" * 100}, {"prompt": "short"}])  # type: ignore[attr-defined]
    assert [data[i]["raw_prompt"][0]["content"] for i in range(len(data))][2:] == ["short"]
    assert data.num_overlong_rows == 1  # type: ignore[attr-defined]


def test_validation_data_do_not_grow(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str], make_rows: Any, tmp_path: Path
) -> None:
    (tmp_path / "generator.py").write_text(GENERATOR)
    settings = config(datagen=CustomClassConfig(str(tmp_path / "generator.py"), "Counting"))
    data = create_rl_dataset(write_jsonl(make_rows(2)), settings, tokenizer, is_train=False)
    assert not isinstance(data, DynamicGenDataset)


def test_a_generator_without_generate_is_refused(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str], make_rows: Any, tmp_path: Path
) -> None:
    (tmp_path / "generator.py").write_text(GENERATOR)
    path = write_jsonl(make_rows(2))
    for class_name, message in [
        ("Idle", "needs a method generate"),
        (None, "needs the name of the class"),
    ]:
        settings = config(datagen=CustomClassConfig(str(tmp_path / "generator.py"), class_name))
        with pytest.raises(DataError, match=message):
            create_rl_dataset(path, settings, tokenizer)
