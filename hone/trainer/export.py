"""`hone export CHECKPOINT OUT` converts a training checkpoint to a folder that `from_pretrained` opens.

A Hugging Face folder inside the checkpoint is copied. Without one, the weights are gathered from the shards
of the checkpoint, which any number of ranks may have written. LoRA matrices are merged, or exported alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.distributed.checkpoint.metadata import STORAGE_TYPES
from yaml import YAMLError

from hone.config import ConfigError
from hone.config.apply import compose_settings
from hone.config.engine import FSDPConfig
from hone.config.keys import leaves
from hone.config.model import ModelConfig
from hone.config.sources import Setting
from hone.config.trees import Tree
from hone.data.files import copy_to_local, is_non_local, remote_files, upload
from hone.engine.build import build_engine
from hone.engine.saved_state import METADATA_FILE, read_metadata
from hone.errors import UserError
from hone.models.from_config import build_lora, build_tokenizer
from hone.models.load import load_causal_lm
from hone.models.lora import ADAPTER_FOLDER
from hone.models.paths import EXPORT_FOLDER
from hone.models.policy import PolicyModel
from hone.models.writing import staged_folder
from hone.ops.rows import MicroBatchRule
from hone.tracking import RunFolder
from hone.tracking.console import screen
from hone.tracking.manifest import enclosing_checkpoint, find_damage
from hone.trainer.model_card import write_card
from hone.trainer.ppo.checkpoint import newest_valid_checkpoint

_VALUE_HEAD_PREFIX = "model.value_head."
_TOKENS_PER_MICRO_BATCH = 8192
_INVALID_CONFIG_ERRORS = (AttributeError, KeyError, TypeError, RecursionError)
"""Errors that a config.yaml causes if it is valid YAML but not a config."""


class ExportError(UserError, ValueError):
    """Raised when a checkpoint cannot be exported with the given options."""


@contextmanager
def local_target(out: str) -> Iterator[str]:
    """Yields a local folder to export to; if `out` is remote, uploads the folder, `config.json` last."""
    if not is_non_local(out):
        yield out
        return
    if remote_files(out):
        raise ExportError(f"{out} is not empty; name a new folder")
    with TemporaryDirectory() as folder:
        target = Path(folder, out.rstrip("/").rpartition("/")[2])
        try:
            yield str(target)
        finally:
            if target.is_dir():  # uploaded even if the push to the hub has failed
                upload(target, out, last="config.json")


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    adapter_only: bool = False,
    external_lib: str | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Writes the model of a checkpoint to `out`, a new or empty folder.

    Only custom code in the arguments is imported; custom code in the run's config.yaml is not trusted.
    """
    source = find_model_folder(Path(copy_to_local(checkpoint)).expanduser())
    target = Path(out).expanduser()
    if target.exists() and any(target.iterdir()):
        raise ExportError(f"{target} is not empty; name a new folder")
    subfolder = ADAPTER_FOLDER if adapter_only else EXPORT_FOLDER
    with staged_folder(target) as temporary:
        if (source / subfolder).is_dir():
            shutil.copytree(source / subfolder, temporary, dirs_exist_ok=True)
        elif (source / METADATA_FILE).is_file():
            gathered_folder = temporary / "gathered"
            _gather_and_export(source, gathered_folder, external_lib, trust_remote_code)
            if not (gathered_folder / subfolder).is_dir():
                raise ExportError(f"{source} was trained without LoRA; it has no adapter to export")
            shutil.copytree(gathered_folder / subfolder, temporary, dirs_exist_ok=True)
            shutil.rmtree(gathered_folder)
        else:
            raise ExportError(_nothing_to_export_message(source, subfolder))
        write_card(temporary, source, target.name)
    return target


def _nothing_to_export_message(source: Path, subfolder: str) -> str:
    if (source / "config.json").is_file():
        return f"{source} is a model folder, not a checkpoint of a run: use it as it is, or copy it"
    if enclosing_checkpoint(source) is not None:
        return (
            f"{source} holds neither {subfolder}/ nor sharded weights; it was saved without them "
            "(checkpoint.save_contents)"
        )
    names = sorted(path.name for path in source.iterdir())
    listing = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return (
        f"{source} is not a checkpoint (it holds {listing or 'nothing'}); name a run folder with "
        "global_step_N inside, a global_step_N, or the actor folder in it"
    )


def find_model_folder(folder: Path) -> Path:
    """Returns the folder of the policy's weights, given a run, a `global_step_N` or a role's folder."""
    folder = folder.resolve()  # the parents of a relative path do not include the run
    if not folder.is_dir():
        raise ExportError(
            f"there is no checkpoint folder {folder}; name a run folder, or a global_step_N in it"
        )
    run = RunFolder(folder)
    is_run = bool(run.checkpoints())
    if is_run:
        newest_checkpoint = newest_valid_checkpoint(run)
        if newest_checkpoint is None:
            raise ExportError(f"every checkpoint in {folder} is damaged; see the log above")
        _, folder = newest_checkpoint
    if (folder / "actor").is_dir():
        folder = folder / "actor"
    is_critic = any(name.startswith(_VALUE_HEAD_PREFIX) for name in _tensor_metadata(folder))
    if folder.name == "critic" or is_critic:
        raise ExportError(
            f"{folder} is a critic: a value head instead of a language-model head, which no "
            "from_pretrained class reads; export the actor beside it"
        )
    checkpoint = None if is_run else enclosing_checkpoint(folder)
    if checkpoint is not None and (problem := find_damage(checkpoint, folder)) is not None:
        raise ExportError(f"{checkpoint} is damaged: {problem}")
    return folder


