"""The walls of the house: which part may import which, how long things get, what stays out.

Every rule reads the source only (no import of the package), takes the folder of the package, and
returns one sentence per violation. Each is also shown to fail on a small planted tree.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "hone"

LEVELS = {
    "cli": 6,
    "api": 6,  # the functions of `hone` itself: train, sft, evaluate, LLM
    "__main__": 6,
    "verl": 6,  # verl's names and programs; only the package's __init__ imports it, to install its finder
    "trainer": 5,
    "checks": 4,  # below the trainer, which asks them; above the rooms that they ask
    "workers": 4,
    "engine": 3,
    "rollout": 3,
    "weights": 3,
    "agents": 3,
    "algorithms": 2,
    "rewards": 2,
    "models": 2,
    "retrieval": 2,
    "controller": 1,
    "sandbox": 1,
    "data": 1,
    "tracking": 1,
    "ops": 1,
    "config": 0,
    "protocol": 0,
    "columns": 0,
    "cores": 0,  # how many processes or threads may compute at once
    "logging_level": 0,
    "event_loop": 0,  # user code in an event loop: scorers, agent loops
    "launch": 0,  # starts processes on machines and kills them: Ray, servers of engines
    "services": 0,  # HTTP client and server of services: rewards, retrieval, sandbox, search
    "plugins": 0,  # names to objects: every table of plug-ins rests on it
    "tokenizer": 0,
    "errors": -1,  # the base class of errors that every program prints as one sentence
    "types": -1,  # names for values whose type only the user knows: every room may use them
    "suggestions": -1,  # the nearest known name, for the error of any room
    "redaction": -1,  # secrets, for whatever writes or shows a setting or an error
    "text": 0,  # text from outside: cleaned wherever it enters
}
LAZY_ROOTS = {"__init__"}  # may name any room, but only once a name is asked for
SEAM = ("__init__.py", ("verl.finder", "verl.dialect"))
"""The file that installs the finder and gives verl's dialect to `compose`, and what it imports for it."""

STANDS_ALONE = {
    "sandbox": {"types", "services"},
    "services": {"types"},
    "launch": {"types"},
}
"""Rooms that could be published alone, and the only other rooms that each may import."""

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
NAMELESS_FILES = {"utils.py", "helpers.py", "common.py", "misc.py"}
PRINTING_FILES = {"tracking/console.py", "cli.py"}
NO_CODE_FROM_TEXT_ROOMS = {"rewards", "agents"}
HEAVY = ("torch", "ray", "transformers")

MIRRORED_ROOMS = (
    "trainer/ppo/",
    "checks/",
    "workers/",
    "weights/",
    "engine/",
    "rollout/",
    "algorithms/",
)
TESTED_ELSEWHERE = {
    # by the contract of their room, which every engine and strategy is run through
    "engine/contract.py",
    "rollout/contract.py",
    "rollout/hf.py",
    "weights/contract.py",
    # by tests/weights/test_streamed.py, over every transport
    "weights/collective.py",
    "weights/shared_memory.py",
}
"""Files without a test at their own path; the list may only shrink."""


def _kernel_file(path: str) -> bool:
    inside = path.startswith(("rollout/native/", "ops/"))
    folders, name = path.split("/")[:-1], path.split("/")[-1]
    return inside and (name.endswith("_triton.py") or name == "kernels.py" or "kernels" in folders)


def _only(*paths: str) -> Callable[[str], bool]:
    return lambda path: path in paths


OPTIONAL_PACKAGES: dict[str, Callable[[str], bool]] = {
    "ray": _only(
        "controller/ray.py",
        "controller/ray_start.py",
        "controller/ray_liveness.py",
        "controller/ray_placement.py",
        "controller/ray_wait.py",
        "launch/jobs.py",
        "launch/ray_private.py",
    ),
    "ray._private": _only("launch/ray_private.py"),
    "ray._raylet": _only("launch/ray_private.py"),
    "ray.scripts": _only("launch/ray_private.py"),
    "vllm": _only("rollout/vllm_server.py", "rollout/vllm_worker.py"),
    "sglang": _only("rollout/sglang.py"),
    "wandb": _only("tracking/wandb.py"),
    "mlflow": _only("tracking/mlflow.py"),
    "swanlab": _only("tracking/swanlab.py"),
    "tensorboard": _only("tracking/tensorboard.py"),
    "torch.utils.tensorboard": _only("tracking/tensorboard.py"),
    "triton": _kernel_file,
    "datasets": _only("data/hub.py"),
    "math_verify": lambda path: path.startswith("rewards/scores/"),
    "sympy": lambda path: path.startswith("rewards/scores/"),
}


