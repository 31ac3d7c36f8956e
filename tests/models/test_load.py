"""Loading of models and tokenizers, and the resolution of model paths."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2ForCausalLM

from hone.models.facts import check_model, model_facts
from hone.models.families import UnsupportedModel
from hone.models.load import eos_ids, load_causal_lm, load_classifier, load_tokenizer
from hone.models.paths import ModelNotFound, resolve_model_path
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.tracking.manifest import MANIFEST, write_manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = character_tokenizer()
    lm = tiny_lm(len(tokenizer), hidden=32, mlp=48)
    return save_pretrained(lm, tokenizer, tmp_path_factory.mktemp("model"))


def export_at(path):
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return str(path)


def test_a_folder_with_a_config_is_the_model_itself(tmp_path):
    path = export_at(tmp_path / "model")
    assert resolve_model_path(path) == path


def test_a_checkpoint_resolves_to_its_export_and_a_run_to_its_latest(tmp_path):
    for step in (2, 10, 9):
        export_at(tmp_path / f"global_step_{step}" / "actor" / "huggingface")
        write_manifest(tmp_path / f"global_step_{step}")
    newest = str(tmp_path / "global_step_10" / "actor" / "huggingface")
    assert resolve_model_path(str(tmp_path)) == newest
    assert resolve_model_path(str(tmp_path / "global_step_10")) == newest
    assert resolve_model_path(str(tmp_path / "global_step_10" / "actor")) == newest
    (tmp_path / "global_step_11").mkdir()  # has no export, so the previous step is used
    assert resolve_model_path(str(tmp_path)) == newest


@pytest.fixture
def run(folder, tmp_path):
    """Two sealed checkpoints, as SFT (1) and RL (2) write them."""
    for export in ("global_step_1/huggingface", "global_step_2/actor/huggingface"):
        shutil.copytree(folder, tmp_path / "run" / export)
    (tmp_path / "run/global_step_2/optimizer.bin").write_bytes(b"moments")
    for step in (1, 2):
        write_manifest(tmp_path / "run" / f"global_step_{step}")
    return tmp_path / "run"


def truncate(file):
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("inside", ["", "actor", "actor/huggingface"])
def test_a_damaged_checkpoint_that_was_named_is_refused(run, inside):
    step = run / "global_step_2"
    assert resolve_model_path(str(step / inside)) == str(step / "actor/huggingface")
    truncate(step / "actor/huggingface/model.safetensors")
    with pytest.raises(ModelNotFound, match=r"model\.safetensors is not what was written"):
        resolve_model_path(str(step / inside))


def test_a_changed_byte_is_damage_too(run):
    file = run / "global_step_2/actor/huggingface/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ModelNotFound, match="not what was written"):
        resolve_model_path(str(run / "global_step_2"))


def test_a_checkpoint_without_its_optimizer_file_still_gives_its_model(run):
    (run / "global_step_2/optimizer.bin").unlink()
    assert resolve_model_path(str(run)) == str(run / "global_step_2/actor/huggingface")


@pytest.mark.parametrize("how", ["truncated", "unsealed"])
def test_in_a_run_the_checkpoint_before_a_damaged_one_is_used_with_a_warning(run, caplog, how):
    if how == "truncated":
        truncate(run / "global_step_2/actor/huggingface/model.safetensors")
    else:
        (run / "global_step_2" / MANIFEST).unlink()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # for tokenizer and weights; it warns once
            assert resolve_model_path(str(run)) == str(run / "global_step_1/huggingface")
    (message,) = caplog.messages
    assert "global_step_2" in message
    assert "is a damaged checkpoint" in message


def test_a_run_folder_is_said_to_be_one_with_its_newest_checkpoint(run, capsys):
    for _ in range(2):  # for tokenizer and weights; one line
        newest = resolve_model_path(str(run))
    resolve_model_path(str(run / "global_step_1"))
    line = f"{run} is a run folder: its newest checkpoint {newest} is used"
    assert capsys.readouterr().out.replace("\n", "").count(line) == 1
    assert newest == str(run / "global_step_2/actor/huggingface")


def test_a_folder_that_contains_runs_is_refused_with_their_names(run):
    shutil.copytree(run, run.parent / "other")
    with pytest.raises(ModelNotFound) as caught:
        resolve_model_path(str(run.parent))
    assert str(caught.value) == (
        f"{run.parent} holds no model, but 2 runs: {run.parent}/other, {run}; name one of them"
    )


def test_a_checkpoint_without_its_manifest_is_refused_but_its_model_can_be_named(run):
    (run / "global_step_2" / MANIFEST).unlink()
    with pytest.raises(ModelNotFound, match=r"no manifest\.json.*name .*actor/huggingface"):
        resolve_model_path(str(run / "global_step_2"))
    model = str(run / "global_step_2/actor/huggingface")
    assert resolve_model_path(model) == model


def test_a_truncated_weight_file_of_a_plain_folder_is_named(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    truncate(tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors is truncated or damaged"):
        load_causal_lm(str(tmp_path), dtype=torch.float32)


@pytest.mark.parametrize("name", ["no_such_folder", "no/folder", "not a name"])
def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_refused(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for load in (load_tokenizer, lambda path: load_causal_lm(path, dtype=torch.float32)):
        with pytest.raises(
            ModelNotFound, match=f"no model '{name}': it is neither a fold"
        ) as caught:
            load(name)
        assert "\n" not in str(caught.value)
        assert pickle.loads(pickle.dumps(caught.value)).path == name  # raised in a worker


def test_a_hub_name_is_unchanged_and_a_wrong_path_is_refused():
    assert resolve_model_path("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    with pytest.raises(ModelNotFound, match="does not exist"):
        resolve_model_path("/no/such/model")


def test_the_error_of_a_folder_without_a_model_names_the_expected_file(tmp_path):
    with pytest.raises(ModelNotFound, match=r"expected config\.json"):
        resolve_model_path(str(tmp_path))


def test_the_model_has_the_attention_of_hone_and_the_requested_dtype(folder):
    lm = load_causal_lm(str(folder), dtype=torch.bfloat16)
    assert lm.config._attn_implementation == "hone"
    assert {p.dtype for p in lm.parameters()} == {torch.bfloat16}


def test_overrides_change_the_config_and_unknown_ones_are_refused(folder):
    lm = load_causal_lm(str(folder), dtype=torch.float32, override_config={"rms_norm_eps": 0.5})
    assert lm.model.norm.variance_epsilon == 0.5
    with pytest.raises(UnsupportedModel, match="'rms_norm_epss'"):
        load_causal_lm(str(folder), dtype=torch.float32, override_config={"rms_norm_epss": 0.5})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"its weights lack model\.norm\.weight;"),
        ({"lm_head.weight": None}, r"its weights lack lm_head\.weight;"),
        ({"model.norm.weight": torch.ones(3)}, r"model\.norm\.weight has shape \[3\]"),
        (
            {"lm_head.weight": torch.ones(3, 3), "model.norm.weight": torch.ones(3)},
            r"lm_head\.weight has shape \[3, 3\], but .* \(and 1 more such problems\)",
        ),
        (
            {"lm_head.weight": None, "model.norm.weight": torch.ones(3)},
            r"lack lm_head\.weight \(and 1 more",
        ),
    ],
)
def test_a_parameter_that_is_not_in_the_weights_is_never_random(change, message, tmp_path):
    tokenizer = character_tokenizer()
    save_pretrained(tiny_lm(len(tokenizer), hidden=32, tie_embeddings=False), tokenizer, tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {k: v for k, v in (load_file(file) | change).items() if v is not None}
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=message):
        load_causal_lm(str(tmp_path), dtype=torch.float32)


def test_a_new_head_logs_no_report_of_transformers(folder, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    load_classifier(str(folder), ["score"], dtype=torch.float32)
    assert "newly initialized" not in caplog.text
    assert "not sharded" not in caplog.text


def test_a_folder_with_nothing_but_a_gguf_file_is_refused_before_loading(folder, tmp_path):
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModel, match="no weights"):
        check_model(str(tmp_path))


@pytest.mark.parametrize(
    ("overrides", "rope", "theta"),
    [
        ({"rope_theta": 5.0}, "default", 5.0),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear", 10000.0),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn", 10000.0),
        ({"rope_theta": 5.0, "rope_scaling": None}, "default", 5.0),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "linear", 10000.0),
    ],
)
def test_overrides_may_have_the_older_names_of_rotary_positions(folder, overrides, rope, theta):
    lm = load_causal_lm(str(folder), dtype=torch.float32, override_config=overrides)
    assert lm.model.rotary_emb.rope_type == rope
    assert lm.config.rope_parameters["rope_theta"] == theta


def test_a_value_of_another_type_is_refused_by_name(folder):
    with pytest.raises(UnsupportedModel, match=r"rms_norm_eps.*expected float"):
        load_causal_lm(str(folder), dtype=torch.float32, override_config={"rms_norm_eps": "1e-5"})


def test_quantized_weights_are_refused(folder, monkeypatch):
    monkeypatch.setattr(Qwen2ForCausalLM, "is_quantized", True, raising=False)
    with pytest.raises(UnsupportedModel, match="quantized weights"):
        load_causal_lm(str(folder), dtype=torch.float32)


def test_an_override_with_dropout_is_refused_and_one_without_is_not(folder):
    load_causal_lm(str(folder), dtype=torch.float32, override_config={"embd_pdrop": 0.0})
    with pytest.raises(UnsupportedModel, match=r"attention_dropout=0\.1"):
        load_causal_lm(str(folder), dtype=torch.float32, override_config={"attention_dropout": 0.1})


@pytest.mark.parametrize("scaling", [{"type": "linear"}, {"type": "bogus", "factor": 2.0}])
def test_a_rotary_scaling_that_cannot_be_computed_is_refused(folder, scaling):
    overrides = {"rope_scaling": scaling}
    with pytest.raises(UnsupportedModel, match="override_config"):
        load_causal_lm(str(folder), dtype=torch.float32, override_config=overrides)


def test_one_scaling_for_rotary_tables_per_layer_type_is_refused(tmp_path):
    tokenizer = character_tokenizer()
    save_pretrained(tiny_lm(len(tokenizer), family="gemma3_text"), tokenizer, tmp_path)
    overrides = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(UnsupportedModel, match="rope_scaling"):
        load_causal_lm(str(tmp_path), dtype=torch.float32, override_config=overrides)


def test_an_attention_implementation_in_the_overrides_is_replaced_with_a_warning(folder, caplog):
    overrides = {"attn_implementation": "flash_attention_2"}
    lm = load_causal_lm(str(folder), dtype=torch.float32, override_config=overrides)
    assert lm.config._attn_implementation == "hone"
    assert "hone's own attention" in caplog.text


def test_dropout_is_off_in_training_mode_too(tmp_path):
    config = AutoConfig.for_model(
        "phi",
        vocab_size=20,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        resid_pdrop=0.5,
        embd_pdrop=0.5,
        attention_dropout=0.5,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    lm = load_causal_lm(str(tmp_path), dtype=torch.float32).train()
    rates = {m.p for m in lm.modules() if isinstance(m, nn.Dropout)}
    assert rates == {0.0}


@pytest.mark.parametrize("kind", ["linear_attention", "chunked_attention"])
def test_layers_that_would_mix_packed_rows_are_refused(folder, kind):
    with pytest.raises(UnsupportedModel, match=f"layers of kind {kind}"):
        load_causal_lm(
            str(folder),
            dtype=torch.float32,
            override_config={"layer_types": ["full_attention", kind]},
        )


@pytest.mark.parametrize("kind", ["no_such_kind", "vit"])
def test_an_unknown_model_type_is_refused_in_one_line(folder, tmp_path, kind):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, model_type=kind)
    with pytest.raises(UnsupportedModel, match=f"is a {kind} model, which is not sup") as refused:
        load_causal_lm(str(tmp_path), dtype=torch.float32)
    assert "\n" not in str(refused.value)


def test_remote_code_of_a_folder_is_not_used(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})
    (tmp_path / "modeling_own.py").write_text("raise RuntimeError('never imported')")
    lm = load_causal_lm(str(tmp_path), dtype=torch.float32)
    assert type(lm).__module__.startswith("transformers.")


def change_config(folder, **changed):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))


def test_the_tokenizer_can_always_pad(folder, tmp_path):
    assert load_tokenizer(str(folder)).pad_token == "<pad>"
    tokenizer = character_tokenizer()
    tokenizer.pad_token = None
    lm = tiny_lm(len(tokenizer), hidden=32, mlp=48)
    save_pretrained(lm, tokenizer, tmp_path)
    assert load_tokenizer(str(tmp_path)).pad_token == "</s>"


def test_an_empty_path_is_no_run_below_the_working_folder(tmp_path, monkeypatch):
    export_at(tmp_path / "run" / "global_step_1" / "actor" / "huggingface")
    write_manifest(tmp_path / "run" / "global_step_1")
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path("run").endswith("huggingface")
    with pytest.raises(ModelNotFound, match="the model path is empty; give a folder"):
        resolve_model_path("")


DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
SIZES = ("hidden_size", "vocab_size", "intermediate_size", "head_dim", "num_attention_heads")


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("size", [-8, 0, 1 << 60])
def test_an_impossible_size_is_refused_with_its_folder(folder, tmp_path, key, size):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: size}))
    with pytest.raises(UnsupportedModel, match=f"^{tmp_path} cannot be loaded: "):
        load_causal_lm(str(tmp_path), dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", DEEP),
        ("generation_config.json", DEEP),
        ("model.safetensors.index.json", DEEP),
        ("model.safetensors.index.json", '{"metadata": {}, "weight_map": {}}'),
        ("model.safetensors.index.json", '{"metadata": {}, "weight_map": {"a": "../../../etc/passwd"}}'),
        ("model.safetensors.index.json", '{"metadata": {}, "weight_map": {"a": "/etc/passwd"}}'),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", DEEP),
    ],
    ids=["config", "generation", "index", "no file", "parent", "absolute", "empty", "tokenizer"],
)  # fmt: skip
def test_a_hostile_file_is_refused_with_its_folder(folder, tmp_path, name, content):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    if "index" in name:
        (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    (tmp_path / name).write_text(content)
    assert model_facts(str(tmp_path)) is not None  # it never raises
    load = partial(load_causal_lm, dtype=torch.float32)
    if "tokenizer" in name:
        load = load_tokenizer
    elif "index" in name:
        load = check_model
    with pytest.raises(UnsupportedModel, match=f"^{tmp_path} cannot be loaded: "):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("part", "steps"), [("normalizer", "normalizers"), ("decoder", "decoders")]
)
def test_a_tokenizer_that_multiplies_texts_is_refused(folder, tmp_path, part, steps):
    """Its texts would have 10 GB, for which the tokenizers library ends the process."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    doubling = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 33
    nested = {"type": "Sequence", steps: [{"type": "Sequence", steps: doubling}]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: nested}))
    with pytest.raises(UnsupportedModel, match="may make a text over 4,096 times longer"):
        load_tokenizer(str(tmp_path))


