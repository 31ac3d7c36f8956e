"""`python -m benchmarks.conformance FOLDER`: how many of verl's commands compose, and what stops the others.

FOLDER holds repositories with shell scripts. Every script runs under bash in bwrap, without a network;
python, torchrun, ray and the like are stubs that record their arguments. Each recorded command goes, with the
package's name changed, through `compose_arguments` of hone.trainer.command_line, as `python -m hone.…` does.
Where a command is refused, the keys that the refusals name are taken away and the rest is composed again:
every reason of a command is counted, not only the first.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.verl import programs

RESULTS = Path(__file__).parent / "results" / "conformance.json"
STUBS = (
    "accelerate curl docker git hf huggingface-cli modelscope nsys nvidia-smi pip pip3 pkill python python3 "
    "ray sbatch sglang sleep srun sudo torchrun uv vllm wandb wget"
)
STUB = '#!/bin/sh\nprintf "%s\\0" "$(basename "$0")" "$@" > "$RECORD/$$"\n'
BOX = "bwrap --unshare-all --die-with-parent --ro-bind / / --dev /dev --proc /proc"


@dataclass(frozen=True)
class Command:
    """One recorded call of a program of verl."""

    script: str
    folder: Path
    program: str
    arguments: list[str]


@dataclass
class Verdict:
    """What composition says of a command; no reasons: it composes."""

    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def unknown(self) -> list[str]:
        """The keys that have no meaning here."""
        found = [re.match(r"(.*?) has no key '([^']*)'", reason) for reason in self.reasons]
        return [f"{m[1]}.{m[2]}".removeprefix("the config.") for m in found if m]


def commands_of(folder: Path) -> Iterator[Command]:
    """The commands of verl that the scripts under `folder` start, each repository in a scratch copy."""
    for repository in sorted(path for path in folder.iterdir() if path.is_dir()):
        for script in sorted(repository.rglob("*.sh")):
            name = str(script.relative_to(folder))
            for words in _recorded(repository, script.relative_to(repository)):
                if (found := _program_of(words)) is not None:
                    yield Command(name, repository, *found)


def _recorded(repository: Path, script: Path) -> list[list[str]]:
    with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
        place = Path(scratch)
        shutil.copytree(repository, place / "work")
        for name in ("stubs", "record", "home"):
            (place / name).mkdir()
        for name in STUBS.split():
            (place / "stubs" / name).write_text(STUB)
            (place / "stubs" / name).chmod(0o755)
        box = [*BOX.split(), "--bind", scratch, scratch, "--chdir", str(place / "work")]
        box += ["--setenv", "RECORD", f"{place}/record", "--setenv", "HOME", f"{place}/home"]
        run = [*box, "--setenv", "PATH", f"{place}/stubs:/usr/bin:/bin", "bash", str(script)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(run, capture_output=True, timeout=30, check=False)
        files = sorted(
            (place / "record").iterdir(), key=lambda path: int(path.name)
        )  # by process id
        texts = [file.read_text().replace(f"{place}/work", str(repository)) for file in files]
        return [text.split("\0")[:-1] for text in texts]


def _program_of(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """The module of verl, or of a recipe, that a command runs, and what it is given."""
    for at in reversed(range(len(words) - 1)):
        if words[at] == "-m" and re.match(r"(verl|recipe|scripts)\.", words[at + 1]):
            return words[at + 1], list(words[at + 2 :])
    return None


def verdict(command: Command) -> Verdict:
    """Every reason for which a command is refused, and the notes that it gives."""
    found = Verdict()
    program = "hone." + re.sub(r"^(verl|scripts)\.", "", command.program)
    absent = programs.ABSENT_PROGRAMS
    if program in absent or not _is_program(program):
        found.reasons.append(absent.get(program, f"no program {command.program}"))
    tree = _tree_of(command.program.rpartition(".")[2])
    arguments = command.arguments if tree is not None else None
    while arguments is not None:
        words = programs.PROGRAMS.get(program, "").split()[1:]
        before = os.getcwd()
        os.chdir(command.folder)
        try:
            problems, found.notes = _composed([*words, *arguments], tree or "", program)
        finally:
            os.chdir(before)
        found.reasons += [p for p in problems if p not in found.reasons]
        arguments = _without(arguments, problems) if problems else None
    return found


def _tree_of(program: str) -> str | None:
    """Which tree a program of verl takes; None: options of its own."""
    named = {"main_generation": "generation", "main_eval": "evaluation", "model_merger": None}
    return named.get(program, "sft_trainer" if "sft_trainer" in program else "ppo_trainer")


def _is_program(module: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(module) is not None
    return False


def _composed(arguments: Sequence[str], tree: str, program: str) -> tuple[list[str], list[str]]:
    from hone.config import ConfigError
    from hone.trainer.command_line import check_plan, compose_arguments

    extra_checks = check_plan if tree == "ppo_trainer" else None
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            composed = compose_arguments(
                arguments, schema=tree, program=program, extra_checks=extra_checks
            )
        return [], list(composed.notes)
    except ConfigError as error:
        return list(error.problems), []
    except SystemExit as error:
        return [f"usage: {' '.join(w for w in arguments if w.startswith('-'))} ({error.code})"], []
    except Exception as error:
        return [f"raised {type(error).__name__}: {str(error)[:100]}"], []


def _without(arguments: Sequence[str], problems: Sequence[str]) -> list[str] | None:
    """The arguments without those that the refusals are about; None where none of them is given."""
    text = "\n".join(problems)
    pairs = zip(["", *arguments], arguments, strict=False)
    given = {"--config-path", "--config-name", "--config-dir"}
    kept = [w for before, w in pairs if not _named(f"{before}={w}" if before in given else w, text)]
    return kept if len(kept) < len(arguments) else None


def _named(word: str, text: str) -> bool:
    key = word.lstrip("+~").partition("=")[0]
    if word.startswith("-"):
        return key in text or text.startswith(("usage", "config "))
    parts = key.split(".")
    unknown = (
        f"{'.'.join(parts[:at]) or 'the config'} has no key '{part}'"
        for at, part in enumerate(parts)
    )
    return any(u in text for u in unknown) or bool(
        re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", text)
    )


def kind(reason: str) -> str:
    """A reason without the values of one command."""
    reason = re.sub(r" ?\((command line|[^()]*\.yaml[^()]*)\)", "", reason)
    reason = re.sub(r"=('[^']*'|\[[^]]*\]|[^\s,;:]+)", "=…", reason.partition(". Did you mean")[0])
    reason = re.sub(r"(?<=\s)/\S+", "FOLDER", reason)
    return re.sub(r"(?<![\w.])\d[\d,.]*(?!\w)", "N", reason)[:160]


def count(commands: Sequence[Command], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The counts that are kept: commands, composed, and how many commands each kind of reason stops."""
    composed = Counter(c.program for c, v in zip(commands, verdicts, strict=True) if not v.reasons)
    programs = Counter(c.program for c in commands)
    reasons = Counter(k for v in verdicts for k in {kind(r) for r in v.reasons})
    return {
        "commands": len(commands),
        "composed": composed.total(),
        "programs": {name: f"{composed[name]} of {n}" for name, n in sorted(programs.items())},
        "reasons": dict(reasons.most_common()),
        "unknown_keys": dict(Counter(key for v in verdicts for key in v.unknown).most_common()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--label", help=f"keep the counts under this name in {RESULTS.name}")
    parser.add_argument("--commands", action="store_true", help="show the reasons of every command")
    chosen = parser.parse_args()
    commands = list(commands_of(chosen.folder.resolve()))
    verdicts = [verdict(command) for command in commands]
    for command, said in zip(commands, verdicts, strict=True) if chosen.commands else ():
        print(
            f"{'composed' if not said.reasons else 'refused '} {command.script} {command.program}"
        )
        for line in [*said.reasons, *(f"note: {note}" for note in said.notes)]:
            print(f"    {line}")
    counts = count(commands, verdicts)
    print(json.dumps(counts, indent=1, ensure_ascii=False))
    if chosen.label:
        kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        kept[chosen.label] = counts
        RESULTS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
