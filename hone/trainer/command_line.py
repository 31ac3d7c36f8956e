"""The command line of our programs: `--config-path`, `--config-name`, then `key=value` overrides.

Also where a mistake of the user becomes one sentence and exit code 2, with the traceback in the run folder;
anything else keeps its traceback on the terminal.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from traceback import format_exception

from hone.config import Composed, compose
from hone.config.apply import Further
from hone.config.block import Block
from hone.config.errors import ConfigError, nearest
from hone.config.generation import GenerationConfig
from hone.config.keys import get, keys_meant, leaves
from hone.config.sources import Setting
from hone.config.trees import TREES
from hone.tracking import RunFolder
from hone.tracking.storage import storage_sentence
from hone.trainer.interrupt import (
    NAMES,
    Interrupted,
    StoppedAtOnce,
    exit_code,
    stopped_line,
    stopping_at_once,
    tell_kept,
)
from hone.trainer.launcher import die_with_launcher
from hone.types import Settings

EXIT_CODE = 2
ERROR_LOG = "error.log"
_latest: list[Composed] = []
"""What this process's program was last configured with: to name the key behind a mistake."""

_MISTAKES = (
    "hone.config.errors:ConfigError",
    "hone.agents.runner:AgentLoopFailed",
    "hone.plugins:PluginError",
    "hone.data.rows:DataError",
    "hone.data.prompts:PromptError",
    "hone.data.chat_template:BrokenTemplate",
    "hone.models.load:ModelNotFound",
    "hone.models.families:UnsupportedModel",
    "hone.models.lora:LoraError",
    "hone.models.fetch:FetchError",
    "hone.models.tiny:TinyModelError",
    "hone.controller.failures:WorkerDied",
    "hone.controller.failures:WorkerStopped",
    "hone.controller.failures:ClusterFailed",
    "hone.controller.failures:WaitTimeout",
    "hone.engine.checkpoint:AnotherBase",
    "hone.engine.checkpoint:CheckpointMissing",
    "hone.engine.saved_state:ForeignState",
    "hone.retrieval.corpus:CorpusError",
    "hone.rollout.contract:RolloutError",
    "hone.rewards.failures:SetupError",
    "hone.rewards.failures:RewardError",
    "hone.rewards.pool:PoolError",
    "hone.sandbox.result:SandboxError",
    "hone.tracking.contract:TrackerError",
    "hone.tracking.lock:FolderLocked",
    "hone.trainer.ppo.checkpoint:CheckpointError",
    "hone.trainer.ppo.collect:NotEnoughSignal",
    "hone.trainer.ppo.memory:OutOfMemory",
    "hone.trainer.problems:PreflightError",
    "hone.trainer.ranks:LaunchError",
    "hone.trainer.generation:GenerationError",
    "hone.trainer.evaluation:EvaluationError",
    "hone.trainer.export:ExportError",
)
"""Errors whose message says all. Only classes of modules that are loaded can have been raised."""


def composed_of(
    arguments: Sequence[str],
    *,
    tree: str,
    program: str,
    starting: Callable[[Settings], list[Setting]] | None = None,
    further: Further | None = None,
) -> Composed:
    """The configuration a command line asks for, with the origin of each value.

    `tree` is the schema, also of a user's YAML that names none in its defaults list. `starting` gives
    values for keys that the command line leaves out; a user's YAML is taken as it is. `further` are
    checks beyond those of the tree.
    """
    chosen = _parsed(arguments, tree, program)
    composed = compose(
        chosen.overrides,
        config_name=chosen.config_name or tree,
        config_path=chosen.config_path,
        config_dir=chosen.config_dir,
        schema=tree,
        starting=starting if chosen.config_name in (None, "", tree) else None,
        further=further,
    )
    if chosen.cfg or chosen.info:
        from hone.config.commands import as_yaml, with_origins

        package = "" if chosen.package in (None, "_global_") else chosen.package
        text = as_yaml(composed, package) if chosen.cfg else with_origins(composed, only_set=True)
        sys.stdout.write(text)
        raise SystemExit(0)
    _latest[:] = [composed]
    tell_kept(lambda: _kept_by(composed.config))
    return composed


