"""Every form of data becomes the same rows, and a bad row is named or skipped."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf

from hone.config.data import DataConfig
from hone.data import reading
from hone.data.dataset import RLHFDataset
from hone.data.reading import (
    PURE_DATA_SOURCE,
    PURE_INSTRUCTION,
    collate_tensors,
    read_file,
    read_rows,
    rows_of,
)
from hone.data.rows import BadRowPolicy, DataError, write_parquet
from hone.data.values import is_missing
from hone.models.tiny import character_tokenizer
from hone.rewards.scores.table import default_compute_score

TOKENIZER = character_tokenizer()
ROWS = [
    {"data_source": "s", "prompt": f"{i}" * (i + 1), "reward_model": {}, "extra_info": {"index": i}}
    for i in range(4)
]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    return str(path)


def test_a_data_config_outside_a_runs_config_is_usable(file: str) -> None:
    dataset = RLHFDataset(file, TOKENIZER, DataConfig(prompt_format="raw"))
    assert dataset.settings.trust_remote_code is False
    assert dataset[0]["raw_prompt"] == "0"


def test_a_config_in_verls_form_needs_a_few_keys_only(file: str) -> None:
    config = OmegaConf.create(
        {"prompt_key": "prompt", "prompt_format": "raw", "max_prompt_length": 3, "my_own_key": 5}
        | {"filter_overlong_prompts": True, "cache_dir": "~/.cache"}
    )
    data = RLHFDataset(data_files=file, tokenizer=TOKENIZER, config=config, processor=None)
    assert len(data) == 3
    assert data.config.my_own_key == 5  # type: ignore[union-attr]
    assert [row["prompt"] for row in data.dataframe] == ["0", "11", "222"]  # type: ignore[attr-defined]


def test_every_step_is_called_where_it_is_overridden(file: str) -> None:
    class Mine(RLHFDataset):
        def _download(self, use_origin_parquet: bool = False) -> None:
            self.files_read = list(self.data_files)
            self.data_files = [file]

        def _read_files_and_tokenize(self) -> None:
            super()._read_files_and_tokenize()
            self.dataframe = [{**row, "mine": 1} for row in self.dataframe]  # type: ignore[attr-defined]

        def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
            return [row for row in dataframe if len(row["prompt"]) < 4]

        def _build_messages(self, example: dict[str, Any], key: str) -> Any:  # type: ignore[override]
            return f"{example.pop(key)}!"

    config = OmegaConf.create({"prompt_format": "raw"})
    data = Mine(["elsewhere.parquet"], TOKENIZER, config)
    assert data.files_read == ["elsewhere.parquet"]
    assert [row["raw_prompt"] for row in (data[i] for i in range(len(data)))] == [
        "0!",
        "11!",
        "222!",
    ]
    assert data[0]["mine"] == 1


def test_a_frame_of_any_kind_may_be_set() -> None:
    class Table:
        def to_list(self) -> list[dict[str, Any]]:
            return ROWS[:2]

    frames: list[Callable[[], Any]] = [lambda: ROWS[:2], Table]
    for frame in frames:

        class Mine(RLHFDataset):
            def _read_files_and_tokenize(self) -> None:
                self.dataframe = frame()  # noqa: B023

        assert len(Mine("none", TOKENIZER, {"prompt_format": "raw"})) == 2


def test_an_override_that_reads_nothing_is_an_error() -> None:
    class Nothing(RLHFDataset):
        def _read_files_and_tokenize(self) -> None: ...

    class Empty(RLHFDataset):
        def _read_files_and_tokenize(self) -> None:
            self.dataframe = []

    with pytest.raises(DataError, match=r"must set self\.dataframe"):
        Nothing("none", TOKENIZER, {})
    with pytest.raises(DataError, match="has no rows"):
        Empty("none", TOKENIZER, {})


def test_verls_collate_stacks_tensors_alone() -> None:
    rows = [{"ids": torch.arange(3), "messages": [{"a": i}], "n": [1] * i} for i in (1, 2)]
    batch = collate_tensors(rows)
    assert batch["ids"].shape == (2, 3)
    assert batch["messages"].shape == batch["n"].shape == (2,)
    assert batch["messages"][1] == [{"a": 2}]


def test_a_missing_value_of_a_data_frame_is_none() -> None:
    class Frame:
        columns = ("prompt", "agent_name")

        def to_dict(self, orient: str) -> list[dict[str, Any]]:
            assert orient == "records"
            return [{"prompt": "a", "agent_name": float("nan")}]

    frame: Any = Frame()
    assert rows_of(frame) == [{"prompt": "a", "agent_name": None}]


def test_pures_rows_have_a_ground_truth_and_the_instruction(
    tokenizer: Any, config: Any, tmp_path: Path
) -> None:
    rows = [
        {"question": "1+1?", "answer": "\\frac{4}{2}", "data_source": None},
        {"question": "2+2?", "answer": "null", "data_source": "math"},
    ]
    write_parquet(rows, tmp_path / "train.parquet")
    settings = config(prompt_key="question", prompt_format="raw", max_prompt_length=400)
    first, second = RLHFDataset(str(tmp_path / "train.parquet"), tokenizer, settings)
    assert first["raw_prompt"] == f"1+1?\n\n{PURE_INSTRUCTION}"
    assert (first["data_source"], second["data_source"]) == (PURE_DATA_SOURCE, "math")
    truth = first["reward_model"]["ground_truth"]
    assert default_compute_score(PURE_DATA_SOURCE, "so\n\n\\boxed{2}", truth) == 1.0
    assert default_compute_score(PURE_DATA_SOURCE, "so\n\n\\boxed{3}", truth) == 0.0
    assert is_missing(second["reward_model"]["ground_truth"])


def test_rows_with_a_reward_model_stay_and_worked_solutions_are_refused(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str]
) -> None:
    settings = config(prompt_key="question")
    row = {"question": "1+1?", "answer": "so 2", "reward_model": {"ground_truth": "2"}}
    (unchanged,) = RLHFDataset(write_jsonl([row]), tokenizer, settings)
    assert unchanged["reward_model"] == {"ground_truth": "2"}
    assert unchanged["raw_prompt"][0]["content"] == "1+1?"
    raw = {"question": "1+1?", "answer": "so\n#### 2"}
    with pytest.raises(DataError, match=r"row 0: 'answer' is a worked solution of GSM8K"):
        RLHFDataset(write_jsonl([raw]), tokenizer, settings)


NESTED_ROWS = [{"a": 1, "b": {"c": [1, 2]}}, {"a": 2, "b": {"c": []}}]


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    write_parquet(NESTED_ROWS, tmp_path / "x.parquet")
    lines = "".join(json.dumps(row) + "\n" for row in NESTED_ROWS)
    (tmp_path / "x.jsonl").write_text(lines)
    (tmp_path / "x.json").write_text(json.dumps(NESTED_ROWS, indent=1))
    (tmp_path / "lines.json").write_text(lines)
    with gzip.open(tmp_path / "x.jsonl.gz", "wt") as file:
        file.write(lines)
    for name in ("x.parquet", "x.jsonl", "x.json", "lines.json", "x.jsonl.gz"):
        store = read_rows(str(tmp_path / name), BadRowPolicy("raise"))
        assert [store[i] for i in range(len(store))] == NESTED_ROWS, name
        assert list(store.scan(["a"])) == [{"a": 1}, {"a": 2}], name


def test_several_files_are_one_store_with_the_location_of_each_row(tmp_path: Path) -> None:
    write_parquet(NESTED_ROWS, tmp_path / "x.parquet")
    (tmp_path / "y.jsonl").write_text('{"a": 3}\n')
    store = read_rows(
        [str(tmp_path / "x.parquet"), str(tmp_path / "y.jsonl")], BadRowPolicy("raise")
    )
    assert len(store) == 3
    assert store[2] == {"a": 3}
    assert store.locate(2) == (1, 0)
    assert store.where(1) == f"{tmp_path}/x.parquet, row 1"
    assert store.key(2)[1] == 0


def test_a_row_is_named_by_content_and_number_not_by_path(tmp_path: Path) -> None:
    for name in ("x.parquet", "copy.parquet"):
        write_parquet(NESTED_ROWS, tmp_path / name)
    first = read_rows(str(tmp_path / "x.parquet"), BadRowPolicy("raise"))
    copy = read_rows(str(tmp_path / "copy.parquet"), BadRowPolicy("raise"))
    assert first.key(1) == copy.key(1)
    assert first.fingerprint == copy.fingerprint


def test_a_file_listed_twice_keeps_two_names(tmp_path: Path) -> None:
    write_parquet(NESTED_ROWS, tmp_path / "x.parquet")
    store = read_rows([str(tmp_path / "x.parquet")] * 2, BadRowPolicy("raise"))
    assert len({store.key(i) for i in range(4)}) == 4


def test_a_line_that_is_not_json_is_named_with_file_and_row(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": \n[1]\n{"a": 4}\n')
    with pytest.raises(DataError, match=r"x\.jsonl, row 1: not JSON"):
        read_rows(str(path), BadRowPolicy("raise"))
    bad_rows = BadRowPolicy("skip")
    store = read_rows(str(path), bad_rows)
    assert [store[i]["a"] for i in range(len(store))] == [1, 4]
    assert store.where(1).endswith("row 3")
    assert bad_rows.counts == {"not json": 1, "not an object": 1}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.parquet", b"not parquet", "cannot be read"),
        ("x.jsonl", b"", "has no rows"),
        ("x.jsonl.gz", b"not gzip", "cannot be read"),
        ("x.json", b"[1, ", "cannot be read"),
        ("x.jsonl", b"\xff\xfe{}", "row 0: is not UTF-8"),
    ],
)
def test_an_unreadable_or_empty_file_is_named_or_skipped(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_rows(str(path), BadRowPolicy("raise"))
    (tmp_path / "good.jsonl").write_text('{"a": 1}\n')
    bad_rows = BadRowPolicy("skip")
    assert len(read_rows([str(path), str(tmp_path / "good.jsonl")], bad_rows)) == 1
    assert bad_rows.total == 1
    with pytest.raises(DataError, match="no rows could be read"):
        read_rows(str(path), BadRowPolicy("skip"))


def test_a_missing_file_stops_the_run_even_when_bad_rows_are_skipped(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_rows(str(tmp_path / "no.parquet"), BadRowPolicy("skip"))


def test_a_mistake_names_the_keys_that_the_program_has(tmp_path: Path) -> None:
    missing = tmp_path / "no.parquet"
    with pytest.raises(DataError, match=r"check data\.train_files and data\.val_files$"):
        read_rows(missing, BadRowPolicy("raise"))
    for files in (missing, tmp_path / "no*.parquet", []):
        with pytest.raises(DataError, match=r"check data\.path$"):
            read_rows(files, BadRowPolicy("raise"), "data.path")
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"data\.on_bad_row=skip"):
        read_rows(tmp_path / "bad.jsonl", BadRowPolicy("raise"))
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path / "bad.jsonl", BadRowPolicy("raise", policy_key=None))
    assert "on_bad_row" not in str(caught.value)


def test_an_unknown_suffix_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\.parquet, \.jsonl"):
        read_rows(str(tmp_path / "x.csv"), BadRowPolicy("raise"))


def test_a_separator_inside_a_string_does_not_end_a_line(tmp_path: Path) -> None:
    rows = [{"a": "x\u2028y\x85z"}, {"a": "z"}]
    for name in ("x.json", "x.jsonl"):
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (tmp_path / name).write_text("\r\n".join(lines), encoding="utf-8", newline="")
        assert list(read_rows(tmp_path / name, BadRowPolicy("raise")).scan()) == rows, name


HOSTILE_LINES = {
    b'{"a": "\\ud800"}': "row 1: contains a lone surrogate",
    b'{"\\uDFFF": 1}': "row 1: contains a lone surrogate",
    b'{"a": "\xff"}': "row 1: is not UTF-8 .byte 0xff",
    b'{"a": "\xed\xa0\x80"}': "row 1: is not UTF-8",
    b'{"a": "\x00"}': "row 1: contains a NUL",
    b"[" * 100_000: "row 1: not JSON: it is nested more than",
    b'{"a":' + b"[" * 90 + b"]" * 90 + b"}": "row 1: not JSON: it is nested more than",
    b'{"a": 1' + b"0" * 5000 + b"}": "row 1: not JSON: Exceeds the limit",
    b"5": "row 1: a int, not an object",
}


@pytest.mark.parametrize("line", HOSTILE_LINES, ids=lambda line: repr(line[:14]))
def test_a_hostile_line_is_a_bad_row_with_its_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": "good"}\n' + line + b'\n{"a": "\xc3\xa9 \\ud83d\\ude00"}\n')
    with pytest.raises(DataError, match=HOSTILE_LINES[line]):
        read_rows(str(path), BadRowPolicy("raise"))
    bad_rows = BadRowPolicy("skip")
    rows = read_rows(str(path), bad_rows)
    assert ([row["a"] for row in rows.scan()], bad_rows.total) == (["good", "é 😀"], 1)
    assert rows.where(1).endswith("row 2")


def test_hostile_rows_of_a_json_list_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b'[{"a": 1}, {"a": "\\udc00"}, {"a": "\xfe"}]')
    bad_rows = BadRowPolicy("skip")
    assert len(read_rows(str(path), bad_rows)) == 1
    assert [line.split(", row ")[1][:2] for line in bad_rows.examples] == ["1:", "2:"]
    path.write_bytes(b"[" * 100_000)
    with pytest.raises(DataError, match=r"x\.json: cannot be read: .*nested"):
        read_rows(str(path), BadRowPolicy("raise"))


def test_a_json_file_of_one_object_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for row in ({"prompt": "a"}, {"data": [{"prompt": "a"}]}):
        path.write_text(json.dumps(row, indent=1))
        assert list(read_rows(str(path), BadRowPolicy("raise")).scan()) == [row]
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert len(read_rows(str(path), BadRowPolicy("raise"))) == 2


def test_a_parquet_file_without_a_good_row_is_not_called_unreadable(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "x.parquet"
    offsets, content = pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")
    text = pa.Array.from_buffers(pa.string(), 1, [None, offsets, content])
    pq.write_table(pa.table({"prompt": text}), path)
    bad_rows = BadRowPolicy("skip")
    assert read_file(path, bad_rows) is None
    assert bad_rows.counts == {"not UTF-8": 1}


def test_parquet_rows_that_python_cannot_hold_are_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = pa.array([b"ok", b"\xed\xa0\x80", b"fine"], pa.binary()).view(pa.string())
    talks = pa.ListArray.from_arrays([0, 1, 2, 3], pa.StructArray.from_arrays([texts], ["content"]))
    days = pa.array([1, 2, 10**9], pa.date32())
    for name, column in {"talks": talks, "days": days}.items():
        pq.write_table(pa.table({"x": column}), tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match=r"talks\.parquet, row 1: not UTF-8"):
        read_rows(str(tmp_path / "talks.parquet"), BadRowPolicy("raise"))
    bad_rows = BadRowPolicy("skip")
    rows = read_rows([str(tmp_path / f"{name}.parquet") for name in ("talks", "days")], bad_rows)
    assert [rows.where(i)[-5:] for i in range(len(rows))] == ["row 0", "row 2", "row 0", "row 1"]
    assert bad_rows.counts == {"not UTF-8": 1, "unreadable value": 1}
    assert len(list(rows.scan())) == 4


@pytest.mark.parametrize(
    ("name", "content"), [("x.jsonl", b'{"a": 1}\n'), ("x.json", b'[{"a": 1}]')]
)
def test_a_byte_order_mark_is_dropped(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert list(read_rows(str(tmp_path / name), BadRowPolicy("raise")).scan()) == [{"a": 1}]


def test_a_corrupt_gzip_file_is_unreadable(tmp_path: Path) -> None:
    import gzip

    content = bytearray(gzip.compress(b'{"a": 1}\n' * 1000))
    content[20:40] = b"\xff" * 20
    (tmp_path / "x.jsonl.gz").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(str(tmp_path / "x.jsonl.gz"), BadRowPolicy("raise"))


def test_rows_and_files_are_not_mixed() -> None:
    with pytest.raises(DataError, match="rows and files are mixed"):
        read_rows([{"prompt": "a"}, "b.jsonl"], BadRowPolicy("raise"))


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_parquet_file_that_decompresses_to_far_more_than_its_size_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr(reading, "MIN_BOMB_BYTES", 1 << 20)
    bomb, good = tmp_path / "bomb.parquet", tmp_path / "good.parquet"
    pq.write_table(
        pa.table({"prompt": ["x" * 100_000] * 1000}), bomb, row_group_size=10, compression="zstd"
    )
    pq.write_table(pa.table({"prompt": ["a", "b"]}), good, row_group_size=1)
    bad_rows = BadRowPolicy(policy)
    row_groups: list[int] = []
    plain = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda self, index: (row_groups.append(index), plain(self, index))[1],
    )
    if policy == "raise":
        with pytest.raises(DataError, match=r"bomb\.parquet: its .* bytes decompress to more than"):
            read_rows(str(bomb), bad_rows)
    else:
        store = read_rows([str(bomb), str(good)], bad_rows)
        assert [row["prompt"] for row in store.scan()] == ["a", "b"]
        assert bad_rows.counts == {"unreadable file": 1}
    assert 0 < max(row_groups) < 90
