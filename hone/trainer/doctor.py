"""`hone doctor`: what this machine has, what it lacks, and whether one step of training works.

Looks and tries; changes nothing. Every finding is a line: fine, missing (with what it would enable), or
broken.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hone import __version__

REQUIRED = (
    *("torch", "transformers", "tokenizers", "tensordict", "hydra-core", "omegaconf"),
    *("numpy", "pyarrow", "safetensors", "peft", "rich", "matplotlib"),
)
OPTIONAL = {
    "ray": ("ray", "more than one process or machine for `hone train` (trainer.controller=ray)"),
    "tensorboard": ("tensorboard", "the tensorboard tracker"),
    "wandb": ("wandb", "the wandb tracker"),
    "mlflow": ("mlflow", "the mlflow tracker"),
    "swanlab": ("swanlab", "the swanlab tracker"),
    "math-verify": ("math", "symbolic comparison of mathematical answers"),
    "sympy": ("math", "symbolic comparison of mathematical answers"),
    "flash-attn": (
        None,
        "its attention kernel on a GPU in place of torch's own (pip install flash-attn)",
    ),
    "datasets": (None, "`hone data prepare --hub` (pip install datasets)"),
}
"""Package to the extra that installs it, and what it enables."""


class State(str, Enum):
    FINE = "ok"
    MISSING = "--"
    BROKEN = "!!"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    section: str
    name: str
    state: State
    detail: str


def examine(*, self_test: bool = True) -> Iterator[Finding]:
    """Every finding, as it is made; the slow ones come last."""
    yield from _machine()
    yield from _packages()
    yield from _sandbox(self_test)
    if self_test:
        yield _tried("self-test", "one GRPO step of a tiny model", training_step)


def report(say: Callable[[str], None], *, self_test: bool = True) -> int:
    """Say every finding; 0 when nothing is broken, else 1."""
    broken = 0
    section = None
    for finding in examine(self_test=self_test):
        if finding.section != section:
            section = finding.section
            say(f"{section}:")
        broken += finding.state is State.BROKEN
        say(f"  {finding.state.value} {finding.name:<14} {finding.detail}")
    say("everything needed is here" if not broken else f"{broken} of these need attention")
    return 1 if broken else 0


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    free_gb = shutil.disk_usage(".").free / 1e9
    yield Finding("machine", "hone", State.FINE, __version__)
    yield Finding("machine", "python", State.FINE, platform.python_version())
    yield Finding("machine", "system", State.FINE, f"{platform.system()} {platform.machine()}")
    yield Finding("machine", "cores", State.FINE, str(cores))
    yield Finding("machine", "disk here", State.FINE, f"{free_gb:.0f} GB free")
    yield _tried("machine", "devices", _devices)


def _devices() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device: training and rollout run on the CPU in float32"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}"


def _packages() -> Iterator[Finding]:
    for name in REQUIRED:
        version = _version(name)
        if version is None:
            yield Finding("packages", name, State.BROKEN, "missing: pip install hone-rl")
        else:
            yield Finding("packages", name, State.FINE, version)
    for name, (extra, enables) in OPTIONAL.items():
        version = _version(name)
        if version is not None:
            yield Finding("optional packages", name, State.FINE, f"{version}: {enables}")
        else:
            how = f" (pip install 'hone-rl[{extra}]')" if extra else ""
            yield Finding("optional packages", name, State.MISSING, f"would enable {enables}{how}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _sandbox(self_test: bool) -> Iterator[Finding]:
    from hone.sandbox import SandboxError, layers
    from hone.sandbox import self_test as attack

    for name, layer in layers().items():
        state = State.FINE if layer.active else State.MISSING
        yield Finding("sandbox", name, state, layer.detail)
    if not self_test:
        return
    try:
        checks = attack()
    except SandboxError as error:
        yield Finding("sandbox", "self-test", State.MISSING, f"code rewards cannot run: {error}")
        return
    for check in checks:
        if not check.passed:
            yield Finding("sandbox", check.name, State.BROKEN, check.detail)
    held = sum(check.passed for check in checks)
    yield Finding(
        "sandbox",
        "self-test",
        State.FINE if held == len(checks) else State.BROKEN,
        f"{held} of {len(checks)} attacks contained",
    )


def _tried(section: str, name: str, action: Callable[[], str]) -> Finding:
    try:
        return Finding(section, name, State.FINE, action())
    except Exception as error:  # a doctor reports whatever is broken, and goes on
        return Finding(section, name, State.BROKEN, f"{type(error).__name__}: {error}")


def training_step() -> str:
    """Make a tiny model and eight sums, take one GRPO step; how long it took and its numbers."""
    from hone.tracking import read_metrics

    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hone-doctor-") as folder:
        metrics = read_metrics(_one_step(Path(folder)))[-1]
    seconds = time.perf_counter() - started
    return (
        f"{seconds:.1f} s: {metrics['response_length/mean']:.0f} tokens a response, gradient norm "
        f"{metrics['actor/grad_norm']:.3g}"
    )


def _one_step(folder: Path) -> Path:
    from hone.config import load_config
    from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
    from hone.tracking import atomic_write_text
    from hone.trainer.main_ppo import run

    tokenizer = character_tokenizer()
    save_pretrained(tiny_lm(len(tokenizer), max_positions=64), tokenizer, folder / "model")
    rows = [
        {
            "data_source": "arithmetic",
            "prompt": f"{i}+{i}=",
            "reward_model": {"style": "rule", "ground_truth": 2 * i},
        }
        for i in range(8)
    ]
    atomic_write_text(folder / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder / 'rows.jsonl'}",
        "data.val_files=[]",
        "data.prompt_format=raw",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.entropy_coeff=0.01",  # a gradient even where no answer is right
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.val_before_train=false",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={folder / 'run'}",
    ]
    run(load_config(settings))
    return folder / "run"
