"""Declares `hone data`, which prepares and checks files, and `hone recipes`, which lists and copies recipes.

Recipes and examples are next to the package in a clone, and inside it in a wheel (see setup.py).
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import hone

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hone.config.data import DataConfig


Parser: TypeAlias = argparse.ArgumentParser
Subcommands: TypeAlias = "argparse._SubParsersAction[Parser]"
Options: TypeAlias = argparse.Namespace

SHIPPED_FOLDER = "shipped"
EXAMPLES = "examples"
_EXAMPLES_TITLE = "Plug-ins of your own: a reward manager, an agent loop, data preparation"


def add_subcommand(
    subcommands: Subcommands,
    name: str,
    run: Callable[[Options, list[str]], int | None],
    description: str,
) -> Parser:
    """Adds a subcommand; `run` receives the parsed options and the remaining arguments."""
    parser = subcommands.add_parser(
        name, help=description, description=description, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def print_text(text: str) -> None:
    """Prints the output of a subcommand, which may have several lines."""
    from hone.tracking.console import screen

    screen().line(text.rstrip("\n"))


def add_data_subcommands(subcommands: Subcommands) -> None:
    """Declares the subcommands of `hone data`."""
    data = subcommands.add_parser("data", help="prepare or check data files")
    data_subcommands = data.add_subparsers(dest="subverb", metavar="VERB", required=True)
    description = "write a data set's parquet files"
    prepare = data_subcommands.add_parser(
        "prepare",
        help=description,
        description=description,
        epilog="`hone data prepare NAME --help` shows the options of a data set: --local_dir, "
        "--source_dir, --hub and its own.",
        usage="hone data prepare [NAME] [options of the data set]",
        add_help=False,  # each data set prints its own help
        allow_abbrev=False,
    )
    prepare.set_defaults(run=_data_prepare, takes_extra_arguments=True, own_parser=prepare)
    prepare.add_argument("name", nargs="?", help="the data set; without it, all are listed")
    check = add_subcommand(
        data_subcommands, "check", _data_check, "what is in a file, and what would go wrong"
    )
    check.add_argument("files", nargs="+", metavar="FILE")
    check.add_argument(
        "--reward",
        metavar="FILE.py",
        help="your score function (FILE.py:NAME), called on every row",
    )
    check.add_argument(
        "--max-prompt-length", type=int, metavar="N", help="longer prompts are errors (in tokens)"
    )
    _add_rendering_options(check)
    check.add_argument(
        "--agent-loop",
        action="append",
        default=[],
        metavar="NAME",
        help="an agent loop of your own that rows may name; may be repeated",
    )

    show = add_subcommand(data_subcommands, "show", _data_show, "rows as the model will see them")
    show.add_argument("file", metavar="FILE")
    show.add_argument(
        "--rows", metavar="LIST", help="row numbers, as in 0,3-5 (default: the first three)"
    )
    show.add_argument("--tools", metavar="FILE", help="tools of the run, a YAML list or a .py file")
    _add_rendering_options(show)


def _add_rendering_options(parser: Parser) -> None:
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="render prompts and count tokens with its tokenizer"
    )
    parser.add_argument(
        "--prompt-key", metavar="COLUMN", help="the prompt's column (default: prompt)"
    )
    parser.add_argument("--prompt-format", choices=("chat", "raw"), help="as data.prompt_format")


def _data_prepare(options: Options, extra_arguments: list[str]) -> None:
    from hone.data.prepare import DATASETS, prepare_from_arguments

    if options.name is None and {"-h", "--help"} & set(extra_arguments):
        options.own_parser.print_help()
    elif options.name is None and extra_arguments:
        options.own_parser.error(f"{extra_arguments[0]}: name the data set first")
    elif options.name is None:
        name_width = max(map(len, DATASETS))
        for name, dataset in DATASETS.items():
            print_text(f"{name:<{name_width}}  {dataset.summary}")
    else:
        program = f"hone data prepare {options.name}"
        print_text(str(prepare_from_arguments(options.name, extra_arguments, program)))


def _tokenizer_and_config(options: Options) -> tuple[PreTrainedTokenizerBase | None, DataConfig]:
    """Returns the tokenizer (None without --tokenizer) and the data config of a subcommand's options."""
    from hone.config.data import DataConfig

    tokenizer = None
    if options.tokenizer:
        from hone.models.load import load_tokenizer

        tokenizer = load_tokenizer(options.tokenizer)
    settings = {"prompt_key": options.prompt_key, "prompt_format": options.prompt_format}
    config = DataConfig(**{key: value for key, value in settings.items() if value is not None})
    return tokenizer, config


