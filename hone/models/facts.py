"""What a model folder says about itself without its weights being loaded: size, positions, family."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from hone.models.load import ModelNotFound, resolve_model_path


@dataclass(frozen=True)
class ModelFacts:
    """None where the folder does not say."""

    family: str | None = None
    positions: int | None = None
    """The longest sequence, prompt and response together."""
    parameters: int | None = None


def model_facts(path: str | None) -> ModelFacts:
    """The facts of a local folder; nothing is known of a hub name or a folder that is not there."""
    try:
        folder = Path(resolve_model_path(str(path)))
        config = json.loads((folder / "config.json").read_text()) if folder.is_dir() else {}
    except (ModelNotFound, OSError, ValueError):
        return ModelFacts()
    config = config if isinstance(config, dict) else {}
    text = config.get("text_config")
    positions = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    return ModelFacts(
        str(config["model_type"]) if config.get("model_type") else None,
        positions if isinstance(positions, int) and positions > 1 else None,
        _parameters(folder),
    )


def _parameters(folder: Path) -> int | None:
    """How many numbers the weight files hold, read from their headers."""
    from safetensors import SafetensorError, safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, "pt") as weights:
                shapes = (weights.get_slice(name).get_shape() for name in weights.keys())  # noqa: SIM118
                total += sum(math.prod(shape) for shape in shapes)
        except (OSError, SafetensorError):
            return None
    return total or None