def _tensor_metadata(folder: Path) -> dict[str, STORAGE_TYPES]:
    """Returns the metadata of the tensors in the shards, by dotted name."""
    if not (folder / METADATA_FILE).is_file():
        return {}
    return read_metadata(folder).state_dict_metadata


def _gather_and_export(
    source: Path, out: Path, external_lib: str | None, trust_remote_code: bool
) -> None:
    """Loads the shards into the run's model, in this process, and exports the model."""
    model = _replace_custom_code(_model_config(source), external_lib, trust_remote_code)
    tokenizer = build_tokenizer(model)
    dtype = _saved_dtype(source)
    lm = load_causal_lm(model.path, dtype=dtype, override_config=model.override_config)
    policy = PolicyModel(lm)
    if model.uses_lora:
        policy.lm = build_lora(lm, model, seed=0)
    rule = MicroBatchRule(None, _TOKENS_PER_MICRO_BATCH)
    engine = build_engine(
        policy,
        optim=None,
        grad_clip=0.0,
        fsdp=FSDPConfig(),
        train_micro_batch_rule=rule,
        infer_micro_batch_rule=rule,
        response_width=1,
    )
    engine.load(source, ["model"])
    engine.export(out, tokenizer)


def _replace_custom_code(
    model: ModelConfig, external_lib: str | None, trust_remote_code: bool
) -> ModelConfig:
    """Returns the run's model config, with its custom code replaced by that of the command line.

    Prints the flags that would allow the custom code of the run.
    """
    missing_flags = []
    if model.external_lib and not external_lib:
        lib = model.external_lib
        missing_flags.append(f"--external-lib {lib if isinstance(lib, str) else ','.join(lib)}")
    if model.trust_remote_code and not trust_remote_code:
        missing_flags.append("--trust-remote-code")
    if missing_flags:
        flags = " ".join(missing_flags)
        screen().line(
            f"the run used custom code, which the export does not load; if you trust it: {flags}"
        )
    return replace(model, external_lib=external_lib, trust_remote_code=trust_remote_code)


def _saved_dtype(source: Path) -> torch.dtype:
    """Returns the dtype of the first model tensor in the shards."""
    for name, metadata in _tensor_metadata(source).items():
        if name.startswith("model.") and hasattr(metadata, "properties"):
            return metadata.properties.dtype
    raise ExportError(f"{source} holds no model weights (checkpoint.save_contents without 'model')")


def _model_config(source: Path) -> ModelConfig:
    """Returns the model config in the config.yaml of the run that `source` is in."""
    for folder in source.parents[:3]:
        try:
            config = RunFolder(folder).read_config()
            block = config.get("model") or config.get("actor_rollout_ref", {}).get("model")
            if block:
                settings = [Setting(key, block[key], "config.yaml") for key in leaves(ModelConfig)]
                return compose_settings(Tree("model", ModelConfig), settings).config
        except (ConfigError, ValueError, YAMLError, *_INVALID_CONFIG_ERRORS) as error:
            reason = " ".join(str(error).split())
            raise ExportError(
                f"{folder}/config.yaml is not the config of a run: {reason}"
            ) from error
    raise ExportError(
        f"{source} has only sharded weights, and no parent folder has the config.yaml of the run, which "
        "names the model; keep the checkpoint in its run folder"
    )


def check_push(repo: str) -> None:
    """Raises an error if the repository name is invalid, the hub is offline, or there is no token."""
    from huggingface_hub import get_token, is_offline_mode
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ExportError(f"--push {repo}: name it NAME or OWNER/NAME ({error})") from None
    if is_offline_mode():
        raise ExportError(f"--push {repo}: HF_HUB_OFFLINE is set; unset it to reach the hub")
    if get_token() is None:
        raise ExportError(f"--push {repo} needs a token: set HF_TOKEN, or run `hf auth login`")


def push(folder: Path, repo: str, *, private: bool = False, out: str | None = None) -> str:
    """Uploads a folder to a model repository, which is created if needed, and returns the URL.

    If `folder` is a temporary copy of a remote folder, `out` is the remote folder, for error messages.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    check_push(repo)
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="hone")
    retry_hint = f"the model is in {folder}, and `hf upload {repo} {folder}` tries again"
    if out is not None and is_non_local(out):
        retry_hint = f"the model is in {out}"
    try:
        repository = api.create_repo(repo, private=private or None, exist_ok=True)
        commit_message = "Model exported by hone"
        api.upload_folder(
            repo_id=repository.repo_id, folder_path=folder, commit_message=commit_message
        )
    except HfHubHTTPError as error:
        status = f"{error.response.status_code} {error.response.reason_phrase}"
        raise ExportError(
            f"--push {repo}: {api.endpoint} answered {status}; {retry_hint}"
        ) from None
    except (HTTPError, OSError) as error:
        raise ExportError(
            f"--push {repo}: {api.endpoint} cannot be reached ({error}); {retry_hint}"
        ) from None
    return str(repository)
