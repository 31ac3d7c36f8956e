"""`python -m hone.model_merger merge --local_dir RUN --target_dir OUT`: verl's name of `hone export`.

The classes have verl's names, for Python programs that call or extend them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hone.config.errors import ConfigError
from hone.trainer.command_line import run_program
from hone.types import Settings

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.models.auto.auto_factory import _BaseAutoModelClass


@dataclass
class ModelMergerConfig:
    """verl's settings of a merge.

    backend, tie_word_embedding and use_cpu_initialization are ignored, because a checkpoint records its
    format and its model. `merge_and_save` also ignores hf_model_config_path.
    """

    operation: str
    backend: str
    target_dir: str | None = "tmp"
    hf_upload_path: str | None = None
    private: bool = False
    test_hf_dir: str | None = None
    tie_word_embedding: bool = False
    trust_remote_code: bool = False
    is_value_model: bool = False
    local_dir: str | None = None
    hf_model_config_path: str | None = None
    hf_upload: bool = field(init=False)
    use_cpu_initialization: bool = False
    hf_model_path: str | None = None

    def __post_init__(self) -> None:
        if self.operation == "test":
            raise ConfigError(
                "model_merger test is not supported: merge, then compare the two folders with from_pretrained"
            )
        self.hf_upload = bool(self.hf_upload_path)


class BaseModelMerger:
    """Writes the model of a checkpoint as a Hugging Face folder; subclasses may override `merge_and_save`."""

    def __init__(self, config: ModelMergerConfig) -> None:
        if config.local_dir is None or config.target_dir is None:
            raise ConfigError("a model merger needs local_dir (a checkpoint) and target_dir")
        self.config = config
        default_path = str(Path(config.local_dir, "huggingface"))
        self.hf_model_config_path = (
            config.hf_model_path or config.hf_model_config_path or default_path
        )

    @cached_property
    def model_config(self) -> PretrainedConfig:
        """The Hugging Face config in the model's folder."""
        from transformers import AutoConfig

        config: PretrainedConfig = AutoConfig.from_pretrained(
            self.hf_model_config_path, trust_remote_code=self.config.trust_remote_code
        )
        return config

    def merge_and_save(self) -> None:
        """Exports `local_dir` to `target_dir`, and uploads the export if `hf_upload_path` is given."""
        from hone.trainer.export import check_push, export, local_target, push

        config = self.config
        if config.hf_upload_path:
            check_push(config.hf_upload_path)
        with local_target(str(config.target_dir)) as target:
            out = export(str(config.local_dir), target, trust_remote_code=config.trust_remote_code)
            if config.hf_upload_path:
                push(out, config.hf_upload_path, private=config.private, out=config.target_dir)

    def cleanup(self) -> None:
        """Does nothing, since an export has no process group."""

    def get_transformers_auto_model_class(self) -> type[_BaseAutoModelClass]:
        """Returns the transformers class that saves the model."""
        import transformers

        classes = {
            "ForTokenClassification": transformers.AutoModelForTokenClassification,
            "ForCausalLM": transformers.AutoModelForCausalLM,
            "ForConditionalGeneration": transformers.AutoModelForImageTextToText,
        }
        architecture = self.model_config.architectures[0]
        for task_name, model_class in classes.items():
            if task_name in architecture:
                return model_class
        raise NotImplementedError(f"{architecture} has none of {', '.join(classes)} in its name")

    def patch_model_generation_config(self, model: PreTrainedModel) -> PreTrainedModel:
        """Loads the generation config of the model's folder, if there is one."""
        from transformers import GenerationConfig

        if (
            model.can_generate()
            and Path(str(self.hf_model_config_path), "generation_config.json").is_file()
        ):
            model.generation_config = GenerationConfig.from_pretrained(self.hf_model_config_path)
        return model

    def save_lora_adapter(self, state_dict: dict[str, Tensor]) -> str | None:
        """Moves LoRA matrices from `state_dict` to `target_dir/lora_adapter`, and returns this folder.

        Adapter prefixes are removed from the names of the other weights. Alpha is that of the checkpoint's
        adapter config, or else the rank. Without LoRA matrices, nothing changes and the result is None.
        """
        from peft import LoraConfig
        from safetensors.torch import save_file

        lora_names = [name for name in state_dict if "lora_" in name]
        matrices = {
            name.replace(".default.weight", ".weight"): state_dict.pop(name).contiguous()
            for name in lora_names
        }
        if not matrices:
            return None
        for name in list(state_dict):
            base_name = name.replace("base_model.model.", "").replace(".base_layer.", ".")
            state_dict[base_name] = state_dict.pop(name)
        rank = min(next(iter(matrices.values())).shape)
        file = Path(str(self.config.local_dir), "lora_adapter", "adapter_config.json")
        adapter_config = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        folder = Path(str(self.config.target_dir), "lora_adapter")
        folder.mkdir(parents=True, exist_ok=True)
        LoraConfig(
            r=rank,
            lora_alpha=adapter_config.get("lora_alpha", rank),
            target_modules=sorted({name.split(".")[-3] for name in matrices}),
        ).save_pretrained(folder)
        save_file(matrices, folder / "adapter_model.safetensors")
        return str(folder)

    def save_hf_model_and_tokenizer(self, state_dict: dict[str, Tensor]) -> None:
        """Saves weights, tokenizer and processor to the target folder."""
        import torch
        from transformers import AutoProcessor

        from hone.models.from_config import hf_processor, hf_tokenizer

        source, target = str(self.hf_model_config_path), str(self.config.target_dir)
        self.save_lora_adapter(state_dict)
        with torch.device("meta"):
            model = self.get_transformers_auto_model_class().from_config(self.model_config)
        self.patch_model_generation_config(model).save_pretrained(target, state_dict=state_dict)
        trust = self.config.trust_remote_code
        hf_tokenizer(source, trust_remote_code=trust).save_pretrained(target)
        if hf_processor(source, trust_remote_code=trust) is not None:  # a multimodal model
            AutoProcessor.from_pretrained(source, trust_remote_code=trust).save_pretrained(target)

    def upload_to_huggingface(self) -> None:
        """Uploads the target folder to `hf_upload_path`."""
        from hone.trainer.export import push

        folder, name = str(self.config.target_dir), str(self.config.hf_upload_path)
        push(Path(folder), name, private=self.config.private)


