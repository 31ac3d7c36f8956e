"""Size, maximum sequence length and family of a model folder, read without loading its weights."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open

from hone.models.families import UnsupportedModel, check_config_supported
from hone.models.load import load_config, translate_load_errors
from hone.models.paths import ModelNotFound, resolve_model_path

_WEIGHT_FILE_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class FolderFacts:
    """Facts about a model folder; a missing fact is None."""

    family: str | None = None
    max_position_embeddings: int | None = None
    """The maximum sequence length, prompt and response together."""
    parameters: int | None = None


def model_facts(path: str | None) -> FolderFacts:
    """Returns the facts of a local folder; every fact is None for a hub name or a missing folder."""
    try:
        folder = Path(resolve_model_path(str(path)))
        config = json.loads((folder / "config.json").read_text()) if folder.is_dir() else {}
    except (ModelNotFound, OSError, ValueError, RecursionError):
        return FolderFacts()
    config = config if isinstance(config, dict) else {}
    text_config = config.get("text_config")
    if not isinstance(text_config, dict):
        text_config = config
    max_length = text_config.get("max_position_embeddings")
    return FolderFacts(
        str(config["model_type"]) if config.get("model_type") else None,
        max_length if isinstance(max_length, int) and max_length > 1 else None,
        _parameter_count(folder),
    )


def check_model(path: str, *, is_decoder: bool = True) -> None:
    """Raises for a model that cannot be loaded: an unsupported family, missing or damaged weights.

    Hub names are not checked, because their files may not be downloaded yet.
    """
    folder = Path(resolve_model_path(path))
    if not folder.is_dir():
        return
    if is_decoder:
        check_config_supported(load_config(path), path)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        _check_weight_files(index, path)
    elif not any(file for pattern in _WEIGHT_FILE_PATTERNS for file in folder.glob(pattern)):
        raise UnsupportedModel(
            f"{path} cannot be loaded: it has config.json and no weights; copy the model's "
            "model.safetensors into the folder"
        )
    with translate_load_errors(path, str(folder)):
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt"):  # opening a file checks its header
                continue


def classifier_kind(path: str, *, trust_remote_code: bool = False) -> Literal["sequence", "token"]:
    """Returns the kind of a classifier's head; raises for a model that is not a classifier."""
    from transformers import AutoConfig

    folder = resolve_model_path(path)
    with translate_load_errors(path, folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    names = config.architectures or []
    if config.is_encoder_decoder or any(
        "ForCausalLM" in name or "LMHead" in name for name in names
    ):
        raise UnsupportedModel(
            f"{path} is a {', '.join(names) or config.model_type}, which generates text and has no score "
            "head; name a sequence or token classifier, or use reward_model.type=judge"
        )
    return "token" if any("ForTokenClassification" in name for name in names) else "sequence"


def _check_weight_files(index: Path, path: str) -> None:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        outside = [name for name in names if (index.parent / name).parent != index.parent]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UnsupportedModel(
            f"{path} cannot be loaded: {index.name} is damaged ({error!r}); copy it again"
        ) from error
    if outside or not names:
        problem = (
            f"names {outside[0]!r}, which is not in the folder" if outside else "names no file"
        )
        raise UnsupportedModel(f"{path} cannot be loaded: {index.name} {problem}; copy it again")
    missing = sorted(str(name) for name in names if not (index.parent / str(name)).is_file())
    if missing:
        raise UnsupportedModel(
            f"{path} cannot be loaded: {len(missing)} of its {len(names)} weight files are missing "
            f"({missing[0]}, …); copy them into the folder"
        )


def _parameter_count(folder: Path) -> int | None:
    """Returns the number of parameters, read from the headers of the weight files, or None if unknown."""
    total = 0
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, "pt") as weights:
                shapes = (weights.get_slice(name).get_shape() for name in weights.keys())  # noqa: SIM118
                total += sum(math.prod(shape) for shape in shapes)
        except (OSError, SafetensorError):
            return None
    return total or None
