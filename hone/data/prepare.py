"""`hone data prepare NAME`: converts upstream or generated records to parquet rows."""

from __future__ import annotations

import argparse
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hone.data.preprocess import (
    arithmetic,
    countdown,
    maths,
    preferences,
    programs,
    search_qa,
)
from hone.data.preprocess.sources import MakeRow, Source, Splits, UpstreamDataset
from hone.data.rows import DataError, write_file, write_parquet
from hone.suggestions import suggestion
from hone.types import Settings

Builder = Callable[..., Splits]


@dataclass(frozen=True)
class DatasetSpec:
    """The functions and arguments that build one dataset."""

    source_builder: Builder | None  # builds rows from a source; None if they are only generated
    summary: str
    preset: Settings = field(default_factory=dict)  # builder arguments that are set
    generator: Builder | None = None  # generates rows if no source is given
    writes_examples: bool = False  # whether the first row of each split is also written as JSON


def _row_dataset(
    upstream: UpstreamDataset, make_row: MakeRow, summary: str, writes_examples: bool = False
) -> DatasetSpec:
    """Returns the spec of a dataset that has one row per record."""

    def build(source: Source) -> Splits:
        return source.build_rows(upstream, make_row)

    return DatasetSpec(build, summary, writes_examples=writes_examples)


def _gsm8k_dataset(kind: str, summary: str) -> DatasetSpec:
    return _row_dataset(maths.GSM8K, partial(maths.gsm8k_row, kind=kind), summary)


def _arithmetic_dataset(name: str, operations: str, description: str) -> DatasetSpec:
    preset = {"name": name, "operations": tuple(operations)}
    return DatasetSpec(
        None, f"{description} up to 999 (generated)", preset, arithmetic.tinyzero_splits
    )


DATASETS: dict[str, DatasetSpec] = {
    "gsm8k": _gsm8k_dataset("plain", "grade-school maths"),
    "gsm8k_multiturn_w_tool": _gsm8k_dataset("tool", "gsm8k with the calc_gsm8k_reward tool"),
    "gsm8k_tool_agent_loop": _gsm8k_dataset(
        "agent_loop", "gsm8k with the calc_gsm8k_reward tool, run by tool_agent"
    ),
    "gsm8k_multiturn_w_interaction": _gsm8k_dataset("interaction", "gsm8k with a simulated user"),
    "gsm8k_multiturn_sft": _gsm8k_dataset("conversation", "gsm8k as conversations for SFT"),
    "math": _row_dataset(maths.MATH, maths.math_row, "competition maths", writes_examples=True),
    "countdown": DatasetSpec(
        countdown.upstream_splits,
        "reach a target with given numbers (generated, or from upstream)",
        generator=countdown.generated_splits,
    ),
    "multiply": _arithmetic_dataset("multiply", "*", "products of numbers"),
    "arithmetic": _arithmetic_dataset("arithmetic", "+-*", "sums, differences, products"),
    "hellaswag": _row_dataset(
        preferences.HELLASWAG, preferences.hellaswag_row, "choose the ending of a text"
    ),
    "full_hh_rlhf": DatasetSpec(preferences.hh_rlhf_splits, "preferences as sft, rm and rl rows"),
    "geo3k": DatasetSpec(maths.geo3k_splits, "geometry with diagrams", {"with_tool": False}),
    "geo3k_multiturn_w_tool": DatasetSpec(
        maths.geo3k_splits, "geometry with the calc_geo3k_reward tool", {"with_tool": True}
    ),
    **{
        name: DatasetSpec(
            search_qa.question_splits,
            f"{name} questions in Search-R1's form",
            {"data_sources": name},
        )
        for name in search_qa.QUESTION_SETS
    },
    "search_r1": DatasetSpec(
        search_qa.question_splits, "several question sets merged (--data_sources a,b)"
    ),
    "preprocess_search_r1_dataset": DatasetSpec(
        search_qa.question_splits, "search_r1 in the form of verl's search tool", {"style": "tool"}
    ),
    "search_qa": DatasetSpec(
        search_qa.closed_world_splits, "questions answerable from the small wiki corpus"
    ),
    **{
        name: DatasetSpec(maths.benchmark_splits, f"maths problems of {name}", {"name": name})
        for name in maths.BENCHMARKS
    },
    "humaneval": _row_dataset(programs.HUMANEVAL, programs.humaneval_row, "complete a function"),
    "mbpp": DatasetSpec(programs.mbpp_splits, "write a function"),
    "leetcode": _row_dataset(
        programs.LEETCODE, programs.leetcode_row, "contest problems with assertions"
    ),
    "taco": _row_dataset(
        programs.TACO, programs.taco_row, "contest problems with input and output"
    ),
}

