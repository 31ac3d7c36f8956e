"""`hone quickstart` trains a tiny new policy on addition problems with GRPO, on this machine, in two minutes.

Nothing is downloaded. SFT teaches the base policy the answer format with mostly wrong answers, so the
initial score of RL is low. RL then learns the right answers from rewards. Held-out sums are in no training
data.
"""

from __future__ import annotations

import json
import random
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from hone import program_dialect
from hone.config import PPOTrainerConfig, compose
from hone.config.engine import FSDPConfig, OptimConfig
from hone.tokenizer import Tokenizer
from hone.tracking import atomic_write_text, progress, read_metrics
from hone.tracking.console import hone_command, screen
from hone.tracking.lock import lock_target
from hone.trainer.command_line import path_override
from hone.types import Row

DATA_SOURCE = "arithmetic"
ACCURACY = f"val-core/{DATA_SOURCE}/acc/mean@1"
NUM_HELD_OUT = 320
MAX_A, MAX_B = 299, 9
"""The largest summands of a sum a + b."""
SFT_ROWS_PER_SUM = 8
CORRECT_SHARE = 0.25
"""The fraction of SFT rows with the right answer."""
WRONG_ANSWER_OFFSET = 10
"""A wrong answer is too large by this offset; its last digit is right, so SFT still learns to add."""
SFT_STEPS, SFT_ROWS_PER_BATCH, SFT_LR = 500, 64, 2e-3
"""RL needs a policy that can add; for all tested seeds, SFT converged within 400 steps."""
ANSWER_TAGS = ("<answer>", "</answer>")
CHARACTERS = "0123456789+="
MARKER_FILE = ".quickstart"
"""Marks folders that this program created, and may therefore delete."""
DATA_FILES = {"train": "train.jsonl", "test": "test.jsonl"}
BASE_FOLDER, RUN_FOLDER, CURVE_FILE = "base", "run", "curve.png"
NEXT_COMMANDS = (
    "{hone} quickstart algorithm.adv_estimator=rloo      # another estimator",
    "{hone} quickstart algorithm.adv_estimator=gae       # PPO with a critic",
    "{hone} quickstart --seed 2 trainer.total_training_steps=200",
    "{hone} train data.train_files={train} data.val_files={test} data.prompt_format=raw"
    " actor_rollout_ref.model.path={base} trainer.total_training_steps=100"
    " trainer.default_local_dir={folder}-by-hand      # for your own files and model: change these paths",
)
"""The commands that the summary suggests, with placeholders for this program and the run's paths."""


@dataclass(frozen=True)
class Sum:
    """The problem a + b."""

    a: int
    b: int

    @property
    def question(self) -> str:
        return f"{self.a:03d}+{self.b}="

    def row(self, index: int, split: str) -> Row:
        return {
            "data_source": DATA_SOURCE,
            "prompt": self.question,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": self.a + self.b},
            "extra_info": {"split": split, "index": index},
        }


def split_problems(seed: int) -> tuple[list[Sum], list[Sum]]:
    """Returns the training sums and the held-out sums, shuffled by the seed."""
    problems = [Sum(a, b) for a in range(MAX_A + 1) for b in range(1, MAX_B + 1)]
    random.Random(seed).shuffle(problems)
    return problems[NUM_HELD_OUT:], problems[:NUM_HELD_OUT]


def write_data(files: dict[str, Path], seed: int) -> None:
    """Writes the training and held-out RL rows as JSONL."""
    for (name, file), problems in zip(files.items(), split_problems(seed), strict=True):
        lines = [json.dumps(problem.row(i, name)) for i, problem in enumerate(problems)]
        atomic_write_text(file, "\n".join(lines) + "\n")


def _sft_rows(
    problems: Sequence[Sum], tokenizer: Tokenizer, seed: int
) -> Iterator[dict[str, list[int]]]:
    """Yields the SFT rows of each sum, which have the right format and mostly wrong answers."""
    generator = random.Random(seed)
    for problem in problems:
        for _ in range(SFT_ROWS_PER_SUM):
            offset = 0 if generator.random() < CORRECT_SHARE else WRONG_ANSWER_OFFSET
            prompt = tokenizer.encode(problem.question, add_special_tokens=False)
            answer = f"<answer>{problem.a + problem.b + offset:03d}</answer>"
            response = tokenizer.encode(answer, add_special_tokens=False)
            assert tokenizer.eos_token_id is not None
            response.append(tokenizer.eos_token_id)
            yield {
                "input_ids": prompt + response,
                "loss_mask": [0] * len(prompt) + [1] * len(response),
            }