def _data_check(options: Options, extra_arguments: list[str]) -> int:
    from hone.config.errors import ConfigError
    from hone.config.rollout import BUILT_IN_LOOPS
    from hone.data.check import check_file
    from hone.rewards.scores.table import find_entry

    if options.max_prompt_length is not None and not options.tokenizer:
        raise ConfigError(
            f"--max-prompt-length {options.max_prompt_length} counts tokens; give --tokenizer MODEL too"
        )
    tokenizer, config = _tokenizer_and_config(options)
    score = None
    if options.reward:
        from hone.rewards.trial import ground_truth_scorer

        score = ground_truth_scorer(options.reward, config.reward_fn_key, config.prompt_key)
    exit_code = 0
    for file in options.files:
        status, text = check_file(
            file,
            tokenizer=tokenizer,
            is_known_source=None if score else lambda source: find_entry(source) is not None,
            known_loops=[*BUILT_IN_LOOPS, *options.agent_loop],
            config=config,
            score=score,
            max_prompt_length=options.max_prompt_length,
        )
        exit_code = max(exit_code, status)
        print_text(text)
    return exit_code


def _data_show(options: Options, extra_arguments: list[str]) -> None:
    from hone.data.show import show_file

    tokenizer, config = _tokenizer_and_config(options)
    schemas = None
    if options.tools:
        from hone.agents.tools.loading import load_all_tools

        is_python_file = options.tools.endswith(".py")
        file_kind = "function_tool_path" if is_python_file else "tool_config_path"
        tools = load_all_tools(**{file_kind: options.tools})
        schemas = [tool.tool_schema.model_dump() for tool in tools]
    print_text(
        show_file(
            options.file, rows=options.rows, tokenizer=tokenizer, config=config, tools=schemas
        )
    )


def add_recipes_subcommand(subcommands: Subcommands) -> None:
    """Declares `hone recipes`."""
    description = "list the recipes and examples of this package, or copy one"
    parser = add_subcommand(subcommands, "recipes", _recipes, description)
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="recipe to copy; without it, all are listed"
    )
    parser.add_argument("out", nargs="?", metavar="OUT", help="new folder (default: recipes/NAME)")


def _recipes(options: Options, extra_arguments: list[str]) -> None:
    if options.name is None:
        print_text("\n".join(recipe_lines()))
    else:
        print_text(f"wrote {copy_recipe(options.name, options.out)}")


def shipped_folder() -> Path:
    """Returns the folder that contains `recipes` and `examples`."""
    from hone.config.errors import ConfigError

    package = Path(hone.__file__).resolve().parent
    if (package / SHIPPED_FOLDER).is_dir():
        return package / SHIPPED_FOLDER
    if (package.parent / "pyproject.toml").is_file():
        return package.parent
    raise ConfigError(
        f"{package} came without recipes; install the wheel, or run from a clone of the repository"
    )


def recipe_folders() -> dict[str, Path]:
    """Returns the folder of each recipe, and that of the examples, by name."""
    root = shipped_folder()
    readmes = sorted((root / "recipes").glob("*/README.md"))
    return {readme.parent.name: readme.parent for readme in readmes} | {EXAMPLES: root / EXAMPLES}


def recipe_lines() -> list[str]:
    """Returns one line per recipe: its name and the title of its README."""
    titles = {}
    for name, folder in recipe_folders().items():
        readme = folder / "README.md"
        text = readme.read_text(encoding="utf-8") if readme.is_file() else _EXAMPLES_TITLE
        titles[name] = text.partition("\n")[0].lstrip("# ")
    name_width = max(map(len, titles))
    return [f"{name:<{name_width}}  {title}" for name, title in titles.items()]


def copy_recipe(name: str, out: str | None = None) -> Path:
    """Copies a recipe to `out` (default `recipes/NAME`, which its README expects); returns the folder."""
    from hone.config.errors import ConfigError
    from hone.suggestions import suggestion

    folders = recipe_folders()
    if name not in folders:
        hint = suggestion(name, folders)
        raise ConfigError(f"there is no recipe {name!r}.{hint} Use {', '.join(folders)}")
    default_target = Path(EXAMPLES) if name == EXAMPLES else Path("recipes") / name
    target = Path(out).expanduser() if out else default_target
    if target.exists():
        raise ConfigError(f"{target} already exists; name another folder: hone recipes {name} OUT")
    shutil.copytree(folders[name], target, ignore=shutil.ignore_patterns("__pycache__"))
    return target
