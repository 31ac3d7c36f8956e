"""From a folder to a module: weights, tokenizer, and where a checkpoint keeps its export.

`trust_remote_code` is off unless asked. A path that is a training checkpoint leads to the Hugging Face
export inside it, so that one run can start from another's folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hone.models import attention

EXPORT_FOLDER = "huggingface"
_STEP = re.compile(r"(?:global_step_|checkpoint-)(\d+)$")


class ModelNotFound(ValueError):
    """A model path leads nowhere."""


def resolve_model_path(path: str) -> str:
    """The folder with `config.json`: the path itself, or the export inside a checkpoint or run folder.

    A name that is no local folder is left alone: it may be a hub name.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        if str(path).startswith(("/", "~", ".")) or str(path).count("/") > 1:
            raise ModelNotFound(f"model path {path} does not exist; give a folder or a hub name")
        return path
    if (folder / "config.json").is_file():
        return str(folder)
    candidates = [folder / EXPORT_FOLDER, folder / "actor" / EXPORT_FOLDER]
    steps = [p for p in folder.glob("**/*") if p.is_dir() and _STEP.search(p.name)]
    for step in sorted(steps, key=_step_number, reverse=True):
        candidates += [step / "actor" / EXPORT_FOLDER, step / EXPORT_FOLDER]
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return str(candidate)
    raise ModelNotFound(
        f"{folder} holds no model: expected config.json there, or a checkpoint with "
        f"actor/{EXPORT_FOLDER}/config.json inside"
    )


def _step_number(path: Path) -> int:
    found = _STEP.search(path.name)
    return int(found.group(1)) if found else -1


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """A fast tokenizer that can pad; the padding token falls back to the end-of-text token."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = resolve_model_path(path)
    if _is_plain_tokenizer(Path(folder)):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _is_plain_tokenizer(folder: Path) -> bool:
    """Whether tokenizer.json says it all. The automatic choice goes by the model's family instead and
    would rebuild such a tokenizer with that family's rules, in silence."""
    try:
        told = json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class")
    except (OSError, ValueError):
        return False
    plain = told in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return plain and (folder / "tokenizer.json").is_file()


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """A Hugging Face decoder whose attention is ours."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # our own bars show long waits
    attention.register()
    folder = resolve_model_path(path)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    for key, value in (override_config or {}).items():
        if not hasattr(config, key):
            raise ValueError(
                f"override_config has {key!r}, which {type(config).__name__} of {path} does not know"
            )
        setattr(config, key, value)
    _refuse_other_mixers(config, path)
    _switch_off_dropout(config)
    return AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation=attention.NAME,
        trust_remote_code=trust_remote_code,
    )


def _refuse_other_mixers(config: Any, path: str) -> None:
    """In packed rows only attention knows where a row ends; a recurrent layer would read its neighbour."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if other := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise ValueError(
            f"{path} has layers of kind {', '.join(other)}; rows are packed end to end, which only "
            "full and sliding attention keep apart. Use a model with these alone"
        )


def _switch_off_dropout(config: Any) -> None:
    """Before the model is built. Dropout would make rollout and training different policies."""
    for name in (
        "attention_dropout",
        "hidden_dropout",
        "dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
    ):
        if getattr(config, name, 0):
            setattr(config, name, 0.0)


def eos_ids(model_config: Any, generation_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token id that ends a response, from all three places that may name one."""
    found: list[int] = []
    for owner in (generation_config, model_config, tokenizer):
        value = getattr(owner, "eos_token_id", None)
        if value is None:
            continue
        found += value if isinstance(value, (list, tuple)) else [value]
    return tuple(dict.fromkeys(int(v) for v in found))
