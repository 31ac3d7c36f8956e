"""`python -m hone.trainer.main_prm key=value …` trains a process reward model on labelled steps.

PURE's two stages are two runs of the SFT trainer. The first trains the head over the frozen decoder, in the
folder `head` of the run; the second trains all parameters. The result is a Hugging Face token classifier.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.config import ConfigError, replace
from hone.config.sft import PRMConfig, SupervisedConfig
from hone.data.files import is_non_local
from hone.trainer.command_line import compose_arguments, require_keys, run_module, run_ranks
from hone.trainer.main_sft import run_stages

if TYPE_CHECKING:
    from hone.trainer.sft.tasks import Task

MODULE = "hone.trainer.main_prm"
HEAD_FOLDER = "head"


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    composed = compose_arguments(arguments, schema="prm_trainer", program="hone train-prm")
    require_keys(composed, {"data.train_files": "the files of labelled steps"})
    run_ranks(composed, arguments, MODULE, lambda: run(composed.config, composed.origins))


def run(config: PRMConfig, origins: Mapping[str, str] | None = None) -> None:
    """Runs this rank's part of both training stages."""
    run_stages(stages(config), origins)


def stages(config: PRMConfig) -> list[tuple[SupervisedConfig, Task | None]]:
    """Returns the config and the task of each stage that must run.

    A stage with 0 epochs is left out. The first stage is left out if the run resumes from the second.
    """
    from hone.trainer.sft.tasks import StepTask

    head_stage, trainer = config.head_stage, config.trainer
    if not head_stage.total_epochs and not trainer.total_epochs:
        raise ConfigError(
            "head_stage.total_epochs=0 and trainer.total_epochs=0 leave nothing to train; set one"
        )
    if config.data.step_labels is not None:
        raise ConfigError(
            "data.step_labels is for causal models in hone eval-prm; hone train-prm trains a token classifier"
        )
    if "hf_model" not in config.checkpoint.save_contents:
        raise ConfigError(
            "checkpoint.save_contents needs hf_model: the second stage and RL start from the export"
        )
    head_folder = Path(trainer.default_local_dir) / HEAD_FOLDER
    overrides: dict[str, Any] = {
        "optim.lr": head_stage.lr,
        "trainer.total_epochs": head_stage.total_epochs,
        "trainer.total_training_steps": head_stage.total_training_steps,
        "model.lora_rank": 0,
        "model.lora_adapter_path": None,
    }
    remote_head_folder = None
    if trainer.default_hdfs_dir:
        remote_head_folder = f"{trainer.default_hdfs_dir.rstrip('/')}/{HEAD_FOLDER}"
    if trainer.total_epochs:
        overrides["trainer.default_local_dir"] = str(head_folder)
        overrides["trainer.default_hdfs_dir"] = remote_head_folder
    head_config = config
    for key, value in overrides.items():
        head_config = replace(head_config, key, value)
    full_config = config
    if head_stage.total_epochs:
        full_config = replace(config, "model.path", str(head_folder))
    if trainer.resume_mode == "resume_path" and trainer.total_epochs and head_stage.total_epochs:
        if _is_inside(trainer.resume_from_path or "", head_folder, remote_head_folder):
            full_config = replace(full_config, "trainer.resume_mode", "auto")
        else:  # the checkpoint is of the second stage, so the first stage has finished
            return [(full_config, StepTask())]
    head_task = StepTask("head")
    configs_and_tasks: list[tuple[SupervisedConfig, Task | None]] = []
    if head_stage.total_epochs:
        configs_and_tasks.append((head_config, head_task))
    if trainer.total_epochs:
        configs_and_tasks.append((full_config, head_task.next_stage()))
    return configs_and_tasks


def _is_inside(path: str, local_folder: Path, remote_folder: str | None) -> bool:
    """Returns whether a checkpoint is in the local or in the remote folder."""
    if is_non_local(path):
        return remote_folder is not None and path.startswith(f"{remote_folder}/")
    return local_folder.expanduser().resolve() in Path(path).expanduser().resolve().parents


if __name__ == "__main__":
    sys.exit(run_module(main, "prm_trainer", MODULE))
