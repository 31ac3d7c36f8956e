"""The whole GRPO step beside trl's GRPOTrainer: 8 prompts × 8, 16 + 32 tokens, 8M parameters, fp32.

Both sides sample with their own engine, score with a trivial reward, and take one optimizer step a batch.
Blocks of steps alternate; the ratio is of the medians. trl is no dependency: without it this is left out.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 16, 32
BLOCKS, STEPS = 5, 5
WORDS = 600


def main() -> dict[str, Any]:
    import torch
    import trl  # noqa: F401  absent: the caller says so

    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder))
        ours, theirs = Ours(model, Path(folder)), Theirs(model, Path(folder))
        hone_s: list[float] = []
        trl_s: list[float] = []
        ours.steps(2)
        for _ in range(BLOCKS):
            trl_s += theirs.steps(STEPS)
            hone_s += ours.steps(STEPS)
        breakdown = ours.timing()
    a, b = statistics.median(hone_s), statistics.median(trl_s)
    print(f"hone {a:.3f} s a step, trl {b:.3f} s: {b / a:.2f}x (target 1.35x, stretch 1.6x)")
    print("where hone's step goes:", {k: round(v, 3) for k, v in breakdown.items()})
    return {"hone_s": a, "trl_s": b, "ratio": b / a, "timing_s": breakdown}


def build(folder: Path) -> Path:
    """The model of the platform notes: 8.05M parameters, 704 tokens."""
    from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm

    characters = "abcdefghijklmnopqrstuvwxyz"
    words = [f"<{i}>" for i in range(704 - 3 - len(characters))]
    tokenizer = character_tokenizer(characters, words=words)
    lm = tiny_lm(704, hidden=256, layers=8, heads=8, kv_heads=4, mlp=1024, tie_embeddings=True)
    lm.generation_config.eos_token_id = None  # every response has the same length
    lm.config.eos_token_id = None
    return save_pretrained(lm, tokenizer, folder / "model")


def prompts(count: int) -> list[str]:
    return [
        "".join(f"<{(i * 31 + j * 7) % WORDS}>" for j in range(PROMPT_TOKENS)) for i in range(count)
    ]


class Ours:
    def __init__(self, model: Path, folder: Path) -> None:
        from hone.models.load import load_tokenizer
        from hone.trainer.ppo.trainer import PPOTrainer
        from hone.verl.dialect import load_config

        rows = [
            {"data_source": "bench", "prompt": p, "reward_model": {"ground_truth": ""}}
            for p in prompts(256)
        ]
        data = folder / "rows.jsonl"
        data.write_text("\n".join(map(json.dumps, rows)))
        reward = folder / "reward.py"
        reward.write_text(
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
            "    return solution_str.count('<1') / 32\n"
        )
        config = load_config(
            [
                "algorithm.adv_estimator=grpo",
                f"data.train_files={data}",
                "data.val_files=[]",
                "data.prompt_format=raw",
                f"data.train_batch_size={PROMPTS}",
                f"data.max_prompt_length={PROMPT_TOKENS}",
                f"data.max_response_length={NEW_TOKENS}",
                f"actor_rollout_ref.model.path={model}",
                f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
                "actor_rollout_ref.actor.optim.lr=1e-6",
                f"actor_rollout_ref.rollout.n={GROUP}",
                "actor_rollout_ref.rollout.ignore_eos=true",
                f"custom_reward_function.path={reward}",
                f"trainer.default_local_dir={folder / 'run'}",
                "trainer.total_training_steps=1000",
            ]
        )
        self.trainer = PPOTrainer(config, load_tokenizer(str(model)))
        self.trainer.init_workers()

    def steps(self, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            started = time.perf_counter()
            self.trainer.step()
            seconds.append(time.perf_counter() - started)
        from hone.trainer.ppo.metrics import pop_timing

        self._last = {k: v / count for k, v in pop_timing(self.trainer.seconds).items()}
        return seconds

    def timing(self) -> dict[str, float]:
        return self._last


class Theirs:
    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder

    def steps(self, count: int) -> list[float]:
        """`count` timed steps after one that is not."""
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        from hone.models.load import load_tokenizer

        seconds: list[float] = []

        class Clock(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                self.started = time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                seconds.append(time.perf_counter() - self.started)

        options = GRPOConfig(
            output_dir=str(self._folder / "trl"),
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=NEW_TOKENS,
            max_steps=count + 1,
            beta=0.0,
            learning_rate=1e-6,
            report_to=[],
            use_cpu=True,
            logging_steps=1000,
            save_strategy="no",
            gradient_checkpointing=False,
            bf16=False,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(self._model),
            reward_funcs=lambda completions, **_: [c.count("<1") / 32 for c in completions],
            args=options,
            train_dataset=Dataset.from_dict({"prompt": prompts(256)}),
            processing_class=load_tokenizer(str(self._model)),
            callbacks=[Clock()],
        )
        trainer.train()
        return seconds[1:]


if __name__ == "__main__":
    main()