class Import:
    """One imported dotted name, where it stands, and whether it runs when the module loads."""

    def __init__(self, target: str, line: int, at_load: bool) -> None:
        self.target, self.line, self.at_load = target, line, at_load


@functools.cache
def sources(package: Path) -> list[tuple[str, ast.Module]]:
    return [
        (file.relative_to(package).as_posix(), ast.parse(file.read_text(encoding="utf-8")))
        for file in sorted(package.rglob("*.py"))
    ]


def room_of(path: str) -> str:
    """`rollout/native/engine.py` -> `rollout`; `cli.py` -> `cli`."""
    return path.split("/")[0].removesuffix(".py")


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _absolute(package: Path, path: str, node: ast.ImportFrom) -> list[str]:
    base = node.module or ""
    if node.level:
        here = [package.name, *path.split("/")[:-1]]
        anchor = here[: len(here) - node.level + 1]
        base = ".".join([*anchor, base] if base else anchor)
    names = [f"{base}.{alias.name}" for alias in node.names]
    if base.split(".")[0] != package.name:
        return names if base in ("torch", "torch.utils") else [base]
    return [name if _is_module(package, name) else base for name in names]


def _is_module(package: Path, dotted: str) -> bool:
    inner = package.joinpath(*dotted.split(".")[1:])
    return inner.is_dir() or inner.with_suffix(".py").is_file()


def _import_call_target(node: ast.Call) -> str | None:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name not in ("import_module", "__import__") or not node.args:
        return None
    first = node.args[0]
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def imports(package: Path, path: str, tree: ast.Module) -> Iterator[Import]:
    """Every import of a file, nested ones too; those under `if TYPE_CHECKING:` do not count."""

    def visit(node: ast.AST, at_load: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            for statement in node.orelse:
                yield from visit(statement, at_load)
            return
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for target in dict.fromkeys(_absolute(package, path, node)):
                yield Import(target, node.lineno, at_load)
        elif isinstance(node, ast.Call) and (called := _import_call_target(node)):
            yield Import(called, node.lineno, at_load)
        inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_load and not inner)

    yield from visit(tree, True)


def _wrong_way(package: Path, path: str, found: Import) -> str | None:
    parts = found.target.split(".")
    if parts[0] != package.name or len(parts) == 1 or not _is_module(package, found.target):
        return None
    here, there = room_of(path), parts[1]
    if here == there:
        return None
    if here in LAZY_ROOTS:
        return f"imports {found.target} when it loads; do it lazily" if found.at_load else None
    if there not in LEVELS:
        return f"imports {found.target}, which is no room"
    if LEVELS[there] > LEVELS[here]:
        return f"(level {LEVELS[here]}) imports {found.target} (level {LEVELS[there]})"
    if LEVELS[there] == LEVELS[here] and parts[2:3] != ["contract"]:
        return f"imports {found.target} on its own level; only its contract.py may be imported"
    return None


def imports_point_down(package: Path) -> list[str]:
    wrong = []
    for path, tree in sources(package):
        for found in imports(package, path, tree):
            if problem := _wrong_way(package, path, found):
                wrong.append(f"{path}:{found.line} {problem}")
    return wrong


DOTTED_NAME = re.compile(r"(?P<module>\w+(\.\w+)+)(:[\w.]+)?")


