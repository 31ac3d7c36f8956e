"""`hone dpo` and TRL on the same batch and weights: loss and gradient norm; needs `make setup-trl`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hone.config import load_config
from hone.config.preference import PreferenceLossConfig
from hone.models.load import load_tokenizer, resolve_model_path
from hone.trainer import main_dpo
from hone.trainer.sft.preferences import preference_task
from hone.trainer.sft.tasks import EncodedRows

from .around_fixtures import tiny_model, write_jsonl
from .test_main_dpo import ROWS as PAIRS
from .test_main_dpo_labelled import ROWS as LABELS
from .test_sft import numbers

PYTHON = Path(__file__).parents[2] / ".venv-trl" / "bin" / "python"
BETA = {"beta": 0.3}
LOSSES: dict[str, dict[str, dict[str, float]]] = {
    "pairs": {
        **dict.fromkeys(("sigmoid", "sigmoid_norm", "ipo", "hinge"), BETA),
        "robust": {**BETA, "label_smoothing": 0.1},
        "apo_zero": BETA,
        "apo_down": BETA,
    },
    "labels": {
        "kto": {**BETA, "desirable_weight": 1.2, "undesirable_weight": 0.7},
        "apo_zero_unpaired": BETA,
    },
    "reference_free": {
        "simpo": {"beta": 2.0, "simpo_gamma": 0.6},
        "orpo": BETA,
        "cpo": BETA,
    },
}


def second_step(
    folder: Path, model: Path, loss_type: str, settings: dict[str, float]
) -> list[float]:
    """The loss and the gradient norm of all rows after the first update."""
    is_paired = preference_task(PreferenceLossConfig(loss_type=loss_type)).sequences_per_row == 2
    rows = PAIRS if is_paired else LABELS
    alpha = {"cpo_alpha": 0.0} if loss_type == "cpo" else {}
    overrides = [f"algorithm.{key}={value}" for key, value in (settings | alpha).items()]
    config: Any = load_config(
        [
            f"data.train_files={write_jsonl(folder.parent / f'{is_paired}.jsonl', rows)}",
            f"model.path={model}",
            f"data.train_batch_size={len(rows)}",
            "data.shuffle=false",
            f"algorithm.loss_type={loss_type}",
            "optim.lr=1e-2",
            "optim.lr_warmup_steps_ratio=0",
            "optim.lr_scheduler_type=constant",
            "trainer.total_training_steps=2",
            "trainer.save_freq=1",
            "trainer.logger=[jsonl]",
            f"trainer.default_local_dir={folder}",
            *overrides,
        ],
        config_name="dpo_trainer",
    )
    main_dpo.run(config)
    last = numbers(folder)[-1]
    return [last["train/loss"], last["train/grad_norm"]]


def encoded(rows: list[dict[str, Any]], model: Path, folder: Path, loss_type: str) -> EncodedRows:
    task = preference_task(PreferenceLossConfig(loss_type=loss_type))
    config: Any = load_config([], config_name="dpo_trainer")
    file = write_jsonl(folder / f"{loss_type}.jsonl", rows)
    dataset: Any = task.dataset((str(file),), config.data, load_tokenizer(str(model)), -1)
    return task.with_partners(dataset)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="TRL's interpreter is missing: make setup-trl")
@pytest.mark.parametrize("kind", list(LOSSES))
def test_loss_and_gradient_norm_are_those_of_trl(kind: str, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    pairs = encoded(PAIRS, model, tmp_path, "sigmoid")
    labels = encoded(LABELS, model, tmp_path, "kto")
    job_rows: dict[str, list[Any]] = {"pairs": [], "labels": []}
    for i in range(len(pairs)):
        row, n = pairs[i], pairs[i]["prompt_tokens"][0]
        job_rows["pairs"].append(
            {
                "prompt_ids": row["input_ids"][:n],
                "chosen_ids": row["input_ids"][n:],
                "rejected_ids": row["rejected_ids"][n:],
            }
        )
        row, n = labels[i], labels[i]["prompt_tokens"][0]
        job_rows["labels"].append(
            {
                "prompt_ids": row["input_ids"][:n],
                "completion_ids": row["input_ids"][n:],
                "KL_completion_ids": row["mismatched_ids"][row["mismatched_prompt"][0] :],
                "label": bool(row["label"][0]),
            }
        )
    losses = LOSSES[kind]
    ours = {name: second_step(tmp_path / name, model, name, losses[name]) for name in losses}
    policies = {name: resolve_model_path(str(tmp_path / name / "global_step_1")) for name in losses}
    job = {"policies": policies, "reference": str(model), "losses": {kind: losses}, **job_rows}
    done = subprocess.run(
        [str(PYTHON), str(Path(__file__).with_name("trl_losses.py"))],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    for name, (loss, grad_norm) in ours.items():
        assert loss == pytest.approx(theirs[name][0], rel=1e-6), name
        assert grad_norm == pytest.approx(theirs[name][1], rel=1e-5), name
