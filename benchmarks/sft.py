"""Supervised tokens a second beside TRL's SFTTrainer, on gsm8k rows, in one run.

The same rows in the same batches, AdamW, threads and 8M-parameter decoder on both sides; only real
tokens count, and both must count the same. TRL runs as it does by default (a padded batch) and packed; after
each of its updates we take ours, and each ratio is the median of such pairs. Encoding is left out.
"""

from __future__ import annotations

import gzip
import json
import logging
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hone.config.engine import FSDPConfig, OptimConfig
from hone.data.prompts import tokenise
from hone.engine.build import build_engine
from hone.models.policy import PolicyModel
from hone.models.tiny import tiny_lm
from hone.ops.rows import MicroBatchRule
from hone.trainer.sft.trainer import SFTTrainer

THREADS = 2
PAIRS = {"over_trl": 5, "over_trl_packed": 3}
"""Updates of both sides that count; one pair before them warms up."""
BATCH_ROWS, MAX_LENGTH, ROWS = 32, 512, 640
MICRO_BATCH_TOKENS = 4096
"""`data.max_token_len_per_gpu`: what a CPU's caches like."""
VOCABULARY = 704
SHAPE = {"hidden": 256, "layers": 8, "heads": 8, "kv_heads": 4, "mlp": 1024}
TARGETS = {"over_trl": 1.5}
GSM8K = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k" / "train.jsonl.gz"
THINGS = ("apples", "books", "coins", "marbles", "pencils", "stamps", "tickets", "loaves")
NAMES = ("Ana", "Ben", "Carla", "Deniz", "Emil", "Fatou", "Goran", "Hana")


