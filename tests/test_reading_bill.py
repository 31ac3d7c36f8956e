"""The reading bill: what a newcomer opens to follow one batch from the command line to new weights.

`python tests/test_reading_bill.py` prints it. The path is that of `hone train` with GRPO, one process
and single-turn rows. Beside it stand the files its files call for a detail that their names and
docstrings tell; a thorough reader opens these too, and their lines are printed, not hidden.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import FrameType

HONE = Path(__file__).resolve().parents[1] / "hone"

PATH = {
    "trainer/main_ppo.py": "the command",
    "trainer/ppo/trainer.py": "the loop: step() is the list of verbs",
    "data/loader.py": "next prompts",
    "workers/rollout_worker.py": "generate: loops beside their engine, and its weights",
    "workers/actor.py": "log-probs and update",
    "agents/runner.py": "generate: every row through its loop",
    "agents/loops/single_turn.py": "generate: the loop of these rows",
    "rollout/native/core.py": "generate: tokens",
    "rewards/managers/rule.py": "score",
    "algorithms/advantages/grpo.py": "advantages",
    "workers/objectives.py": "update: mini-batches, and what is minimised",
    "engine/engine.py": "update: micro-batches, forward, backward",
    "models/policy.py": "update: from packed rows to log-probs",
    "algorithms/policy_losses/vanilla.py": "update: the loss",
    "engine/optimizer.py": "update: the new weights",
}

BESIDE = (
    "cli.py",
    "trainer/ppo/plan.py",
    "trainer/ppo/source.py",
    "trainer/ppo/publish.py",
    "trainer/ppo/collect.py",
    "trainer/ppo/scoring.py",
    "trainer/ppo/credit.py",
    "trainer/ppo/metrics.py",
    "agents/trajectory.py",
    "agents/loop_thread.py",
    "rollout/native/engine.py",
    "rewards/managers/naive.py",
    "algorithms/advantages/outcome.py",
    "algorithms/policy_losses/policy_loss.py",
    "algorithms/aggregation.py",
    "ops/packing.py",
    "ops/logprobs.py",
    "engine/microbatch.py",
)

MOST_FILES, MOST_LINES = 15, 2750


def lines_of(name: str) -> int:
    return len((HONE / name).read_text(encoding="utf-8").splitlines())


def bill() -> str:
    rows = [f"{lines_of(name):5d}  hone/{name:40} {what}" for name, what in PATH.items()]
    total, beside = sum(map(lines_of, PATH)), sum(map(lines_of, BESIDE))
    rows.append(f"{total:5d}  lines in {len(PATH)} files")
    rows.append(f"{beside:5d}  more in {len(BESIDE)} files beside the path: {', '.join(BESIDE)}")
    return "\n".join(rows)


def test_one_batch_can_be_followed_in_a_sitting() -> None:
    print("\n" + bill())
    assert len(PATH) <= MOST_FILES
    assert sum(map(lines_of, PATH)) <= MOST_LINES


def test_a_batch_really_goes_through_every_file_of_the_path(tmp_path: Path) -> None:
    from hone.config import load_config
    from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
    from hone.trainer.main_ppo import run

    tokenizer = character_tokenizer("0123456789+=")
    model = save_pretrained(tiny_lm(len(tokenizer), hidden=32), tokenizer, tmp_path / "model")
    row = {"data_source": "arithmetic", "prompt": "1+1=", "reward_model": {"ground_truth": 2}}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 2)
    config = load_config(
        [
            "algorithm.adv_estimator=grpo",
            f"data.train_files={tmp_path / 'rows.jsonl'}",
            "data.val_files=[]",
            "data.prompt_format=raw",
            "data.train_batch_size=2",
            "data.max_response_length=4",
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.rollout.n=2",
            "trainer.total_training_steps=1",
            "trainer.save_freq=0",
            "trainer.logger=[jsonl]",
            "trainer.device=cpu",
            f"trainer.default_local_dir={tmp_path / 'run'}",
        ]
    )
    opened: set[str] = set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            opened.add(frame.f_code.co_filename)

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        run(config)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    unread = [name for name in (*PATH, *BESIDE) if str(HONE / name) not in opened]
    assert unread == ["cli.py"]  # this run was started from Python


if __name__ == "__main__":
    print(bill())
