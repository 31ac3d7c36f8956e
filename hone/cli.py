"""`hone`: one command, its verbs. Heavy parts load when a verb runs, so `hone --help` is instant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hone import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    chosen, rest = parser.parse_known_args(given)
    if chosen.verb is None:
        parser.print_help()
        return 0
    try:
        return chosen.run(chosen, rest) or 0
    except _expected_errors() as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2


def _expected_errors() -> tuple[type[Exception], ...]:
    """Mistakes of the user, told in a sentence; anything else shows its traceback."""
    from hone.config.errors import ConfigError
    from hone.plugins import PluginError

    return (ConfigError, PluginError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hone", description="Hone language models with reinforcement learning."
    )
    parser.add_argument("--version", action="version", version=f"hone {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")

    def verb(name: str, run: Callable[[Any, list[str]], int | None], text: str) -> Any:
        added = verbs.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    verb("train", _train, "RL training: PPO, GRPO and their kin (key=value overrides)")
    quickstart = verb("quickstart", _quickstart, "watch a small policy learn sums, on this machine")
    quickstart.add_argument("--seed", type=int, default=1, help="run seed (default 1)")
    quickstart.add_argument("--out", default="quickstart", help="folder to write to")
    return parser


def _train(_: Any, rest: list[str]) -> None:
    from hone.trainer.main_ppo import main as train

    train(rest)


def _quickstart(chosen: Any, rest: list[str]) -> None:
    from hone.trainer.quickstart import main as quickstart

    quickstart(out=chosen.out, seed=chosen.seed, extra=rest)


if __name__ == "__main__":
    sys.exit(main())