ALIASES = {
    "2wiki": "2wikimultihopqa",
    "arth": "arithmetic",
    "math_dataset": "math",
    "nq_search": "nq",
    "qa_search_train_merge": "search_r1",
    "qa_search_test_merge": "search_r1",
}


@dataclass(frozen=True)
class PrepareReport:
    """The written files and their row counts."""

    name: str
    rows: dict[str, int]  # file -> number of rows

    def __str__(self) -> str:
        width = max(map(len, self.rows), default=0)
        lines = [f"  {file:<{width}}  {count:>9,} rows" for file, count in self.rows.items()]
        return "\n".join([f"{self.name}:", *lines])


def find_dataset(name: str) -> DatasetSpec:
    dataset = DATASETS.get(ALIASES.get(name, name))
    if dataset is None:
        raise DataError(
            f"no data set is called {name!r}.{suggestion(name, [*DATASETS, *ALIASES])} "
            f"`hone data prepare` lists all {len(DATASETS)}, such as gsm8k, math and countdown"
        )
    return dataset


def prepare(
    name: str,
    *,
    local_dir: str | os.PathLike[str],
    source_dir: str | os.PathLike[str] | None = None,
    hub: bool = False,
    **options: Any,
) -> PrepareReport:
    """Converts a source to a dataset, or generates one; writes it to `<split>.parquet` files."""
    dataset = find_dataset(name)
    if source_dir is not None and hub:
        raise DataError("give either a source folder or the Hub, not both")
    is_generated = dataset.generator is not None and source_dir is None and not hub
    builder = dataset.generator if is_generated else dataset.source_builder
    if builder is None:
        raise DataError("this data set is generated; leave out the source folder and the Hub")
    option_names = _option_parameters(dataset, builder)
    if unknown := [key for key in options if key not in option_names]:
        names = ", ".join(option_names) or "none"
        raise DataError(f"{name} has no option {', '.join(unknown)}; it has {names}")
    for key, value in options.items():
        if key.endswith("_size") and value is not None and value < 1:
            raise DataError(f"{name}: --{key} {value} must be 1 or more rows")
    arguments = {**dataset.preset, **options}
    if not is_generated:
        arguments["source"] = Source(source_dir)
    folder = Path(local_dir).expanduser()
    row_counts: dict[str, int] = {}
    for split, rows in builder(**arguments).items():
        if not rows:
            raise DataError(f"split {split!r} has no rows; nothing was written for it")
        path = folder / f"{split}.parquet"
        write_parquet(rows, path)
        row_counts[str(path)] = len(rows)
        if dataset.writes_examples:
            text = json.dumps(rows[0], ensure_ascii=False, indent=2) + "\n"
            with write_file(folder / f"{split}_example.json") as temporary:
                temporary.write_text(text, encoding="utf-8")
    return PrepareReport(name, row_counts)


def _option_parameters(dataset: DatasetSpec, builder: Builder) -> Mapping[str, inspect.Parameter]:
    """Returns the builder's keyword arguments that `preset` does not set."""
    parameters = inspect.signature(builder).parameters.values()
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    return {keyword.name: keyword for keyword in keywords if keyword.name not in dataset.preset}


def argument_parser(name: str, program: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of `hone data prepare NAME` and of examples/data_preprocess/NAME.py."""
    dataset = find_dataset(name)
    parser = argparse.ArgumentParser(
        prog=program, description=f"Prepare {name}: {dataset.summary}."
    )
    parser.add_argument(
        "--local_dir", "--local_save_dir", required=True, help="folder for the parquet files"
    )
    parser.add_argument(
        "--source_dir",
        "--local_dataset_path",
        help="folder with the upstream files, for use without a network",
    )
    parser.add_argument("--hub", action="store_true", help="read from the Hugging Face Hub")
    options: dict[str, inspect.Parameter] = {}
    for builder in filter(None, (dataset.generator, dataset.source_builder)):
        options |= _option_parameters(dataset, builder)
    for option, parameter in options.items():
        parser.add_argument(
            f"--{option}",
            type=int if "int" in str(parameter.annotation) else str,
            default=argparse.SUPPRESS,
            help=f"default {parameter.default}",
        )
    return parser


def prepare_from_arguments(
    name: str, arguments: Sequence[str] | None = None, program: str | None = None
) -> PrepareReport:
    """Runs `prepare` with command-line options; the help shows the name `program`."""
    return prepare(name, **vars(argument_parser(name, program).parse_args(arguments)))


def script(name: str, arguments: Sequence[str] | None = None) -> str:
    """Returns the output of examples/data_preprocess/NAME.py; exits on a DataError."""
    try:
        return str(prepare_from_arguments(name, arguments))
    except DataError as error:
        raise SystemExit(f"error: {error}") from error