def build_base_policy(folder: Path, seed: int, threads: int) -> Path:
    """Trains a new decoder of 0.5M parameters by SFT on answers that are mostly wrong."""
    import torch

    from hone.controller.threads import set_thread_count
    from hone.engine.build import build_engine
    from hone.models.policy import PolicyModel
    from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
    from hone.ops.rows import MicroBatchRule
    from hone.trainer.sft.trainer import SFTTrainer

    set_thread_count(threads)
    torch.manual_seed(seed)
    tokenizer = character_tokenizer(CHARACTERS, words=ANSWER_TAGS)
    lm = tiny_lm(len(tokenizer), hidden=128, kv_heads=4, mlp=512, max_positions=64, seed=seed)
    rule = MicroBatchRule(rows=None, tokens=16384)
    engine = build_engine(
        PolicyModel(lm),
        optim=OptimConfig(
            lr=SFT_LR,
            lr_warmup_steps=20,
            lr_scheduler_type="cosine",
            min_lr_ratio=0.1,
            total_training_steps=SFT_STEPS,
        ),
        grad_clip=1.0,
        fsdp=FSDPConfig(),
        train_micro_batch_rule=rule,
        infer_micro_batch_rule=rule,
        response_width=8,
    )
    training_sums, _ = split_problems(seed)
    trainer = SFTTrainer(
        engine,
        list(_sft_rows(training_sums, tokenizer, seed)),
        pad_token_id=tokenizer.pad_token_id,
        rows_per_batch=SFT_ROWS_PER_BATCH,
        seed=seed,
    )
    with progress("warm up a base policy (SFT)", SFT_STEPS) as bar:
        for _ in range(SFT_STEPS):
            bar.advance(note=f"loss {trainer.step()['train/loss']:.2f}")
    return save_pretrained(lm, tokenizer, folder)


def overrides(files: dict[str, Path], model: Path, run: Path, seed: int) -> list[str]:
    """Returns the command-line overrides of the RL run."""
    return [
        "algorithm.adv_estimator=grpo",
        path_override("data.train_files", files["train"]),
        path_override("data.val_files", files["test"]),
        "data.prompt_format=raw",
        "data.train_batch_size=32",
        "data.max_prompt_length=16",
        "data.max_response_length=8",
        path_override("actor_rollout_ref.model.path", model),
        "actor_rollout_ref.actor.optim.lr=2e-4",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.actor.optim.min_lr_ratio=0.1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.rollout.n=8",
        "critic.optim.lr=1e-3",
        "trainer.total_training_steps=100",
        "trainer.test_freq=10",
        f"trainer.seed={seed}",
        "trainer.project_name=quickstart",
        f"trainer.experiment_name=quickstart-seed-{seed}",
        path_override("trainer.default_local_dir", run),
        "trainer.resume_mode=disable",
    ]


def main(*, out: str, seed: int, extra_overrides: Sequence[str] = ()) -> None:
    """Checks the config, builds and trains the policy, and prints a comparison.

    The run is in the folder `out`/seed-N. `extra_overrides` change the config of the RL run.
    """
    folder = Path(out) / f"seed-{seed}"
    with progress("load libraries"):
        import hone.trainer.sft.trainer  # noqa: F401 (importing torch and transformers takes seconds)
        from hone.trainer.main_ppo import run as train
        from hone.trainer.ppo.plan import Plan
        from hone.trainer.threads import resolve_threads

    files = {name: folder / file for name, file in DATA_FILES.items()}
    model = folder / BASE_FOLDER
    composed = compose(
        [*overrides(files, model, folder / RUN_FOLDER, seed), *extra_overrides],
        dialect=program_dialect(),
    )
    config = composed.config
    Plan.of(config)  # raises for an unknown estimator
    with lock_target(folder):
        prepare_folder(folder)
        screen().line(
            f"a small policy is created, then learns sums from rewards; all files are in {folder}"
        )
        config, threads = resolve_threads(config, local_world_size=1)
        start = time.perf_counter()
        write_data(files, seed)
        build_base_policy(model, seed, threads)
        warm_up_end = time.perf_counter()
        train(config, composed.origins)
        end = time.perf_counter()
        run = Path(config.trainer.default_local_dir)
        print_summary(folder, run, config, warm_up_s=warm_up_end - start, train_s=end - warm_up_end)


