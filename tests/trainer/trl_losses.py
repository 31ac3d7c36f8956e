"""Computes TRL's loss and gradient norm on a batch of token ids; runs in TRL's interpreter.

Reads a job as JSON: the folders of the policies (by loss) and of the reference, the rows, and the settings by
loss. Prints {loss: [loss, gradient norm]}.
"""

from __future__ import annotations

import json
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

JOB = json.load(sys.stdin)
DIRECTORY = tempfile.mkdtemp()


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def arguments(rows: list[Any], **settings: Any) -> dict[str, Any]:
    return {
        "output_dir": DIRECTORY, "report_to": "none", "use_cpu": True, "bf16": False,
        "per_device_train_batch_size": len(rows), "max_length": None, "gradient_checkpointing": False,
        **settings,
    }  # fmt: skip


def result(loss: torch.Tensor, model: Any) -> list[float]:
    loss.backward()
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return [float(loss.detach()), float(torch.stack(squares).sum().sqrt())]


def of_pairs(loss_type: str, settings: dict[str, Any]) -> list[float]:
    rows = JOB["pairs"]
    config = DPOConfig(loss_type=[loss_type], **arguments(rows, **settings))
    # The trainer needs a data set of text, but the loss is computed on the rows of the job.
    text = Dataset.from_list([{"prompt": "1", "chosen": "2", "rejected": "3"}] * len(rows))
    tokenizer = AutoTokenizer.from_pretrained(JOB["reference"])
    trainer = DPOTrainer(
        load(JOB["policies"][loss_type]), ref_model=load(JOB["reference"]), args=config,
        train_dataset=text, processing_class=tokenizer,
    )  # fmt: skip
    inputs = DataCollatorForPreference(pad_token_id=tokenizer.pad_token_id)(rows)
    return result(trainer.compute_loss(trainer.model, inputs), trainer.model)


def of_labels(loss_type: str, settings: dict[str, Any]) -> list[float]:
    rows = JOB["labels"]
    strategy = {"train_sampling_strategy": "sequential"}
    text = Dataset.from_list([{"prompt": "1", "completion": "2", "label": True}] * len(rows))
    config = KTOConfig(loss_type=loss_type, **arguments(rows, **settings, **strategy))
    tokenizer = AutoTokenizer.from_pretrained(JOB["reference"])
    trainer = KTOTrainer(
        load(JOB["policies"][loss_type]), ref_model=load(JOB["reference"]), args=config,
        train_dataset=text, processing_class=tokenizer,
    )  # fmt: skip
    inputs = DataCollatorForUnpairedPreference(pad_token_id=tokenizer.pad_token_id)(rows)
    return result(trainer.compute_loss(trainer.model, inputs), trainer.model)


def reference_free(loss_type: str, settings: dict[str, Any]) -> list[float]:
    """TRL's functions on the log-probabilities of the batch; the NLL of ORPO is that of the responses."""
    model = load(JOB["policies"][loss_type])

    def mean_and_sum(prompt: list[int], response: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        values = logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]
        return values.mean(), values.sum()

    columns = {}
    for key in ("chosen", "rejected"):
        pairs = [mean_and_sum(row["prompt_ids"], row[f"{key}_ids"]) for row in JOB["pairs"]]
        columns[key] = torch.stack([pair[loss_type == "cpo"] for pair in pairs])
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    owner: Any = SimpleNamespace(accelerator=accelerator, **settings)
    if loss_type == "orpo":
        gains = ORPOTrainer.odds_ratio_loss(owner, columns["chosen"], columns["rejected"])[0]
        return result((-columns["chosen"] - gains).mean(), model)
    owner.alpha, owner.label_smoothing = 0.0, 0.0
    owner.loss_type = "sigmoid" if loss_type == "cpo" else loss_type
    losses = CPOTrainer.cpo_loss(owner, columns["chosen"], columns["rejected"])[0]
    return result(losses.mean(), model)


def main() -> None:
    functions = {"pairs": of_pairs, "labels": of_labels, "reference_free": reference_free}
    print(
        json.dumps(
            {
                loss_type: functions[kind](loss_type, settings)
                for kind, losses in JOB["losses"].items()
                for loss_type, settings in losses.items()
            }
        )
    )


if __name__ == "__main__":
    main()
