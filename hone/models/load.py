"""From a folder to a module: weights, tokenizer, and the export inside a checkpoint.

A repository's own code runs for tokenizers only, and only on request. A path to a training checkpoint
resolves to the Hugging Face export inside it, so one run can start from another's folder.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hone.models import attention
from hone.models.families import UnsupportedModel, refuse_config, refuse_family
from hone.tracking.manifest import MANIFEST, checkpoint_of, damage
from hone.types import Settings

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

log = logging.getLogger(__name__)

EXPORT_FOLDER = "huggingface"
_STEP = re.compile(r"(?:global_step_|checkpoint-)(\d+)$")


class ModelNotFound(ValueError):
    """A model path does not exist, or is a damaged checkpoint; `path` is the requested one."""

    def __init__(self, sentence: str, path: str = "") -> None:
        super().__init__(sentence)
        self.path = path


@contextmanager
def refusals_in_words(path: str, folder: str) -> Iterator[None]:
    """Turn refusals of transformers (ValueError, OSError without a number) into our errors."""
    from huggingface_hub.errors import HFValidationError
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        broken = _broken_file(Path(folder))
        raise UnsupportedModel(
            f"{path} cannot be loaded: {broken} is truncated or damaged ({error}); write or copy it again"
        ) from error
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        first, _, _ = str(error).strip().partition("\n")
        if isinstance(error, (OSError, HFValidationError)) and not Path(folder).exists():
            raise ModelNotFound(
                f"there is no model {path!r}: it is neither a folder (looked in {Path.cwd()}) nor "
                f"could it be had from the hub by that name ({first})",
                path,
            ) from error
        reason = first if isinstance(error, OSError) else " ".join(str(error).split())
        raise UnsupportedModel(f"{path} cannot be loaded: {reason}") from error


def _broken_file(folder: Path) -> str:
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                continue
        except SafetensorError:
            return file.name
    return "a weight file"


def resolve_model_path(path: str) -> str:
    """The folder with `config.json`: the path itself, or the export inside a checkpoint or run folder.

    A name that is no local folder is returned unchanged: it may be a hub name. In a run folder a damaged
    checkpoint is skipped for the one before it; a checkpoint that the path names must be sound.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        if str(path).startswith(("/", "~", ".")) or str(path).count("/") > 1:
            raise ModelNotFound(
                f"model path {path} does not exist; give a folder or a hub name", str(path)
            )
        return path
    if (folder / "config.json").is_file():
        checkpoint = checkpoint_of(folder)
        sealed = checkpoint is not None and (checkpoint / MANIFEST).is_file()
        if sealed and (problem := _damage_around(folder)) is not None:
            raise ModelNotFound(f"{folder} lies in a damaged checkpoint: {problem}", str(path))
        return str(folder)
    problems: list[str] = []
    for candidate in _exports(folder):
        problem = _damage_around(candidate)
        if problem is None:
            for skipped in problems:
                _warn_once(f"{skipped}; taking {candidate}")
            return str(candidate)
        problems.append(f"{candidate.parent} is not a sound checkpoint: {problem}")
    if problems:
        raise ModelNotFound("; ".join(problems), str(path))
    raise ModelNotFound(
        f"{folder} holds no model: expected config.json there, or a checkpoint with "
        f"actor/{EXPORT_FOLDER}/config.json inside",
        str(path),
    )


def _exports(folder: Path) -> Iterator[Path]:
    """The models in a checkpoint or a run folder, those of later steps first."""
    candidates = [folder / EXPORT_FOLDER, folder / "actor" / EXPORT_FOLDER]
    names = ((path, _STEP.search(path.name)) for path in folder.glob("**/*") if path.is_dir())
    steps = {path: int(name[1]) for path, name in names if name}
    for step in sorted(steps, key=lambda path: steps[path], reverse=True):
        candidates += [step / "actor" / EXPORT_FOLDER, step / EXPORT_FOLDER]
    return (c for c in candidates if (c / "config.json").is_file())


def _damage_around(export: Path) -> str | None:
    """The damage of the checkpoint that an export is part of; None where it is sound or there is none."""
    checkpoint = checkpoint_of(export)
    if checkpoint is None:
        return None
    problem = damage(checkpoint, export)
    if problem is not None and not (checkpoint / MANIFEST).is_file():
        problem += f" (to use the model as it is, name {export})"
    return problem


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """A fast tokenizer that can pad; the padding token falls back to the end-of-text token."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = resolve_model_path(path)
    if _is_plain_tokenizer(Path(folder)):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    else:
        with refusals_in_words(path, folder):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    # transformers makes an empty tokenizer of a folder that holds none, and says nothing.
    if not tokenizer.encode("a b 1", add_special_tokens=False):
        raise UnsupportedModel(
            f"{path} has no usable tokenizer: its {type(tokenizer).__name__} knows {len(tokenizer)} "
            "tokens and turns text into none; copy tokenizer.json and tokenizer_config.json of the "
            "model into the folder, or name another folder with model.tokenizer_path"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _is_plain_tokenizer(folder: Path) -> bool:
    """Whether tokenizer.json is complete. The automatic choice would silently rebuild such a tokenizer
    with the rules of the model's family."""
    try:
        kind = json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class")
    except (OSError, ValueError):
        return False
    plain = kind in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return plain and (folder / "tokenizer.json").is_file()


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype,
    override_config: Settings | None = None,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """A Hugging Face decoder whose attention is ours, on the CPU; `device` is where it will go.

    The code is always transformers' own: a repository's Python has not been shown equal to it.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # our own bars show long waits
    attention.register()
    folder = resolve_model_path(path)
    config = load_config(path, device=device)
    for key, value in (override_config or {}).items():
        if not hasattr(config, key):
            raise UnsupportedModel(
                f"override_config has {key!r}, which {type(config).__name__} of {path} does not know"
            )
        setattr(config, key, value)
    refuse_config(config, path, device=device)
    _switch_off_dropout(config)
    with refusals_in_words(path, folder):
        return AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=attention.NAME
        )


def load_config(path: str, *, device: torch.device | None = None) -> PreTrainedConfig:
    """The config of a model of a supported family; others are refused before their class is looked up."""
    from transformers import AutoConfig, PreTrainedConfig

    folder = resolve_model_path(path)
    with refusals_in_words(path, folder):
        family = PreTrainedConfig.get_config_dict(folder)[0].get("model_type")
    if family is not None:
        refuse_family(family, path, device=device)
    with refusals_in_words(path, folder):
        return AutoConfig.from_pretrained(folder)


def _switch_off_dropout(config: PreTrainedConfig) -> None:
    """Dropout and noise would make rollout and training different policies."""
    from transformers import PreTrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _switch_off_dropout(value)
        elif ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.0)


def eos_ids(
    model_config: PreTrainedConfig,
    generation_config: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[int, ...]:
    """Every token id that ends a response: of the generation config, the model and the tokenizer."""
    ids: list[int] = []
    for owner in (generation_config, model_config, tokenizer):
        value = getattr(owner, "eos_token_id", None)
        if value is None:
            continue
        ids += value if isinstance(value, (list, tuple)) else [value]
    return tuple(dict.fromkeys(int(v) for v in ids))