def _docstrings(tree: ast.Module) -> set[int]:
    """The ids of strings that are statements: docstrings of modules, functions and fields."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def _names_verls_room(package: Path, path: str, tree: ast.Module) -> Iterator[str]:
    room = f"{package.name}.verl"
    for found in imports(package, path, tree):
        if path == SEAM[0] and found.target in [f"{package.name}.{name}" for name in SEAM[1]]:
            continue
        if f"{found.target}.".startswith(f"{room}."):
            yield f"{path}:{found.line} imports {found.target}"
        elif found.target.startswith(f"{package.name}.") and not _is_module(package, found.target):
            yield f"{path}:{found.line} imports {found.target}, which only the finder of verl's paths finds"
    skipped = _docstrings(tree)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in skipped
        ):
            is_seam = path == SEAM[0] and node.value == room
            names_room = f"{room}." in f"{node.value}."
            if (names_room and not is_seam) or _is_path_of_verl(package, node.value):
                yield f"{path}:{node.lineno} names {node.value!r}"


def _is_path_of_verl(package: Path, text: str) -> bool:
    """Whether `text` is `hone.a.b` or `hone.a.b:object` and the package has no such module or class."""
    name = DOTTED_NAME.fullmatch(text)
    if not name or not text.startswith(f"{package.name}."):
        return False
    parent, _, last = name["module"].rpartition(".")
    is_object = parent == package.name or (last[0].isupper() and _is_module(package, parent))
    return not _is_module(package, name["module"]) and not is_object


def core_knows_nothing_of_verls_room(package: Path) -> list[str]:
    return [
        f"{wrong}; the rest of the package works without hone/verl"
        for path, tree in sources(package)
        if room_of(path) != "verl"
        for wrong in _names_verls_room(package, path, tree)
    ]


def some_rooms_stand_alone(package: Path) -> list[str]:
    wrong = []
    for path, tree in sources(package):
        here = room_of(path)
        for found in imports(package, path, tree) if here in STANDS_ALONE else ():
            root, *rooms = found.target.split(".")
            there = rooms[0] if rooms else "hone itself"
            if root == package.name and there not in {here, *STANDS_ALONE[here]}:
                wrong.append(f"{path}:{found.line} imports {there}; {here} must work without it")
    return wrong


def every_room_has_a_level(package: Path) -> list[str]:
    rooms = {room_of(path) for path, _ in sources(package)}
    return [
        f"{room} is not in the house: give it a place in LEVELS and in the design"
        for room in sorted(rooms - set(LEVELS) - LAZY_ROOTS)
    ]


def files_are_short(package: Path) -> list[str]:
    wrong = []
    for file in sorted(package.rglob("*.py")):
        lines = len(file.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            wrong.append(f"{file.relative_to(package)} has {lines} lines, over {MAX_FILE_LINES}")
    return wrong


def functions_are_short(package: Path) -> list[str]:
    wrong = []
    for path, tree in sources(package):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    where = f"{path}:{node.lineno} {node.name}"
                    wrong.append(f"{where} has {lines} lines, over {MAX_FUNCTION_LINES}")
    return wrong


def files_are_named_after_a_thing(package: Path) -> list[str]:
    return [
        f"{path}: name the file after the thing it holds"
        for path, _ in sources(package)
        if path.split("/")[-1] in NAMELESS_FILES
        or any(f"{folder}.py" in NAMELESS_FILES for folder in path.split("/")[:-1])
    ]


def only_the_console_prints(package: Path) -> list[str]:
    return [
        f"{path}:{node.lineno} print(): use logging or the console tracker"
        for path, tree in sources(package)
        if path not in PRINTING_FILES
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("print", "pprint")
    ]


def optional_packages_stay_in_their_file(package: Path) -> list[str]:
    wrong = []
    for path, tree in sources(package):
        for found in imports(package, path, tree):
            for name, allowed in OPTIONAL_PACKAGES.items():
                under = found.target == name or found.target.startswith(name + ".")
                if under and not allowed(path):
                    wrong.append(f"{path}:{found.line} imports {name}, which has its own file")
    return wrong


def config_knows_no_tensors(package: Path) -> list[str]:
    return [
        f"{path}:{found.line} imports {found.target}; the config is plain data"
        for path, tree in sources(package)
        if room_of(path) == "config"
        for found in imports(package, path, tree)
        if found.target.split(".")[0] in (*HEAVY, "tensordict", "peft")
    ]


def config_names_no_dialect(package: Path) -> list[str]:
    """The room of another framework's keys is given to `compose`, never named there, not in a string."""
    return [
        f"{path}:{node.lineno} names {node.value!r}; a program gives `compose` its dialect"
        for path, tree in sources(package)
        if room_of(path) == "config"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and f"{package.name}.verl" in node.value
    ]