def rows() -> list[dict[str, str]]:
    """Questions and worked answers: gsm8k's where it lies beside the repository, else made up."""
    if GSM8K.is_file():
        with gzip.open(GSM8K, "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line, _ in zip(lines, range(ROWS), strict=False)]
    return [_made_up(random.Random(i)) for i in range(ROWS)]


def _made_up(chooser: random.Random) -> dict[str, str]:
    """One to six steps, so that lengths vary as much as gsm8k's."""
    name, thing = chooser.choice(NAMES), chooser.choice(THINGS)
    total = chooser.randint(2, 60)
    question = [f"{name} starts the week with {total} {thing}."]
    answer = []
    for _ in range(chooser.randint(1, 6)):
        other, change = chooser.choice(NAMES), chooser.randint(2, 40)
        question.append(f"Then {other} comes by and gives {name} {change} more {thing}.")
        answer.append(
            f"With the {thing} of {other} there are {total} + {change} = "
            f"<<{total}+{change}={total + change}>>{total + change} {thing} now."
        )
        total += change
    question.append(f"How many {thing} does {name} have in the end?")
    answer.append(f"#### {total}")
    return {"question": " ".join(question), "answer": "\n".join(answer)}


def build_tokenizer(texts: list[str]) -> Any:
    """A byte-level BPE of the benchmark's vocabulary, trained on the rows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def build_models() -> tuple[Any, Any]:
    """The same decoder twice: ours, and with the attention transformers would choose."""
    ours, theirs = (tiny_lm(VOCABULARY, max_positions=MAX_LENGTH, **SHAPE) for _ in range(2))  # type: ignore[arg-type]
    theirs.set_attn_implementation("sdpa")
    return ours, theirs


@dataclass(frozen=True)
class Update:
    """One update of one side."""

    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Ours:
    """`hone sft`'s loop."""

    def __init__(self, lm: Any, encoded: list[dict[str, list[int]]], pad: int) -> None:
        rule = MicroBatchRule(rows=None, tokens=MICRO_BATCH_TOKENS)
        engine = build_engine(
            PolicyModel(lm),
            optim=OptimConfig(lr=1e-3, total_training_steps=10_000),
            grad_clip=1.0,
            fsdp=FSDPConfig(),
            train_micro_batch_rule=rule,
            infer_micro_batch_rule=rule,
            response_width=MAX_LENGTH,
        )
        self._trainer = SFTTrainer(
            engine, encoded, pad_token_id=pad, rows_per_batch=BATCH_ROWS, seed=0, shuffle=False
        )

    def update(self) -> Update:
        started = time.perf_counter()
        tokens = int(self._trainer.step()["train/global_tokens"])
        return Update(tokens, time.perf_counter() - started)


class Theirs:
    """TRL's trainer over the same rows in the same order, the real tokens of every batch counted."""

    def __init__(
        self, lm: Any, tokenizer: Any, data: list[dict[str, str]], *, packing: bool, updates: int
    ) -> None:
        from datasets import Dataset, disable_progress_bars
        from trl import SFTConfig, SFTTrainer

        disable_progress_bars()
        self._tokens = 0
        self._folder = tempfile.TemporaryDirectory()
        arguments = SFTConfig(
            output_dir=self._folder.name,
            per_device_train_batch_size=BATCH_ROWS if not packing else packed_rows(data, tokenizer),
            max_length=MAX_LENGTH,
            packing=packing,
            max_steps=updates,
            learning_rate=1e-3,
            weight_decay=OptimConfig.weight_decay,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataset_num_proc=None,
        )
        self._trainer = SFTTrainer(
            model=lm,
            args=arguments,
            train_dataset=Dataset.from_list(
                [{"prompt": r["question"] + "\n", "completion": r["answer"]} for r in data]
            ),
            processing_class=tokenizer,
        )
        self._count_tokens()

    def _count_tokens(self) -> None:
        step: Any = self._trainer.training_step

        def counted(model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            attention = inputs.get("attention_mask")
            real = attention.sum() if attention is not None else inputs["input_ids"].numel()
            self._tokens = int(real)
            return step(model, inputs, *rest, **more)

        setattr(self._trainer, "training_step", counted)  # noqa: B010

    def train(self, after: Callable[[Update], None]) -> None:
        """All updates; `after` hears of each, and its own time does not count."""
        from transformers import PrinterCallback, TrainerCallback

        begun = 0.0

        class Clock(TrainerCallback):
            def on_train_begin(callback, *_: Any, **__: Any) -> None:
                nonlocal begun
                begun = time.perf_counter()

            def on_step_end(callback, *_: Any, **__: Any) -> None:
                nonlocal begun
                after(Update(self._tokens, time.perf_counter() - begun))
                begun = time.perf_counter()

        self._trainer.remove_callback(PrinterCallback)
        self._trainer.add_callback(Clock())
        self._trainer.train()


def padding_share(encoded: list[dict[str, list[int]]]) -> float:
    """What padded batches hold beyond real tokens, as a share of those."""
    lengths = [len(row["input_ids"]) for row in encoded[: (PAIRS["over_trl"] + 1) * BATCH_ROWS]]
    batches = [lengths[i : i + BATCH_ROWS] for i in range(0, len(lengths), BATCH_ROWS)]
    return sum(max(batch) * len(batch) for batch in batches) / sum(lengths) - 1


def packed_rows(data: list[dict[str, str]], tokenizer: Any) -> int:
    """Packed rows of full length with about the tokens of one of our batches."""
    lengths = [len(_encode(row, tokenizer)["input_ids"]) for row in data]
    return max(1, round(statistics.mean(lengths) * BATCH_ROWS / MAX_LENGTH))


def _encode(row: dict[str, str], tokenizer: Any) -> dict[str, list[int]]:
    """The question as prompt; the answer and the end token are the targets."""
    prompt_ids = tokenise(row["question"] + "\n", tokenizer)
    answer_ids = [*tokenise(row["answer"], tokenizer), int(tokenizer.eos_token_id)]
    mask = [0] * len(prompt_ids) + [1] * len(answer_ids)
    return {"input_ids": prompt_ids + answer_ids, "loss_mask": mask}


def race(ours: Ours, theirs: Theirs, *, same_rows: bool) -> list[tuple[Update, Update]]:
    """Pairs of updates, (ours, theirs), without the first."""
    pairs: list[tuple[Update, Update]] = []

    def answer(their: Update) -> None:
        our = ours.update()
        if same_rows and our.tokens != their.tokens:
            raise RuntimeError(f"we took {our.tokens} tokens, TRL {their.tokens}: not one task")
        pairs.append((our, their))

    theirs.train(answer)
    return pairs[1:]


def main() -> dict[str, Any]:
    """Ratios over TRL, the target, and the tokens a second behind them."""
    torch.set_num_threads(THREADS)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    data = rows()
    tokenizer = build_tokenizer([r["question"] + r["answer"] for r in data])
    data = [row for row in data if len(_encode(row, tokenizer)["input_ids"]) <= MAX_LENGTH]
    encoded = [_encode(row, tokenizer) for row in data]
    result: dict[str, Any] = {
        "rows": "gsm8k" if GSM8K.is_file() else "made up",
        "rows_a_batch": BATCH_ROWS,
        "padding_trl_adds": round(padding_share(encoded), 2),
    }
    try:
        import trl
    except ImportError:
        result["over_trl"] = "trl is not installed: pip install -c constraints.txt trl"
        return result
    result["trl"] = trl.__version__
    for name, packing in (("over_trl", False), ("over_trl_packed", True)):
        mine, others = build_models()
        ours = Ours(mine, encoded, tokenizer.pad_token_id)
        theirs = Theirs(others, tokenizer, data, packing=packing, updates=PAIRS[name] + 1)
        pairs = race(ours, theirs, same_rows=not packing)
        ratios = [our.tokens_per_s / their.tokens_per_s for our, their in pairs]
        result[name] = round(statistics.median(ratios), 2)
        if name in TARGETS:
            result[f"{name}_target"] = TARGETS[name]
        result[f"{name}_of_pairs"] = [round(ratio, 2) for ratio in ratios]
        result[f"{name}_tokens_per_s"] = [
            round(statistics.median(pair[side].tokens_per_s for pair in pairs)) for side in (0, 1)
        ]
    logging.disable(logging.NOTSET)
    return result


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name}: {value}")