def test_a_truncated_tokenizer_is_refused_with_its_folder(folder, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(folder, cut)
    text = (cut / "tokenizer.json").read_text()
    (cut / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(UnsupportedModel, match="cut cannot be loaded: Expecting"):
        load_tokenizer(str(cut))


def test_eos_ids_are_collected_once_from_all_configs():
    def owner(value):
        return SimpleNamespace(eos_token_id=value)

    assert eos_ids(owner(2), owner([7, 2]), owner(9)) == (7, 2, 9)
    assert eos_ids(owner(None), None, owner(4)) == (4,)


def test_a_folder_without_a_tokenizer_is_refused(folder, tmp_path) -> None:
    import shutil

    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(f"{folder}/{name}", bare / name)
    with pytest.raises((UnsupportedModel, ModelNotFound), match="tokenizer"):
        load_tokenizer(str(bare))


_DAMAGE_FILES_AFTER_LOADING = """
import os, sys, torch
from copy import deepcopy
from pathlib import Path
from hone.models.load import load_causal_lm, load_classifier

torch.set_num_threads(1)
kind, folder = sys.argv[1:]
if kind == "classifier":
    lm = load_classifier(folder, ["value"], dtype=torch.float32)
else:
    lm = load_causal_lm(folder, dtype=torch.float32)
before = deepcopy(lm.state_dict())
[file] = [*Path(folder).glob("*.safetensors"), *Path(folder).glob("*.bin")]
with open(file, "r+b") as stream:
    stream.write(bytes(os.path.getsize(file)))
for size in (os.path.getsize(file), 0):
    os.truncate(file, size)
    for name, tensor in lm.state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} changed with the file"
"""


@pytest.mark.parametrize("kind", ["safetensors", "bin", "classifier"])
def test_a_loaded_model_outlives_its_overwritten_and_truncated_file(folder, tmp_path, kind):
    shutil.copytree(folder, tmp_path / "model")
    if kind == "bin":
        weights = tmp_path / "model" / "model.safetensors"
        torch.save(load_file(weights), tmp_path / "model" / "pytorch_model.bin")
        weights.unlink()
    command = [sys.executable, "-c", _DAMAGE_FILES_AFTER_LOADING, kind, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.returncode, done.stderr[-500:])