class FSDPModelMerger(BaseModelMerger):
    """Merges a checkpoint of any engine."""


class MegatronModelMerger(BaseModelMerger):
    """Merges a checkpoint of any engine."""


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line of verl's program."""
    parser = argparse.ArgumentParser(prog="python -m hone.model_merger", description=__doc__)
    parser.add_argument("operation", nargs="?", default="merge", choices=("merge", "test"))
    parser.add_argument("--local_dir", required=True, help="run, global_step_N or actor folder")
    parser.add_argument("--target_dir", default="tmp", help="new folder to write to")
    parser.add_argument("--backend", help="ignored: a checkpoint records its format")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--hf_upload_path", help="upload it to the hub too, as NAME or OWNER/NAME")
    parser.add_argument("--private", action="store_true", help="upload it to a private repository")
    for name in ("--hf_model_path", "--hf_model_config_path", "--test_hf_dir", "--model_path"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("tie-word-embedding", "is-value-model", "use_cpu_initialization"):
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def generate_config_from_args(args: argparse.Namespace) -> ModelMergerConfig:
    """Returns the merger's settings from a parsed command line."""
    names = ModelMergerConfig.__dataclass_fields__.keys() - {"hf_upload"}
    settings: Settings = {name: getattr(args, name, None) for name in names}
    return ModelMergerConfig(**settings)


def main(arguments: Sequence[str] | None = None) -> None:
    from hone.tracking.console import screen

    config = generate_config_from_args(parse_args(arguments))
    FSDPModelMerger(config).merge_and_save()
    screen().line(f"wrote {config.target_dir}")


if __name__ == "__main__":
    sys.exit(run_program(lambda: main()))
