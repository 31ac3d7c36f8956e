"""`hone doctor` reports what is installed, what is missing, and whether one training step works.

The program changes nothing. Each line of its report says whether one part is fine, missing or broken. The
line of a missing part names the feature that the part would enable.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hone import __version__
from hone.cores import usable_cores

REQUIRED_PACKAGES = (
    "torch", "transformers", "tokenizers", "tensordict", "hydra-core", "omegaconf", "numpy", "pyarrow",
    "safetensors", "peft", "rich", "matplotlib",
)  # fmt: skip
OPTIONAL_PACKAGES = {
    "ray": ("ray", "more than one process or machine for `hone train` (trainer.controller=ray)"),
    "tensorboard": ("tensorboard", "the tensorboard tracker"),
    "wandb": ("wandb", "the wandb tracker"),
    "mlflow": ("mlflow", "the mlflow tracker"),
    "swanlab": ("swanlab", "the swanlab tracker"),
    "math-verify": ("math", "symbolic comparison of mathematical answers"),
    "sympy": ("math", "symbolic comparison of mathematical answers"),
    "mcp": ("mcp", "tools of MCP servers"),
    "reasoning-gym": ("gym", "data sets of reasoning-gym as environments"),
    "flash-attn": (
        None,
        "its attention kernel on a GPU in place of torch's own (pip install flash-attn)",
    ),
    "datasets": (None, "`hone data prepare --hub` (pip install datasets)"),
}
"""{package: (the extra of hone-rl that installs the package, or None; the feature of the package)}."""


class State(str, Enum):
    """The state of a part; the value is its mark in the report."""

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
    """Yields every finding as soon as it is known; slow checks come last."""
    yield from _machine_findings()
    yield from _package_findings()
    yield from _sandbox_findings(self_test)
    if self_test:
        yield _finding_of_action("self-test", "one GRPO step of a tiny model", run_training_step)


def report(
    print_line: Callable[[str], None],
    findings: Iterable[Finding] | None = None,
    *,
    self_test: bool = True,
) -> int:
    """Prints every finding; returns 1 if anything is broken, else 0."""
    num_broken, section = 0, None
    for finding in findings or examine(self_test=self_test):
        if finding.section != section:
            section = finding.section
            print_line(f"{section}:")
        num_broken += finding.state is State.BROKEN
        print_line(f"  {finding.state.value} {finding.name:<14} {finding.detail}")
    print_line(
        "everything needed is here" if not num_broken else f"{num_broken} of these need attention"
    )
    return 1 if num_broken else 0


def chat_template_findings(model: str) -> Iterator[Finding]:
    """Yields, per case, whether the tokens that agent loops append equal the chat template's rendering."""
    from hone.agents.observations import TemplateMismatch, compare_with_template
    from hone.models.load import load_tokenizer

    tokenizer = load_tokenizer(model)
    if not tokenizer.chat_template:
        yield Finding("chat template", model, State.MISSING, "it has none; prompts are plain text")
        return
    for result in compare_with_template(tokenizer, {}):
        if isinstance(result, TemplateMismatch):
            yield Finding("chat template", result.case, State.MISSING, result.problem)
        else:  # the name of a case without mismatch
            yield Finding("chat template", result, State.FINE, "the same tokens")


def _machine_findings() -> Iterator[Finding]:
    details = {
        "hone": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(usable_cores()),
        "disk here": f"{shutil.disk_usage('.').free / 1e9:.0f} GB free",
    }
    for name, detail in details.items():
        yield Finding("machine", name, State.FINE, detail)
    yield _finding_of_action("machine", "devices", _devices)


def _devices() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device: training and rollout run on the CPU in float32"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}"


def _package_findings() -> Iterator[Finding]:
    for name in REQUIRED_PACKAGES:
        version = _version(name)
        state = State.FINE if version else State.BROKEN
        yield Finding("packages", name, state, version or "missing: pip install hone-rl")
    for name, (extra, feature) in OPTIONAL_PACKAGES.items():
        if version := _version(name):
            yield Finding("optional packages", name, State.FINE, f"{version}: {feature}")
        else:
            install = f" (pip install 'hone-rl[{extra}]')" if extra else ""
            detail = f"would enable {feature}{install}"
            yield Finding("optional packages", name, State.MISSING, detail)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _sandbox_findings(self_test: bool) -> Iterator[Finding]:
    """Yields the state of each sandbox layer; the self-test runs attacks that the sandbox must contain."""
    from hone.sandbox import SandboxError, layers
    from hone.sandbox import self_test as run_attacks

    for name, layer in layers().items():
        state = State.FINE if layer.active else State.MISSING
        yield Finding("sandbox", name, state, layer.detail)
    if not self_test:
        return
    try:
        checks = run_attacks()
    except SandboxError as error:
        yield Finding("sandbox", "self-test", State.MISSING, f"code rewards cannot run: {error}")
        return
    for check in checks:
        if not check.passed:
            yield Finding("sandbox", check.name, State.BROKEN, check.detail)
    num_contained = sum(check.passed for check in checks)
    state = State.FINE if num_contained == len(checks) else State.BROKEN
    yield Finding(
        "sandbox", "self-test", state, f"{num_contained} of {len(checks)} attacks contained"
    )


def _finding_of_action(section: str, name: str, action: Callable[[], str]) -> Finding:
    """Returns a finding whose detail is the result of `action`, or its error."""
    try:
        return Finding(section, name, State.FINE, action())
    except Exception as error:  # reported as a finding
        return Finding(section, name, State.BROKEN, f"{type(error).__name__}: {error}")


def run_training_step() -> str:
    """Runs one GRPO step of a tiny model on addition problems; returns its duration and metrics as text."""
    from hone.config import load_config
    from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
    from hone.tracking import read_metrics
    from hone.trainer import quickstart
    from hone.trainer.main_ppo import run

    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hone-doctor-") as temporary:
        folder, tokenizer = Path(temporary), character_tokenizer()
        model = save_pretrained(
            tiny_lm(len(tokenizer), max_positions=64), tokenizer, folder / "model"
        )
        files = {name: folder / f"{name}.jsonl" for name in ("train", "test")}
        quickstart.write_data(files, seed=1)
        settings = [
            *quickstart.overrides(files, model, folder / "run", seed=1),
            "data.val_files=[]",
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.entropy_coeff=0.01",  # for a gradient if all answers are wrong
            "actor_rollout_ref.rollout.n=2",
            "trainer.total_training_steps=1",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.logger=[jsonl]",
        ]
        run(load_config(settings))
        metrics = read_metrics(folder / "run")[-1]
    seconds = time.perf_counter() - start
    return (
        f"{seconds:.1f} s: {metrics['response_length/mean']:.0f} tokens per response, gradient norm "
        f"{metrics['actor/grad_norm']:.3g}"
    )