def _runs_text(node: ast.AST) -> str | None:
    unsafe_modules = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    if isinstance(node, ast.ImportFrom) and node.module in unsafe_modules:
        return f"from {node.module} import"
    if not isinstance(node, ast.Call):
        return None
    func = node.func
    if isinstance(func, ast.Name) and func.id in ("eval", "exec"):
        return func.id
    if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
        owner, name = func.value.id, func.attr
        if owner == "builtins" and name in ("eval", "exec"):
            return f"{owner}.{name}"
        if owner in unsafe_modules and name in ("load", "loads", "open", "Unpickler"):
            return f"{owner}.{name}"
    return None


def model_text_is_never_run(package: Path) -> list[str]:
    return [
        f"{path}:{node.lineno} {call}: model text runs only in the sandbox"  # type: ignore[attr-defined]
        for path, tree in sources(package)
        if room_of(path) in NO_CODE_FROM_TEXT_ROOMS
        for node in ast.walk(tree)
        if (call := _runs_text(node))
    ]


def rooms_are_mirrored(package: Path) -> list[str]:
    tests = package.parent / "tests"
    wrong = []
    for path, _ in sources(package):
        folder, _, name = path.rpartition("/")
        exempt = name == "__init__.py" or name.endswith("_triton.py") or path in TESTED_ELSEWHERE
        test = f"{folder}/test_{name}"
        if path.startswith(MIRRORED_ROOMS) and not exempt and not (tests / test).is_file():
            wrong.append(f"hone/{path} has no tests/{test}")
    return wrong


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES
ALLOWED_FUNCTION = "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)

