"""Loads weights, configs and tokenizers from model folders and training checkpoints.

Remote code runs for tokenizers only, and only with `trust_remote_code`.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch
from typing_extensions import Required, Unpack

from hone.models.families import (
    UnsupportedModel,
    check_config_supported,
    check_family_supported,
    disable_dropout,
    logit_softcap_and_scale,
    override_fields,
)
from hone.models.paths import ModelNotFound, resolve_model_path
from hone.models.policy import register_attention
from hone.text import error_text
from hone.types import JsonValue, Settings

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

log = logging.getLogger(__name__)

_ERRORS_OF_WRONG_FILES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError)
"""What transformers, tokenizers and torch raise for wrong sizes, missing keys and deep nesting."""
_MAX_TEXT_GROWTH = 1 << 12
_META_LOCK = threading.Lock()
"""Held while `register_parameter` is patched for all modules."""


@contextmanager
def translate_load_errors(path: str, folder: str) -> Iterator[None]:
    """Converts errors of transformers (wrong values, missing packages, missing files) into hone's."""
    from huggingface_hub.errors import HFValidationError, StrictDataclassError
    from safetensors import SafetensorError

    # Callers check the loading report. A higher level would make transformers warn about missing shards.
    report_log = logging.getLogger("transformers.modeling_utils")
    was_disabled = report_log.disabled
    report_log.disabled = True
    try:
        yield
    except (UnsupportedModel, torch.OutOfMemoryError):
        raise
    except SafetensorError as error:
        name = _damaged_file_name(Path(folder))
        raise UnsupportedModel(
            f"{path} cannot be loaded: {name} is truncated or damaged ({error}); write or copy it again"
        ) from error
    except (OSError, ValueError, ImportError, StrictDataclassError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the file system, not of transformers
        first_line, _, _ = str(error).strip().partition("\n")
        if isinstance(error, (OSError, HFValidationError)) and not Path(folder).exists():
            raise ModelNotFound(
                f"there is no model {path!r}: it is neither a folder (looked in {Path.cwd()}) nor "
                f"available on the hub under that name ({first_line})",
                path,
            ) from error
        reason = first_line if isinstance(error, OSError) else " ".join(str(error).split())
        raise UnsupportedModel(f"{path} cannot be loaded: {reason}") from error
    except _ERRORS_OF_WRONG_FILES as error:
        raise UnsupportedModel(
            f"{path} cannot be loaded: a file of the folder has a value or structure that no model has "
            f"({error_text(error)}); copy config.json, the tokenizer files and the weights again"
        ) from error
    finally:
        report_log.disabled = was_disabled


def _damaged_file_name(folder: Path) -> str:
    """Returns the name of the first weight file that cannot be opened."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                continue
        except SafetensorError:
            return file.name
    return "a weight file"


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Returns a fast tokenizer; its padding token defaults to the end-of-text token."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = resolve_model_path(path)
    _check_text_growth(Path(folder) / "tokenizer.json", path)
    with translate_load_errors(path, folder):
        if _has_generic_tokenizer(Path(folder)):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    # transformers silently returns an empty tokenizer for a folder without one.
    if not tokenizer.encode("a b 1", add_special_tokens=False):
        raise UnsupportedModel(
            f"{path} has no usable tokenizer: its {type(tokenizer).__name__} has {len(tokenizer)} "
            "tokens and encodes text as no tokens; copy tokenizer.json and tokenizer_config.json of the "
            "model into the folder, or name another folder with model.tokenizer_path"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _check_text_growth(file: Path, path: str) -> None:
    """Raises an error if replacements of tokenizer.json multiply texts, which would end the process."""
    try:
        tokenizer = json.loads(file.read_bytes())
        growth = max(_text_growth(tokenizer[name]) for name in ("normalizer", "decoder"))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return  # transformers reports a missing or damaged file
    if growth > _MAX_TEXT_GROWTH:
        raise UnsupportedModel(
            f"{path} cannot be loaded: the replacements of tokenizer.json may make a text over "
            f"{_MAX_TEXT_GROWTH:,} times longer; copy it again"
        )


def _text_growth(step: JsonValue) -> int:
    """Returns how many times longer the replacements of a normalizer or decoder may make a text."""
    if not isinstance(step, dict):
        return 1
    steps = step.get("normalizers") or step.get("decoders")
    if isinstance(steps, list):
        return math.prod(map(_text_growth, steps))
    content = step.get("content")
    is_replacement = step.get("type") == "Replace" and isinstance(content, str)
    return max(1, len(str(content))) if is_replacement else 1


def _has_generic_tokenizer(folder: Path) -> bool:
    """Whether tokenizer.json is complete; AutoTokenizer would silently use the rules of its family."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        class_name = config.get("tokenizer_class")
    except (OSError, ValueError, RecursionError):
        return False  # transformers reports the file
    is_generic = class_name in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return is_generic and (folder / "tokenizer.json").is_file()


class LoadOptions(TypedDict, total=False):
    """Arguments of `load_causal_lm` and `load_classifier`."""

    dtype: Required[torch.dtype]
    override_config: Settings | None
    """Values that override the model's config.json."""
    device: torch.device | None
    """The device that the model will run on, by default the CPU; the caller moves the model there."""


def load_causal_lm(path: str, **options: Unpack[LoadOptions]) -> PreTrainedModel:
    """Loads a Hugging Face decoder onto the CPU, with hone's attention.

    Remote code is never used, because only the models of transformers were compared.
    """
    from transformers import AutoModelForCausalLM

    config = _model_config(path, options)
    return _load_pretrained(AutoModelForCausalLM, path, config, options, is_head_new=False)


def empty_causal_lm(path: str, **options: Unpack[LoadOptions]) -> PreTrainedModel:
    """Returns the decoder of `load_causal_lm` with parameters on the meta device, and buffers in memory."""
    from transformers import AutoModelForCausalLM

    config = _model_config(path, options)
    with _parameters_on_meta():
        return AutoModelForCausalLM.from_config(
            config, dtype=options["dtype"], attn_implementation=register_attention()
        ).eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Moves each parameter that a module registers to the meta device, which uses no memory."""
    module_class = torch.nn.Module
    register = module_class.register_parameter

    def register_on_meta(
        owner: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None
    ) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        register(owner, name, parameter)

    with _META_LOCK:
        module_class.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            module_class.register_parameter = register  # type: ignore[method-assign]


def load_classifier(
    path: str, labels: Sequence[str], *, seed: int = 0, **options: Unpack[LoadOptions]
) -> PreTrainedModel:
    """Loads a decoder with a linear head per token, which is initialized from the seed if it is missing.

    The model is a token classifier for several labels, and a sequence classifier for one label.
    """
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    config = _model_config(path, options)
    task, auto_class = "SequenceClassification", AutoModelForSequenceClassification
    if len(labels) > 1:
        task, auto_class = "TokenClassification", AutoModelForTokenClassification
    architecture = (config.architectures or [""])[0]
    if "Classification" in architecture and (
        not architecture.endswith(task) or config.num_labels != len(labels)
    ):
        raise UnsupportedModel(
            f"{path} is a {architecture} with {config.num_labels} labels, but a {task} model with "
            f"{len(labels)} ({', '.join(labels)}) is needed; name such a classifier, or a language model"
        )
    is_head_new = "Classification" not in architecture
    if is_head_new:
        log.warning(
            "%s (%s) has no classification head; a new one is initialized", path, architecture
        )
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lm = _load_pretrained(auto_class, path, config, options, is_head_new=is_head_new)
    if not isinstance(getattr(lm, "score", None), torch.nn.Linear):
        raise UnsupportedModel(f"{path}: a {type(lm).__name__} has no linear head `score`")
    return lm


def load_step_classifier(
    path: str, token_ids: tuple[int, int], **options: Unpack[LoadOptions]
) -> PreTrainedModel:
    """Loads a causal language model and replaces its LM head by `score`: the LM head's rows of two tokens."""
    lm = load_causal_lm(path, **options)
    head = lm.get_output_embeddings()
    if logit_softcap_and_scale(lm.config) != (None, 1.0):
        raise UnsupportedModel(
            f"{path} caps or scales its logits, which is not supported for a process reward model; use "
            "another model"
        )
    ids, hidden_size = list(token_ids), head.weight.shape[1]
    lm.score = torch.nn.Linear(hidden_size, 2, bias=head.bias is not None, dtype=head.weight.dtype)
    with torch.no_grad():
        lm.score.weight.copy_(head.weight[ids])
        if head.bias is not None:
            lm.score.bias.copy_(head.bias[ids])
    lm.set_output_embeddings(None)
    return lm


def _model_config(path: str, options: LoadOptions) -> PreTrainedConfig:
    device = options.get("device")
    config = load_config(path, device=device)
    with translate_load_errors(path, resolve_model_path(path)):
        override_fields(config, options.get("override_config") or {}, path)
    check_config_supported(config, path, device=device)
    disable_dropout(config)
    return config


def _load_pretrained(
    auto_class: type[_BaseAutoModelClass],
    path: str,
    config: PreTrainedConfig,
    options: LoadOptions,
    *,
    is_head_new: bool,
) -> PreTrainedModel:
    """Loads a model; raises if the weights lack a parameter that is not part of a new head."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # hone shows its own bars
    folder = resolve_model_path(path)
    with translate_load_errors(path, folder):
        lm, report = auto_class.from_pretrained(
            folder,
            config=config,
            dtype=options["dtype"],
            attn_implementation=register_attention(),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # transformers' own error does not name the tensor
        )
    if getattr(lm, "is_quantized", False):
        raise UnsupportedModel(
            f"{path} has quantized weights, which cannot be trained; name the unquantized model"
        )
    # transformers initializes missing parameters at random and only logs them.
    missing = sorted(report["missing_keys"])
    if is_head_new:
        missing = [name for name in missing if name.startswith(f"{lm.base_model_prefix}.")]
    problems = [f"its weights lack {name}" for name in missing] + [
        f"{name} has shape {[*shape]}, but its config asks for {[*expected_shape]}"
        for name, shape, expected_shape in sorted(report["mismatched_keys"])
    ]
    if problems:
        more = f" (and {len(problems) - 1} more such problems)" if problems[1:] else ""
        raise UnsupportedModel(
            f"{path} cannot be loaded: {problems[0]}{more}; copy config.json and all weight files of "
            "one model"
        )
    copy_from_files(lm, options.get("device"))
    return lm


def copy_from_files(lm: PreTrainedModel, device: torch.device | None = None) -> None:
    """Copies the tensors of a loaded model to memory, one by one, if it will run on the CPU (the default).

    `from_pretrained` maps the weight files: a model would change with its files, and a truncated file
    would kill the process with SIGBUS. A model for another device is copied by the move to the device.
    """
    if device is None or device.type == "cpu":
        for tensor in itertools.chain(lm.parameters(), lm.buffers()):
            tensor.data = tensor.data.clone()


def load_config(path: str, *, device: torch.device | None = None) -> PreTrainedConfig:
    """Loads the config of a model; raises for an unsupported family before looking up the class."""
    from transformers import AutoConfig, PreTrainedConfig

    folder = resolve_model_path(path)
    with translate_load_errors(path, folder):
        family = PreTrainedConfig.get_config_dict(folder)[0].get("model_type")
    if family is not None:
        check_family_supported(family, path, device=device)
    with translate_load_errors(path, folder):
        return AutoConfig.from_pretrained(folder)


def eos_ids(
    model_config: PreTrainedConfig,
    generation_config: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[int, ...]:
    """Returns all end-of-text ids of the generation config, the model's config and the tokenizer."""
    ids: list[int] = []
    for source in (generation_config, model_config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            ids += value if isinstance(value, (list, tuple)) else [value]
    return tuple(dict.fromkeys(int(token_id) for token_id in ids))
