"""The path of a batch, traced in a real step: what a newcomer reads from the command to new weights.

Everything of the package that runs while `PPOTrainer.step` runs is counted; nothing is chosen. The rollout
engine is a black box: its files, and what runs below its frames, do not count. A function counts with all
its lines. `python tests/test_path_of_a_batch.py cpu` prints the path; with `cuda` it also writes the list
from which machines without a GPU count.
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

import pytest
import torch

HONE = Path(__file__).resolve().parents[1] / "hone"
ENGINE = f"{HONE / 'rollout'}/"
ON_A_GPU = Path(__file__).with_name("path_of_a_batch_cuda.json")

MOST_FRAMES = 9
MOST_LINES = 4500
MOST_FILES = 37

Functions = dict[str, list[str]]
"""Functions by file."""


def frames(frame: FrameType | None) -> list[FrameType]:
    """The frames of the package, innermost first."""
    stack = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(str(HONE)):
            stack.append(frame)
        frame = frame.f_back
    return stack


def traced(folder: Path, device: str) -> tuple[Functions, list[FrameType]]:
    """The functions of one GRPO step of a tiny model, and the stack at the loss formula."""
    from hone.algorithms.policy_losses.policy_loss import ppo_clip
    from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
    from hone.trainer.main_ppo import run
    from hone.trainer.ppo.trainer import PPOTrainer
    from hone.verl.dialect import load_config

    tokenizer = character_tokenizer("0123456789+=")
    model = save_pretrained(tiny_lm(len(tokenizer), hidden=32), tokenizer, folder / "model")
    row = {"data_source": "arithmetic", "prompt": "1+1=", "reward_model": {"ground_truth": 2}}
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 2)
    config = load_config(
        [
            "algorithm.adv_estimator=grpo",
            f"data.train_files={folder / 'rows.jsonl'}",
            "data.val_files=[]",
            "data.prompt_format=raw",
            "data.train_batch_size=2",
            "data.max_response_length=4",
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.rollout.n=2",
            "trainer.total_training_steps=1",
            "trainer.save_freq=0",
            "trainer.logger=[jsonl]",
            f"trainer.device={device}",
            f"trainer.default_local_dir={folder / 'run'}",
        ]
    )
    functions: dict[str, set[str]] = {}
    at_the_formula: list[FrameType] = []
    stepping = threading.Event()

    def watch(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code is PPOTrainer.step.__code__ and event in ("call", "return"):
            (stepping.set if event == "call" else stepping.clear)()
        ours = code.co_filename.startswith(str(HONE)) and not code.co_name.startswith("<")
        if event != "call" or not ours or not stepping.is_set():
            return
        name = Path(code.co_filename).relative_to(HONE).as_posix()
        if code.co_qualname in functions.get(name, ()):
            return
        stack = frames(frame)
        if any(caller.f_code.co_filename.startswith(ENGINE) for caller in stack):
            return
        if code is ppo_clip.__code__:
            at_the_formula.extend(reversed(stack))
        functions.setdefault(name, set()).add(code.co_qualname)

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        run(config)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return {name: sorted(functions[name]) for name in sorted(functions)}, at_the_formula


def lines_of(file: str, functions: list[str]) -> int:
    """Lines of these functions; one that is no longer there counts nothing."""
    lines = 0

    def visit(node: ast.AST, prefix: str) -> None:
        nonlocal lines
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = prefix + child.name
                if name in functions and not isinstance(child, ast.ClassDef):
                    assert child.end_lineno is not None
                    lines += child.end_lineno - child.lineno + 1
                else:
                    inside = "." if isinstance(child, ast.ClassDef) else ".<locals>."
                    visit(child, name + inside)
            else:
                visit(child, prefix)

    if (HONE / file).is_file():
        visit(ast.parse((HONE / file).read_text(encoding="utf-8")), "")
    return lines


def hops(stack: list[FrameType]) -> list[str]:
    """Frames from the command to the formula; the controller's, one below the other, are one: dispatch."""
    names: list[str] = []
    for frame in stack:
        file = Path(frame.f_code.co_filename).relative_to(HONE)
        dispatch = file.parts[0] == "controller"
        name = "dispatch" if dispatch else f"{file.stem}.{frame.f_code.co_qualname}"
        if not (dispatch and names and names[-1] == "dispatch"):
            names.append(name)
    return names


def report(path: Functions) -> str:
    rows = [f"{lines_of(file, path[file]):5d}  {file}: {', '.join(path[file])}" for file in path]
    total = sum(lines_of(file, path[file]) for file in path)
    return "\n".join([*rows, f"{total} lines in {len(path)} files"])


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> tuple[Functions, list[FrameType]]:
    if sys.version_info < (3, 11):
        pytest.skip("code objects have no co_qualname before Python 3.11")
    return traced(tmp_path_factory.mktemp("path"), "cpu")


def check(path: Functions) -> None:
    assert len(path) <= MOST_FILES, report(path)
    assert sum(lines_of(file, path[file]) for file in path) <= MOST_LINES, report(path)


def test_few_frames_lie_between_the_command_and_the_loss_formula(
    step: tuple[Functions, list[FrameType]],
) -> None:
    names = hops(step[1])
    assert names[0] == "main_ppo.run"
    assert names[-1] == "policy_loss.ppo_clip"
    assert len(names) <= MOST_FRAMES, " → ".join(names)


def test_a_batch_can_be_followed_in_a_sitting_on_a_cpu(
    step: tuple[Functions, list[FrameType]],
) -> None:
    check(step[0])


def test_a_batch_can_be_followed_in_a_sitting_on_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        check(traced(tmp_path, "cuda")[0])
    elif ON_A_GPU.is_file():
        check(json.loads(ON_A_GPU.read_text(encoding="utf-8")))
    else:
        pytest.skip("no GPU, and no list of a trace on one")


def test_a_function_counts_with_all_its_lines_and_what_is_gone_with_none() -> None:
    assert lines_of("cores.py", ["usable_cores"]) == 5
    assert lines_of("cores.py", ["gone"]) == lines_of("gone.py", ["gone"]) == 0


if __name__ == "__main__":
    kind = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        functions, stack = traced(Path(folder), kind)
    if kind == "cuda":
        ON_A_GPU.write_text(json.dumps(functions, indent=1) + "\n", encoding="utf-8")
    print(report(functions))
    print(f"{len(hops(stack))} frames: {' → '.join(hops(stack))}")
