"""`hone data prepare NAME`: upstream's records, or generated ones, become parquet rows.

One table names every data set; a data set's own options are its builder's keyword arguments.
Leaves out printing: callers get a report.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from hone.data.preprocess.sources import Source
from hone.data.rows import DataError, write_parquet
from hone.types import Function, Row, Settings

_ROOM = "hone.data.preprocess"


@dataclass(frozen=True)
class Recipe:
    """How one data set is built."""

    builder: str
    """`module:function` below hone.data.preprocess."""
    summary: str
    fixed: Settings = field(default_factory=dict)
    """Arguments that make this variant."""
    generator: str | None = None
    """Builder that needs no source, used when none is named."""
    writes_examples: bool = False
    """Also write the first row of each split as JSON."""


def _qa(name: str) -> Recipe:
    return Recipe(
        "search_qa:splits", f"{name} questions in Search-R1's form", {"data_sources": name}
    )


def _benchmark(name: str) -> Recipe:
    return Recipe("math_benchmarks:splits", f"maths problems of {name}", {"name": name})


_BENCHMARKS = (
    *("math500", "aime24", "aime25", "amc23", "olympiadbench", "minerva_math"),
    *("svamp", "asdiv", "mawps", "dapo_math"),
)

RECIPES: dict[str, Recipe] = {
    "gsm8k": Recipe("gsm8k:splits", "grade-school maths", {"kind": "plain"}),
    "gsm8k_multiturn_w_tool": Recipe(
        "gsm8k:splits", "gsm8k with the calc_gsm8k_reward tool", {"kind": "tool"}
    ),
    "gsm8k_tool_agent_loop": Recipe(
        "gsm8k:splits", "the same, run by tool_agent", {"kind": "agent_loop"}
    ),
    "gsm8k_multiturn_w_interaction": Recipe(
        "gsm8k:splits", "gsm8k with a simulated user", {"kind": "interaction"}
    ),
    "gsm8k_multiturn_sft": Recipe(
        "gsm8k:splits", "gsm8k as conversations for SFT", {"kind": "conversation"}
    ),
    "math": Recipe("math_dataset:splits", "competition maths", writes_examples=True),
    "countdown": Recipe(
        "countdown:splits",
        "make a target from numbers (generated, or upstream's)",
        generator="countdown:generated_splits",
    ),
    "multiply": Recipe(
        "",
        "products of numbers up to 999 (generated)",
        {"name": "multiply", "operations": ("*",)},
        generator="arithmetic:tinyzero_splits",
    ),
    "arithmetic": Recipe(
        "",
        "sums, differences, products up to 999 (generated)",
        {"name": "arithmetic", "operations": ("+", "-", "*")},
        generator="arithmetic:tinyzero_splits",
    ),
    "hellaswag": Recipe("hellaswag:splits", "choose the ending of a text"),
    "full_hh_rlhf": Recipe("hh_rlhf:splits", "preferences as sft, rm and rl rows"),
    "geo3k": Recipe("geo3k:splits", "geometry with diagrams", {"with_tool": False}),
    "geo3k_multiturn_w_tool": Recipe(
        "geo3k:splits", "geometry with the calc_geo3k_reward tool", {"with_tool": True}
    ),
    "nq": _qa("nq"),
    "triviaqa": _qa("triviaqa"),
    "popqa": _qa("popqa"),
    "hotpotqa": _qa("hotpotqa"),
    "2wikimultihopqa": _qa("2wikimultihopqa"),
    "musique": _qa("musique"),
    "bamboogle": _qa("bamboogle"),
    "search_r1": Recipe("search_qa:splits", "several question sets merged (--data_sources a,b)"),
    "preprocess_search_r1_dataset": Recipe(
        "search_qa:splits", "the same in the form of verl's search tool", {"style": "tool"}
    ),
    "search_qa": Recipe(
        "search_qa:closed_world_splits", "questions answerable from the small wiki corpus"
    ),
    **{name: _benchmark(name) for name in _BENCHMARKS},
    "humaneval": Recipe("programs:humaneval_splits", "complete a function"),
    "mbpp": Recipe("programs:mbpp_splits", "write a function"),
    "leetcode": Recipe("programs:leetcode_splits", "contest problems with assertions"),
    "taco": Recipe("programs:taco_splits", "contest problems with input and output"),
}

ALIASES = {
    "2wiki": "2wikimultihopqa",
    "arth": "arithmetic",
    "math_dataset": "math",
    "nq_search": "nq",
}


@dataclass(frozen=True)
class Report:
    """What was written."""

    name: str
    rows: dict[str, int]
    """File → number of rows."""

    def __str__(self) -> str:
        width = max(map(len, self.rows), default=0)
        lines = [f"  {file:<{width}}  {count:>9,} rows" for file, count in self.rows.items()]
        return "\n".join([f"{self.name}:", *lines])


def find_recipe(name: str) -> Recipe:
    known = ALIASES.get(name, name)
    if known in RECIPES:
        return RECIPES[known]
    close = difflib.get_close_matches(name, [*RECIPES, *ALIASES], n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise DataError(
        f"no data set is called {name!r}.{hint} `hone data prepare` lists all {len(RECIPES)}, such as "
        "gsm8k, math and countdown"
    )


def prepare(
    name: str,
    *,
    local_dir: str | os.PathLike[str],
    source_dir: str | os.PathLike[str] | None = None,
    hub: bool = False,
    **options: Any,
) -> Report:
    """Build a data set and write `<split>.parquet` files into `local_dir`.

    Records come from `source_dir` (a folder of upstream's files) or the hub; a data set that can
    be generated is, unless one of the two is asked for.
    """
    recipe = find_recipe(name)
    if source_dir is not None and hub:
        raise DataError("give either a source folder or the hub, not both")
    builder = _builder(recipe, from_source=source_dir is not None or hub)
    unknown = [key for key in options if key not in own_options(recipe, builder)]
    if unknown:
        known = ", ".join(own_options(recipe, builder)) or "none"
        raise DataError(f"{name} has no option {', '.join(unknown)}; it has {known}")
    missing = [
        key
        for key, parameter in own_options(recipe, builder).items()
        if parameter.default is parameter.empty and key not in options
    ]
    if missing:
        raise DataError(f"{name} needs {', '.join(f'--{key}' for key in missing)}")
    for key, value in options.items():
        if key.endswith("_size") and value is not None and value < 1:
            raise DataError(f"{name}: --{key} {value} is no number of rows; give 1 or more")
    arguments = {**recipe.fixed, **options}
    if _takes_source(builder):
        arguments["source"] = Source(source_dir)
    splits: dict[str, list[Row]] = builder(**arguments)
    return Report(name, _write(recipe, splits, Path(local_dir).expanduser()))


def _write(recipe: Recipe, splits: Mapping[str, list[Row]], folder: Path) -> dict[str, int]:
    written: dict[str, int] = {}
    for split, rows in splits.items():
        if not rows:
            raise DataError(f"split {split!r} came out empty; nothing was written for it")
        path = folder / f"{split}.parquet"
        write_parquet(rows, path)
        written[str(path)] = len(rows)
        if recipe.writes_examples:
            _write_json(rows[0], folder / f"{split}_example.json")
    return written


def _write_json(row: Row, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(row, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _builder(recipe: Recipe, from_source: bool) -> Callable[..., dict[str, list[Row]]]:
    where = recipe.builder if from_source or recipe.generator is None else recipe.generator
    if not where:
        raise DataError("this data set is generated; leave out the source folder and the hub")
    module, function = where.split(":")
    found: Callable[..., dict[str, list[Row]]] = getattr(
        import_module(f"{_ROOM}.{module}"), function
    )
    return found


def _takes_source(builder: Function) -> bool:
    return "source" in inspect.signature(builder).parameters


def own_options(recipe: Recipe, builder: Function) -> dict[str, inspect.Parameter]:
    """The builder's keyword arguments that the recipe leaves open."""
    return {
        name: parameter
        for name, parameter in inspect.signature(builder).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in recipe.fixed
    }


def argument_parser(name: str, program: str | None = None) -> argparse.ArgumentParser:
    """The options of `hone data prepare NAME` and of examples/data_preprocess/NAME.py."""
    recipe = find_recipe(name)
    parser = argparse.ArgumentParser(prog=program, description=f"Prepare {name}: {recipe.summary}.")
    parser.add_argument(
        "--local_dir",
        "--local_save_dir",
        required=True,
        help="folder to write the parquet files to",
    )
    parser.add_argument(
        "--source_dir", "--local_dataset_path", help="folder with upstream's files (no network)"
    )
    parser.add_argument("--hub", action="store_true", help="read from the Hugging Face hub")
    seen: set[str] = set()
    for from_source in (True, False):
        if (from_source and not recipe.builder) or (not from_source and not recipe.generator):
            continue
        builder = _builder(recipe, from_source)
        for option, parameter in own_options(recipe, builder).items():
            if option not in seen:
                seen.add(option)
                _add_option(parser, option, parameter)
    return parser


def _add_option(parser: argparse.ArgumentParser, option: str, parameter: inspect.Parameter) -> None:
    required = parameter.default is parameter.empty
    kind = int if "int" in str(parameter.annotation) else str
    shown = "required" if required else f"default {parameter.default}"
    parser.add_argument(
        f"--{option}", type=kind, required=required, default=argparse.SUPPRESS, help=shown
    )


def prepare_from_arguments(
    name: str, arguments: Sequence[str] | None = None, program: str | None = None
) -> Report:
    """`prepare` with options from a command line; `program` is what its help calls itself."""
    return prepare(name, **vars(argument_parser(name, program).parse_args(arguments)))


def script(name: str, arguments: Sequence[str] | None = None) -> str:
    """What examples/data_preprocess/NAME.py prints; a data error ends it with its sentence."""
    try:
        return str(prepare_from_arguments(name, arguments))
    except DataError as error:
        raise SystemExit(f"error: {error}") from error