# rule -> (planted violations, look-alikes that are allowed): one file each, path -> source.
PLANTS: dict[Callable[[Path], list[str]], tuple[list[dict[str, str]], list[dict[str, str]]]] = {
    imports_point_down: (
        [
            {"ops/a.py": "from hone.engine import fsdp", "engine/fsdp.py": ""},
            {"ops/a.py": "def f():\n    import hone.trainer", "trainer/__init__.py": ""},
            {"ops/a.py": "from ..workers.actor import X", "workers/actor.py": "X = 1"},
            {"engine/a.py": "from hone.rollout.native import X", "rollout/native.py": "X = 1"},
            {"engine/a.py": "from hone import rollout", "rollout/__init__.py": ""},
            {"data/a.py": "import importlib\nimportlib.import_module('hone.cli')", "cli.py": ""},
            {"verl/a.py": "from hone import cli", "cli.py": ""},
            {"columns.py": "import hone.protocol", "protocol.py": ""},
            {
                "ops/a.py": "if TYPE_CHECKING:\n    pass\nelse:\n    import hone.engine",
                "engine/__init__.py": "",
            },
        ],
        [
            {"engine/a.py": "from hone.ops.rows import masked_mean", "ops/rows.py": ""},
            {"engine/a.py": "from hone.rollout.contract import X", "rollout/contract.py": "X = 1"},
            {"engine/a.py": "from hone.rollout import contract", "rollout/contract.py": ""},
            {"engine/a.py": "from .b import X", "engine/b.py": "X = 1"},
            {"ops/a.py": "from hone import __version__", "__init__.py": "__version__ = '1'"},
            {"verl/a.py": "import hone.trainer", "trainer/__init__.py": ""},
            {
                "ops/a.py": "if TYPE_CHECKING:\n    from hone.engine import fsdp",
                "engine/fsdp.py": "",
            },
        ],
    ),
    core_knows_nothing_of_verls_room: (
        [
            {"cli.py": "def f():\n    from hone.verl import finder", "verl/finder.py": ""},
            {"cli.py": "from .verl.finder import x", "verl/finder.py": "x = 1"},
            {"__init__.py": "def f():\n    import hone.verl.table", "verl/table.py": ""},
            {"ops/a.py": "importlib.import_module('hone.verl.finder')", "verl/finder.py": ""},
            {"ops/a.py": "TABLE = {'a': 'hone.verl.finder:x'}", "verl/finder.py": ""},
            {"ops/a.py": "name = f'hone.verl.{x}'", "verl/finder.py": ""},
            {"ops/a.py": "from hone.utils.device import x"},
            {"ops/a.py": "TABLE = {'a': 'hone.utils.device:x'}"},
        ],
        [
            {
                "__init__.py": "def f():\n    find_spec('hone.verl')\n    import hone.verl.finder",
                "verl/finder.py": "",
            },
            {
                "verl/a.py": "from hone.verl import b\nTABLE = {'a': 'hone.verl.b:x'}",
                "verl/b.py": "",
            },
            {"ops/a.py": '"""hone.verl.finder finds verl\'s paths."""', "verl/finder.py": ""},
            {"ops/a.py": "TABLE = {'a': 'hone.ops.b:x'}", "ops/b.py": ""},
        ],
    ),
    some_rooms_stand_alone: (
        [
            {"sandbox/a.py": "from hone.text import clean", "text.py": "clean = 1"},
            {"sandbox/a.py": "def f():\n    import hone.config", "config/__init__.py": ""},
            {"sandbox/judging/a.py": "from ...config import X", "config/__init__.py": ""},
            {"services/a.py": "import importlib\nimportlib.import_module('hone.text')"},
            {"services/a.py": "from hone.sandbox import X", "sandbox/__init__.py": "X = 1"},
            {"sandbox/a.py": "from hone import __version__", "__init__.py": ""},
            {"launch/a.py": "import hone", "__init__.py": ""},
        ],
        [
            {"sandbox/a.py": "from hone.types import Row", "types.py": "Row = 1"},
            {"sandbox/a.py": "from hone.services.sockets import X", "services/sockets.py": "X = 1"},
            {"sandbox/a.py": "import json\nfrom .b import X", "sandbox/b.py": "X = 1"},
            {"rewards/a.py": "from hone.sandbox import X", "sandbox/__init__.py": "X = 1"},
        ],
    ),
    every_room_has_a_level: (
        [{"attic/a.py": ""}, {"attic.py": ""}],
        [{"ops/a.py": ""}],
    ),
    files_are_short: (
        [{"ops/a.py": "x = 1\n" * (MAX_FILE_LINES + 1)}],
        [{"ops/a.py": "x = 1\n" * MAX_FILE_LINES}],
    ),
    functions_are_short: (
        [{"ops/a.py": LONG_FUNCTION}, {"ops/a.py": "async " + LONG_FUNCTION}],
        [{"ops/a.py": ALLOWED_FUNCTION}],
    ),
    files_are_named_after_a_thing: (
        [{f"ops/{name}": ""} for name in sorted(NAMELESS_FILES)] + [{"ops/utils/masked.py": ""}],
        [{"ops/rows.py": ""}],
    ),
    only_the_console_prints: (
        [{"ops/a.py": "print(1)"}, {"tracking/jsonl.py": "def f():\n    print(1)"}],
        [{"tracking/console.py": "print(1)"}, {"cli.py": "print(1)"}, {"ops/a.py": "x.print(1)"}],
    ),
    optional_packages_stay_in_their_file: (
        [
            {"trainer/a.py": "import ray"},
            {"controller/a.py": "def f():\n    from ray.util import placement_group"},
            {"controller/ray.py": "from ray._private import services"},
            {"launch/jobs.py": "from ray._raylet import Config"},
            {"rollout/native/a.py": "import vllm"},
            {"rollout/vllm_server.py": "import sglang"},
            {"tracking/tracking.py": "import importlib\nimportlib.import_module('wandb')"},
            {"tracking/wandb.py": "import mlflow"},
            {"tracking/console.py": "from torch.utils.tensorboard import SummaryWriter"},
            {"tracking/console.py": "from torch.utils import tensorboard"},
            {"ops/logprobs.py": "import triton"},
            {"engine/training_triton.py": "import triton.language as tl"},
            {"data/rows.py": "from datasets import load_dataset"},
            {"rewards/managers/naive.py": "import math_verify"},
            {"algorithms/a.py": "import sympy"},
        ],
        [
            {"controller/ray.py": "import ray"},
            {"rollout/vllm_server.py": "from vllm import LLM"},
            {"tracking/tensorboard.py": "from torch.utils.tensorboard import SummaryWriter"},
            {"tracking/wandb.py": "import wandb"},
            {"ops/training_triton.py": "import triton"},
            {"rollout/native/kernels/paged.py": "import triton.language as tl"},
            {"data/hub.py": "import datasets"},
            {"rewards/scores/math.py": "def f():\n    import math_verify, sympy"},
            {
                "ops/a.py": "import raylike\nfrom hone.controller import ray",
                "controller/ray.py": "",
            },
            {"ops/a.py": "if TYPE_CHECKING:\n    import ray"},
        ],
    ),
    config_knows_no_tensors: (
        [{"config/a.py": "import torch"}, {"config/a.py": "def f():\n    from torch import nn"}],
        [{"config/a.py": "import yaml"}, {"ops/a.py": "import torch"}],
    ),
    config_names_no_dialect: (
        [
            {"config/a.py": "import_module('hone.verl.dialect')"},
            {"config/a.py": "DIALECT = 'hone.verl.dialect:VERL'"},
        ],
        [{"config/a.py": "words = 'keys of verl'"}, {"cli.py": "room = 'hone.verl'"}],
    ),
    model_text_is_never_run: (
        [
            {"rewards/scores/countdown.py": "eval(text)"},
            {"agents/tools/python.py": "def f(code):\n    exec(code)"},
            {"agents/a.py": "import builtins\nbuiltins.eval(text)"},
            {"rewards/a.py": "import pickle\npickle.loads(blob)"},
            {"rewards/a.py": "from pickle import loads"},
        ],
        [
            {"rewards/a.py": "import json, re\nmodel.eval()\nre.compile('x')\njson.loads('1')"},
            {"sandbox/child.py": "exec(code)"},
        ],
    ),
    rooms_are_mirrored: (
        [{"engine/a.py": ""}, {"rollout/native/a.py": "", "../tests/rollout/test_a.py": ""}],
        [
            {"engine/a.py": "", "../tests/engine/test_a.py": ""},
            {"engine/__init__.py": "", "rollout/native/a_triton.py": "", "ops/a.py": ""},
        ],
    ),
}
RULES = list(PLANTS)


