from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone.config.data import CustomClassConfig, SamplerConfig
from hone.data.create import (
    create_rl_dataset,
    create_rl_sampler,
    create_run_dataset,
    create_train_loader,
    create_val_loader,
)
from hone.data.rows import DataError

PLUG_IN = """
from hone.data import AbstractSampler, RLHFDataset

class Shouting(RLHFDataset):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "shout": "!"}
    def on_batch_end(self, batch):
        return [{"prompt": f"harder than {batch['raw_prompt'][0][0]['content']}"}]

class Backwards(AbstractSampler):
    def __iter__(self):
        return iter(range(len(self) - 1, -1, -1))

class NotAnything:
    pass
"""


@pytest.fixture
def plug_in(tmp_path: Path) -> str:
    path = tmp_path / "plug_in.py"
    path.write_text(PLUG_IN)
    return str(path)


@pytest.mark.parametrize("name", ["bad.jsonl", "b*.jsonl"])
def test_an_error_in_a_validation_file_says_how_to_train_without_it(
    name: str, tokenizer: Any, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.jsonl").write_text("5\n")
    monkeypatch.setenv("VALIDATION_FOLDER", str(tmp_path))
    settings = config(val_files=(f"$VALIDATION_FOLDER/{name}",))
    with pytest.raises(DataError, match="trains without validation"):
        create_run_dataset(None, settings, tokenizer, is_train=False)


def test_rows_in_memory_are_limited_like_those_of_files(
    tokenizer: Any, config: Any, make_rows: Any
) -> None:
    settings, rows = config(train_max_samples=3, val_max_samples=2), make_rows(4)
    assert len(create_run_dataset(rows, settings, tokenizer, is_train=True)) == 3
    assert len(create_run_dataset(rows, settings, tokenizer, is_train=False)) == 2


def test_a_users_dataset_class_with_its_hook_is_used_and_resumes(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str], make_rows: Any, plug_in: str
) -> None:
    settings = config(custom_cls=CustomClassConfig(plug_in, "Shouting"), seed=1)
    path = write_jsonl(make_rows(4))

    def start() -> Any:
        data = create_rl_dataset(path, settings, tokenizer)
        return create_train_loader(settings, data, 2)

    loader = start()
    for _ in range(3):
        batch = loader.next_batch()
        assert list(batch["shout"]) == ["!", "!"]
        assert loader.on_batch_end(batch) == 1
    state = loader.state_dict()
    resumed = start()
    resumed.load_state_dict(state)
    assert [list(resumed.next_batch()["uid"]) for _ in range(5)] == [
        list(loader.next_batch()["uid"]) for _ in range(5)
    ]


def test_a_users_sampler_decides_the_order(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str], make_rows: Any, plug_in: str
) -> None:
    settings = config(sampler=SamplerConfig(plug_in, "Backwards"))
    data = create_rl_dataset(write_jsonl(make_rows(4)), settings, tokenizer)
    loader = create_train_loader(settings, data, 2)
    assert list(loader.next_batch()["index"]) == [3, 2]


def test_weights_mix_the_files_in_every_batch(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str], make_rows: Any
) -> None:
    files = [
        write_jsonl(make_rows(n, source=name), f"{name}.jsonl")
        for n, name in [(40, "gsm8k"), (8, "math"), (20, "code")]
    ]
    settings = config(dataset_weights=(0.5, 0.3, 0.2), seed=3)
    data = create_rl_dataset(files, settings, tokenizer)
    loader = create_train_loader(settings, data, 10)
    for _ in range(6):
        sources = list(loader.next_batch()["data_source"])
        assert [sources.count(name) for name in ("gsm8k", "math", "code")] == [5, 3, 2]


def test_the_run_seed_stands_in_for_an_unset_data_seed(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str], make_rows: Any
) -> None:
    path = write_jsonl(make_rows(20))
    data = create_rl_dataset(path, config(), tokenizer)

    def first(run_seed: int, **changes: Any) -> list[str]:
        loader = create_train_loader(config(**changes), data, 20, run_seed)
        return list(loader.next_batch()["uid"])

    assert first(1) == first(1) != first(2)
    assert first(1, seed=5) == first(2, seed=5)


def test_validation_takes_all_rows_at_once_or_batches_with_the_tail(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str], make_rows: Any
) -> None:
    data = create_rl_dataset(write_jsonl(make_rows(5)), config(), tokenizer)
    batches_of_all_rows = list(create_val_loader(config(), data).first_epoch())
    assert [list(batch["index"]) for batch in batches_of_all_rows] == [[0, 1, 2, 3, 4]]
    batches = create_val_loader(config(val_batch_size=2), data).first_epoch()
    assert [len(batch["uid"]) for batch in batches] == [2, 2, 1]


def test_mistakes_in_the_names_are_explained(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str], make_rows: Any, plug_in: str
) -> None:
    path = write_jsonl(make_rows(5))
    for custom_class, message in [
        (CustomClassConfig("no/such.py", "X"), "no such file"),
        (CustomClassConfig("no_such_module", "X"), "neither a file"),
        (CustomClassConfig(plug_in, "Shoting"), "has no 'Shoting'; it has .*Shouting"),
        (CustomClassConfig(plug_in, None), "data.custom_cls: .* needs the name of the class"),
        (CustomClassConfig(plug_in, "NotAnything"), "__len__ and"),
    ]:
        with pytest.raises(DataError, match=message):
            create_rl_dataset(path, config(custom_cls=custom_class), tokenizer)
    data = create_rl_dataset(path, config(), tokenizer)
    both = config(sampler=SamplerConfig(plug_in, "Backwards"), dataset_weights=(1.0,))
    with pytest.raises(DataError, match="both decide the order"):
        create_rl_sampler(both, data)


def test_modules_can_be_named_by_their_import_path(config: Any) -> None:
    settings = config(sampler=SamplerConfig("pkg://builtins", "list"))
    assert create_rl_sampler(config(), [0]) is None
    with pytest.raises(TypeError):
        create_rl_sampler(settings, [0])  # found, though list takes no data_source
