"""Model folders, checkpoints and other surroundings of mistakes."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

from .cases import MODEL, Mistake, jsonl, row, train

TARGETS = "actor_rollout_ref.model.target_modules"
RESUME = "trainer.resume_mode=resume_path"


def copy_model(root: Path, name: str, leave_out: str = "nothing") -> Path:
    return Path(
        shutil.copytree(root / "model", root / name, ignore=shutil.ignore_patterns(leave_out))
    )


def without_tokenizer(root: Path) -> None:
    for file in copy_model(root, "bare").glob("*"):
        if "token" in file.name or "template" in file.name:
            file.unlink()


def truncated(root: Path) -> None:
    weights = copy_model(root, "cut") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])


def without_a_shard(root: Path) -> None:
    folder = copy_model(root, "part", "*.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def with_config(root: Path, text: str) -> None:
    (copy_model(root, "odd") / "config.json").write_text(text)


def with_template(root: Path) -> None:
    (copy_model(root, "odd") / "chat_template.jinja").write_text("{% for %}")


def used_folder(root: Path) -> None:
    """What a GRPO run over `rows.jsonl` leaves, without its weights."""
    import yaml  # type: ignore[import-untyped]

    from hone.config import config_to_dict
    from hone.data.dataset import RLHFDataset
    from hone.models.load import load_tokenizer
    from hone.verl.dialect import load_config

    step = root / "run" / "global_step_1"
    (step / "actor").mkdir(parents=True)
    config = load_config([*train()[2:], "algorithm.adv_estimator=grpo"])
    rows = RLHFDataset("rows.jsonl", load_tokenizer("model"), config.data)
    (root / "run" / "config.yaml").write_text(yaml.safe_dump(config_to_dict(config)))
    state = {"loader": {"dataset": rows.state_dict()}, "kl_controller": {}}
    (step / "trainer_state.json").write_text(json.dumps(state))


def other_rows(root: Path) -> None:
    used_folder(root)
    (root / "rows.jsonl").write_text(jsonl(*(row(i + 5) for i in range(8))))


def in_use(root: Path) -> None:
    """The lock of another process that lives: the one that started this."""
    from hone.tracking.lock import Holder, _start_time

    parent = os.getppid()
    holder = replace(
        Holder.of_this_process(),
        pid=parent,
        started=_start_time(parent) or "",
        command="hone train",
    )
    (root / "run").mkdir()
    (root / "run" / ".lock").write_text(json.dumps(asdict(holder)))


def really(*overrides: str) -> list[str]:
    return [word for word in train(*overrides) if word != "--dry-run"]


MISTAKES = [
    Mistake(
        "a model folder that is not there",
        train(f"{MODEL}=models/qwen/small"),
        (f"{MODEL}=models/qwen/small", "does not exist", "a folder or a hub name"),
    ),
    Mistake(
        "a hub name without a network",
        train(f"{MODEL}=qwen/small"),
        ("no model 'qwen/small'", "neither a folder"),
    ),
    Mistake(
        "a folder that holds no model",
        train(f"{MODEL}=empty"),
        ("empty holds no model", "config.json"),
        arrange=lambda root: (root / "empty").mkdir(),
    ),
    Mistake(
        "a model without its tokenizer",
        train(f"{MODEL}=bare"),
        ("bare has no usable tokenizer", "copy tokenizer.json"),
        arrange=without_tokenizer,
    ),
    Mistake(
        "a model without its weights",
        train(f"{MODEL}=bare"),
        ("bare cannot be loaded", "no weights", "copy"),
        arrange=lambda root: void(copy_model(root, "bare", "*.safetensors")),
    ),
    Mistake(
        "weights that are cut off",
        train(f"{MODEL}=cut"),
        ("cut cannot be loaded", "model.safetensors is truncated or damaged", "copy it again"),
        arrange=truncated,
    ),
    Mistake(
        "a weight file that is missing",
        train(f"{MODEL}=part"),
        ("2 of its 2 weight files are missing", "model-00001-of-00002.safetensors"),
        arrange=without_a_shard,
    ),
    Mistake(
        "a model of another kind",
        train(f"{MODEL}=odd"),
        ("odd is a bert model, which is not supported", "docs/models.md"),
        arrange=lambda root: with_config(root, '{"model_type": "bert"}'),
    ),
    Mistake(
        "a config.json that is damaged",
        train(f"{MODEL}=odd"),
        ("odd", "config.json", "JSON"),
        arrange=lambda root: with_config(root, '{"model_type": '),
    ),
    Mistake(
        "a chat template with an error",
        train(f"{MODEL}=odd"),
        ("row 0", "chat template cannot render"),
        arrange=with_template,
    ),
    Mistake(
        "a misspelt LoRA module",
        really("actor_rollout_ref.model.lora_rank=4", f"{TARGETS}=[qproj]"),
        ("LoRA", "qproj"),
        loads_model=True,
    ),
    Mistake(
        "a run folder that is a file",
        train("trainer.default_local_dir=reward.py"),
        ("trainer.default_local_dir=reward.py is a file", "name a folder"),
    ),
    Mistake(
        "a run folder below a file",
        really("trainer.default_local_dir=reward.py/run"),
        ("trainer.default_local_dir=reward.py/run", "reward.py is a file"),
    ),
    Mistake(
        "a folder in use by another run",
        really(),
        ("run is in use by hone train (process", "nothing was changed", "name another folder"),
        arrange=in_use,
    ),
    Mistake(
        "a checkpoint to resume from that is not there",
        train(RESUME, "trainer.resume_from_path=run/global_step_7"),
        ("trainer.resume_from_path=run/global_step_7 does not exist",),
    ),
    Mistake(
        "a folder to resume from that is no checkpoint",
        train(RESUME, "trainer.resume_from_path=run/best"),
        ("trainer.resume_from_path=run/best must name a folder global_step_N",),
    ),
    Mistake(
        "a GRPO run resumed as PPO",
        train("algorithm.adv_estimator=gae", "critic.model.path=model"),
        ("has no critic", "algorithm.adv_estimator=grpo", "keep the estimator"),
        arrange=used_folder,
    ),
    Mistake(
        "a run resumed with other data",
        train(),
        ("the data differ from the checkpoint's data", "restore the files"),
        arrange=other_rows,
    ),
    Mistake(
        "a run resumed with another model",
        train(f"{MODEL}=other", "trainer.total_training_steps=2"),
        (f"was trained from {MODEL}=model, not from other", "trainer.default_local_dir"),
        arrange=lambda root: (void(copy_model(root, "other")), used_folder(root))[1],
        code=0,
    ),
    Mistake(
        "a run resumed with another learning rate",
        train("actor_rollout_ref.actor.optim.lr=0.5", "trainer.total_training_steps=2"),
        ("from global_step_1 on: actor_rollout_ref.actor.optim.lr=0.5, before",),
        arrange=used_folder,
        code=0,
    ),
]


def void(thing: object) -> None:
    """For a lambda that is called for what it does."""