def _plant(root: Path, files: dict[str, str]) -> Path:
    for path, source in files.items():
        file = root / "hone" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    return root / "hone"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule: Callable[[Path], list[str]]) -> None:
    wrong = rule(PACKAGE)
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_planted_violation_is_found_by(rule: Callable[[Path], list[str]], tmp_path: Path) -> None:
    for number, files in enumerate(PLANTS[rule][0]):
        assert rule(_plant(tmp_path / str(number), files)), f"not found: {files}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_what_is_allowed_passes(rule: Callable[[Path], list[str]], tmp_path: Path) -> None:
    for number, files in enumerate(PLANTS[rule][1]):
        assert rule(_plant(tmp_path / str(number), files)) == [], files


def heavy_modules_loaded_by(code: str, folder: Path) -> list[str]:
    """Run `code` in a fresh interpreter at `folder` and name the heavy packages it loaded."""
    listing = f"import sys; sys.stderr.write('|'.join(m for m in {HEAVY!r} if m in sys.modules))"
    program = f"try:\n    {code}\nexcept SystemExit as stop:\n    assert not stop.code\n{listing}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return [name for name in done.stderr.split("|") if name]


HELP = (
    "import runpy, sys; sys.argv = ['hone', '--help']; "
    "runpy.run_module('hone.cli', run_name='__main__')"
)


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("__init__.py", "import hone"),
        ("config/__init__.py", "import hone.config"),
        ("tracking/__init__.py", "import hone.tracking"),
        ("cli.py", HELP),
    ],
    ids=["import hone", "import hone.config", "import hone.tracking", "hone --help"],
)
def test_starting_loads_nothing_heavy(file: str, code: str) -> None:
    if not (PACKAGE / file).is_file():
        pytest.skip(f"hone/{file} does not exist yet")
    assert heavy_modules_loaded_by(code, PACKAGE.parent) == []


def test_a_heavy_start_is_seen(tmp_path: Path) -> None:
    planted = _plant(tmp_path, {"__init__.py": "import ray", "../ray.py": ""})
    assert heavy_modules_loaded_by("import hone", planted.parent) == ["ray"]