def prepare_folder(folder: Path) -> None:
    """Creates an empty folder. An earlier result of quickstart is deleted; any other content is renamed."""
    quickstart_names = {MARKER_FILE, *DATA_FILES.values(), BASE_FOLDER, RUN_FOLDER, CURVE_FILE}
    file_names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if MARKER_FILE in file_names and file_names <= quickstart_names:
        shutil.rmtree(folder)
    elif file_names or folder.is_file():
        candidates = (folder.with_name(f"{folder.name}.earlier-{n}") for n in count(1))
        new_name = next(candidate for candidate in candidates if not candidate.exists())
        folder.rename(new_name)
        screen().line(f"{folder} has files that quickstart did not write; renamed to {new_name}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER_FILE).touch()


def print_summary(
    folder: Path, run: Path, config: PPOTrainerConfig, *, warm_up_s: float, train_s: float
) -> None:
    """Prints the before/after table, three answers, the curve and the next commands."""
    from rich.table import Table

    from hone.tracking.curve import draw_curve

    validation_metrics = [row for row in read_metrics(run / "metrics.jsonl") if ACCURACY in row]
    before, after = validation_metrics[0], validation_metrics[-1]
    title = f"{NUM_HELD_OUT} held-out sums, greedy ({config.algorithm.adv_estimator})"
    table = Table("", "before", "after", title=title)
    table.add_row("accuracy", f"{before[ACCURACY]:.1%}", f"{after[ACCURACY]:.1%}")
    table.add_row("step", str(before["step"]), str(after["step"]))
    table.add_row("seconds", f"{warm_up_s:.0f} (warm-up)", f"{train_s:.0f} (training)")
    answer_table = Table("sum", "before", "after", title="three sums that it learned")
    for prompt_and_answers in most_improved(run, before["step"], after["step"]):
        answer_table.add_row(*prompt_and_answers)
    metrics_file = run / "metrics.jsonl"
    curve_file = draw_curve(
        metrics_file, [ACCURACY, "reward/mean"], folder / CURVE_FILE, "quickstart"
    )
    screen().print(table, answer_table)
    closing_lines = [
        f"learning curve: {curve_file}",
        f"metrics:        {metrics_file}",
        "go on with:",
    ]
    for line in [*closing_lines, *(f"  {command}" for command in next_commands(folder))]:
        screen().line(line)


def next_commands(folder: Path) -> list[str]:
    """Returns the commands of `NEXT_COMMANDS`, with the paths of the run in `folder`."""
    paths = {name: folder / file for name, file in DATA_FILES.items()}
    paths |= {"base": folder / BASE_FOLDER, "folder": folder}
    quoted_paths = {name: shlex.quote(str(path)) for name, path in paths.items()}
    return [command.format(**quoted_paths, hone=hone_command()) for command in NEXT_COMMANDS]


def most_improved(run: Path, first_step: int, last_step: int) -> list[tuple[str, str, str]]:
    """Returns the three held-out prompts whose scores rose most, with the answers at two steps.

    A tuple has the prompt, the answer at the first step and the answer at the last step.
    """
    import pyarrow.parquet as pq

    columns = ["prompt_text", "response_text", "score"]
    first_rows, last_rows = (
        pq.read_table(run / "validation" / f"step_{step}.parquet", columns=columns).to_pylist()
        for step in (first_step, last_step)
    )
    pairs = list(zip(first_rows, last_rows, strict=True))
    pairs.sort(key=lambda pair: pair[0]["score"] - pair[1]["score"])  # most improved first
    return [
        (first["prompt_text"], first["response_text"], last["response_text"])
        for first, last in pairs[:3]
    ]
