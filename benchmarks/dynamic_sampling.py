"""Dynamic sampling on a long tail: rounds that overlap beside rounds one by one, in the same run.

Every eighth prompt has responses sixteen times as long as the others', and half of the groups teach
nothing, so that each step needs about two rounds. Both ways train on the same groups.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.rollout.native.core import NativeCore
from tests.trainer.runs import ALPHABET, Task, opened, task_row

STEPS, ROWS, PROMPTS, SAMPLES = 5, 512, 16, 4
SHORT, LONG = 16, 256
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(set(solution_str))) if extra_info["index"] % 2 else 0.0
"""
LOOP = f"""
from hone.agents.contract import AgentLoopBase, AgentLoopOutput


class LongTail(AgentLoopBase):
    async def run(self, sampling_params, **row):
        prompt = self.prompt_ids(row)
        length = {LONG} if row["extra_info"]["index"] % 8 == 3 else {SHORT}
        out = await self.server_manager.generate(
            prompt_ids=prompt,
            sampling_params={{**sampling_params, "max_tokens": length, "ignore_eos": True}},
        )
        mask = [1] * len(out.token_ids)
        return AgentLoopOutput(prompt, out.token_ids, mask, out.log_probs, num_turns=2)
"""


def main() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = _task(folder)
        seconds: dict[int, list[float]] = {1: [], 2: []}
        steps: dict[int, list[float]] = {1: [], 2: []}
        kept: dict[int, list[list[str]]] = {1: [], 2: []}
        for together in (1, 2):
            overrides = _overrides(task, folder / str(together), together)
            with opened(overrides) as trainer, counted_steps() as count:
                for step in range(STEPS):
                    started, before = time.perf_counter(), count[0]
                    batch = trainer.collect()
                    trainer.ledger.step_done()
                    if step:  # the first one warms up
                        seconds[together].append(time.perf_counter() - started)
                        steps[together].append(count[0] - before)
                    kept[together].append(list(batch.non_tensor_batch["uid"]))
    assert kept[1] == kept[2], "both ways must train on the same groups"
    ratio = statistics.median(seconds[1]) / statistics.median(seconds[2])
    fewer = statistics.median(steps[1]) / statistics.median(steps[2])
    print(f"{fewer:.2f} times fewer decode steps, {ratio:.2f} times as fast on this CPU")
    return {
        "decode_steps_one_by_one": statistics.median(steps[1]),
        "decode_steps_overlapping": statistics.median(steps[2]),
        "fewer_decode_steps": round(fewer, 3),
        "one_by_one_s": round(statistics.median(seconds[1]), 3),
        "overlapping_s": round(statistics.median(seconds[2]), 3),
        "overlapping_over_one_by_one": round(ratio, 3),
    }


@contextmanager
def counted_steps() -> Iterator[list[int]]:
    """How many tokens deep the engine decoded: what a GPU's time follows, where a CPU's follows the rows."""
    count, step = [0], NativeCore.step

    def counting(self: NativeCore, *arguments: Any) -> Any:
        count[0] += 1
        return step(self, *arguments)

    NativeCore.step = counting  # type: ignore[method-assign]
    try:
        yield count
    finally:
        NativeCore.step = step  # type: ignore[method-assign]


def _task(folder: Path) -> Task:
    tokenizer = character_tokenizer(ALPHABET)
    lm = tiny_lm(len(tokenizer), hidden=128, layers=4, mlp=256, seed=3)
    model = save_pretrained(lm, tokenizer, folder / "model")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(task_row(i, i)) + "\n" for i in range(ROWS)))
    (folder / "reward.py").write_text(REWARD)
    (folder / "loop.py").write_text(LOOP)
    return Task(model, rows, rows, folder / "reward.py")


def _overrides(task: Task, run: Path, together: int) -> list[str]:
    loop = task.rewards.with_name("loop.py")
    return task.overrides(
        run,
        "algorithm.filter_groups.enable=true",
        f"algorithm.filter_groups.max_inflight_gen_batches={together}",
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.rollout.agent.default_agent_loop='{loop}:LongTail'",
        "actor_rollout_ref.rollout.max_num_seqs=64",
        f"data.max_response_length={LONG}",
    )


if __name__ == "__main__":
    main()