def _parsed(arguments: Sequence[str], tree: str, program: str) -> argparse.Namespace:
    """The command line, with Hydra's options under Hydra's names."""
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description=f"Overrides are key=value; `hone config show --tree {tree}` lists the keys.",
    )
    parser.add_argument("--config-path", "-cp", help="folder of your own YAML files")
    parser.add_argument("--config-dir", "-cd", help="another such folder")
    parser.add_argument("--config-name", "-cn", help=f"which YAML to start from ({tree})")
    parser.add_argument("--multirun", "-m", action="store_true", help="run key=a,b once per value")
    parser.add_argument("--run", "-r", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"), help="print the config")
    parser.add_argument("--resolve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--package", "-p", metavar="KEY", help="the block that --cfg prints")
    parser.add_argument("--info", "-i", action="store_true", help="print what was set, and where")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    known = set(parser._option_string_actions)
    words = [word.partition("=")[0] if word.startswith("--info=") else word for word in arguments]
    for word in words:
        option = word.partition("=")[0]
        if word.startswith("--") and option not in known:
            raise ConfigError(_no_option(word, option, tree))
    return parser.parse_intermixed_args(words)


def _kept_by(config: Block) -> str:
    """What a program has saved so far, and whether the same command goes on from there."""
    if isinstance(config, GenerationConfig):
        return "responses that had ended are kept, and the same command goes on with the others"
    run = config.get("trainer")
    if not hasattr(run, "default_local_dir"):
        return "nothing was written"
    saved = RunFolder(Path(run.default_local_dir).expanduser()).checkpoints()
    if not saved:
        return "nothing is saved yet, and the same command starts anew"
    goes_on = "the same command" if run.resume_mode == "auto" else "trainer.resume_mode=auto"
    return f"{saved[-1][1]} is saved, and {goes_on} goes on from there"


def plan_checks(config: Block, origins: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Problems and notes that follow from the columns that the algorithm reads."""
    from hone.trainer.ppo.plan import find_problems_and_notes

    return find_problems_and_notes(config, origins)


def without_flag(arguments: Sequence[str], flag: str) -> tuple[list[str], bool]:
    """The arguments without a flag of one program, and whether it was there."""
    return [word for word in arguments if word != flag], flag in arguments


def _no_option(word: str, option: str, tree: str) -> str:
    """What to write instead of an option: a setting is given as key=value."""
    name, value = option.lstrip("-").replace("-", "_"), word.partition("=")[2] or "VALUE"
    root = TREES[tree].root
    keys = list(leaves(root))
    near = [] if any(key.endswith(f".{name}") for key in keys) else [nearest(name, keys)]
    meant = [name] if name in keys else keys_meant(root, name) or [key for key in near if key]
    advice = ", as in " * bool(meant) + " or ".join(f"{key}={value}" for key in meant)
    return (
        f"there is no option {option}; settings are key=value{advice} "
        f"(`hone config show --tree {tree}` lists them)"
    )


def announce(composed: Composed) -> None:
    """Say once which of the given keys have no effect here, and why."""
    if not composed.notes:
        return
    from hone.tracking.console import screen

    show = screen()
    show.line("set, but without effect here:")
    for note in composed.notes:
        show.line(f"  {note}")


def run_module(main: Callable[[Sequence[str]], int | None], tree: str, module: str) -> int:
    """`python -m module …`: the program, or the sweep of it that -m asks for."""
    from hone.trainer.sweep import start

    return finish(lambda: start(main, sys.argv[1:], tree, ["-m", module]))


def finish(program: Callable[[], int | None]) -> int:
    """Run a program; the exit code, with a user's mistake told in a sentence."""
    _latest.clear()
    die_with_launcher()
    try:
        with stopping_at_once():
            return program() or 0
    except Interrupted as stopped:
        number = signal.Signals(int(stopped.code or 0) - 128)
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(stopped_line(f"stopped by {NAMES[number]}"))
        return exit_code(number)
    except (KeyboardInterrupt, StoppedAtOnce) as stopped:
        number = signal.SIGINT if isinstance(stopped, KeyboardInterrupt) else signal.SIGTERM
        sys.stderr.write(stopped_line(f"stopped at once by {NAMES[number]}"))
        return exit_code(number)
    except Exception as error:
        sentence = mistake_in_words(error)
        if sentence is None:
            raise
        sys.stderr.write(f"{type(error).__name__}: {sentence}\n")
        if (log := _keep_traceback(error)) is not None:
            sys.stderr.write(f"the traceback is in {log}\n")
        return EXIT_CODE


def _keep_traceback(error: BaseException) -> Path | None:
    """Write where an error came from into the run folder, where there is one; the file."""
    run = getattr(_latest[0].config, "trainer", None) if _latest else None
    folder = Path(getattr(run, "default_local_dir", "") or "").expanduser()
    if folder == Path() or not folder.is_dir() or getattr(error, "changes_nothing", False):
        return None
    file = folder / ERROR_LOG
    try:
        with file.open("a", encoding="utf-8", errors="backslashreplace") as log:
            log.writelines(
                [f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n", *format_exception(error), "\n"]
            )
    except OSError:  # the error may well be that this folder cannot be written to
        return None
    return file


def mistake_in_words(error: BaseException) -> str | None:
    """The sentence of an error that the user can mend; None for any other."""
    if isinstance(error, _mistakes()):
        return _with_key(str(error), getattr(error, "path", None))
    if (sentence := storage_sentence(error)) is not None:
        return sentence
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    if isinstance(error, FileNotFoundError):
        return str(error)
    if isinstance(error, OSError) and error.errno is None:  # transformers: no such model
        return str(error).strip().partition("\n")[0]
    return None


def _with_key(sentence: str, path: str | None) -> str:
    """The sentence about a model path, begun with the key that was set to it."""
    for composed in _latest if path else ():
        root: type = type(composed.config)
        paths = [key for key in leaves(root) if key.endswith("path")]
        for key in sorted(paths, key=lambda key: key not in composed.origins):
            if get(composed.config, key) == path:
                return f"{key}={path}: {sentence}"
    return sentence


def _mistakes() -> tuple[type[BaseException], ...]:
    found = []
    for target in _MISTAKES:
        module, _, name = target.partition(":")
        if module in sys.modules and hasattr(sys.modules[module], name):
            found.append(getattr(sys.modules[module], name))
    return tuple(found)
