"""The outcome reward model: its score equals the classifier's for any padding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hone.engine import offload
from hone.models.tiny import character_tokenizer
from hone.protocol import DataProto
from hone.protocol.rows import object_array
from hone.verl.dialect import load_config
from hone.workers.reward_model import RewardModelWorker

ALPHABET = "abcdefgh0123456789+= \n:ua"
PROMPTS = ["1+1=", "12+34=", "7="]
ANSWERS = ["ab", "c", "abcdefgh"]


def save_classifier(folder: Path, alphabet: str = ALPHABET) -> Path:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    tokenizer = character_tokenizer(alphabet)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=48,
        num_labels=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def batch_of(tokenizer: object) -> DataProto:
    from hone.agents.collate import collate_outputs
    from hone.agents.contract import AgentLoopOutput

    outputs = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        ids = tokenizer.encode(answer, add_special_tokens=False)  # type: ignore[attr-defined]
        start = tokenizer.encode(prompt, add_special_tokens=False)  # type: ignore[attr-defined]
        outputs.append(AgentLoopOutput(start, ids, [1] * len(ids)))
    batch = collate_outputs(outputs, pad_token_id=0)
    batch.non_tensor_batch["raw_prompt"] = np.array(PROMPTS, dtype=object)
    return batch


def make_worker(model: Path, *overrides: str) -> RewardModelWorker:
    worker = RewardModelWorker(
        load_config(
            ["reward_model.enable=true", f"reward_model.model.path={model}",
             "trainer.device=cpu", *overrides]
        )
    )  # fmt: skip
    worker.init_model()
    return worker


def expected(model: Path, texts: list[str]) -> list[float]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    plain_model = AutoModelForSequenceClassification.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [tokenizer.encode(t, add_special_tokens=False) for t in texts]
    return [plain_model(torch.tensor([ids])).logits.item() for ids in rows]


@pytest.mark.parametrize("rows", ["null", "1", "2"])
def test_the_score_is_the_classifiers_at_the_last_token(tmp_path: Path, rows: str) -> None:
    model = save_classifier(tmp_path)
    worker = make_worker(
        model,
        f"reward_model.model.input_tokenizer={model}",
        f"reward_model.micro_batch_size_per_gpu={rows}",
    )
    scores = worker.compute_rm_score(batch_of(worker.tokenizer)).batch["rm_scores"]
    assert scores.shape == (3, 8)
    actual = [scores[i, len(answer) - 1].item() for i, answer in enumerate(ANSWERS)]
    whole = expected(model, [p + a for p, a in zip(PROMPTS, ANSWERS, strict=True)])
    assert actual == pytest.approx(whole, abs=1e-5)
    assert scores.count_nonzero() == 3


def test_a_long_row_is_truncated_from_the_left(tmp_path: Path) -> None:
    model = save_classifier(tmp_path)
    worker = make_worker(
        model, f"reward_model.model.input_tokenizer={model}", "reward_model.max_length=3"
    )
    scores = worker.compute_rm_score(batch_of(worker.tokenizer)).batch["rm_scores"].sum(-1)
    tails = [(p + a)[-3:] for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    assert scores.tolist() == pytest.approx(expected(model, tails), abs=1e-5)


def test_with_another_tokenizer_the_text_is_encoded_again(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    save_classifier(policy, "+=" + ALPHABET[::-1])
    model = save_classifier(tmp_path / "judge")
    worker = make_worker(
        model, f"reward_model.model.input_tokenizer={policy}", "data.prompt_format=raw"
    )
    scores = worker.compute_rm_score(batch_of(worker.policy_tokenizer)).batch["rm_scores"].sum(-1)
    whole = expected(model, [p + a for p, a in zip(PROMPTS, ANSWERS, strict=True)])
    assert scores.tolist() == pytest.approx(whole, abs=1e-5)


KINDS = {
    "decoder, token head": ("qwen2", "AutoModelForTokenClassification", {"num_key_value_heads": 2}),
    "decoder, `classifier` head": ("gpt2", "AutoModelForTokenClassification", {}),
    "decoder, sequence head": ("gpt2", "AutoModelForSequenceClassification", {}),
    "encoder, sequence head": ("bert", "AutoModelForSequenceClassification", {}),
    "encoder, another pooling": ("distilbert", "AutoModelForSequenceClassification", {}),
    "encoder, token head": ("bert", "AutoModelForTokenClassification", {}),
}


def save_kind(folder: Path, kind: str, labels: int = 1, **changes: object) -> Path:
    import transformers

    family, auto_class, settings = KINDS[kind]
    tokenizer = character_tokenizer(ALPHABET)
    config = transformers.AutoConfig.for_model(
        family, vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=16, num_labels=labels, pad_token_id=0,
        **settings, **changes,
    )  # fmt: skip
    torch.manual_seed(1)
    model = getattr(transformers, auto_class).from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_classifier_scores_a_padded_row_as_a_single_row(
    tmp_path: Path, kind: str
) -> None:
    import transformers

    model = save_kind(tmp_path, kind)
    worker = make_worker(model, f"reward_model.model.input_tokenizer={model}")
    scores = worker.compute_rm_score(batch_of(worker.tokenizer)).batch["rm_scores"].sum(-1).tolist()
    plain_model = getattr(transformers, KINDS[kind][1]).from_pretrained(model).eval()
    for prompt, answer, score in zip(PROMPTS, ANSWERS, scores, strict=True):
        ids = worker.tokenizer.encode(prompt + answer, add_special_tokens=False)
        logits = plain_model(torch.tensor([ids])).logits
        assert score == pytest.approx(logits.flatten()[-1].item(), abs=1e-5)
    assert len(set(scores)) == 3


def test_an_encoder_reads_prompt_and_response_as_a_pair(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModelForSequenceClassification

    model = save_kind(tmp_path, "encoder, sequence head", max_position_embeddings=10)
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.cls_token, tokenizer.sep_token = "<s>", "</s>"
    tokenizer.chat_template = None
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    ends = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=ends
    )
    (model / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["model_input_names"] = tokenizer.model_input_names
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    worker = make_worker(model, f"reward_model.model.input_tokenizer={model}")
    batch = batch_of(worker.tokenizer)
    batch.non_tensor_batch["raw_prompt"][0] = [{"role": "user", "content": "1+1="}]
    scores = worker.compute_rm_score(batch).batch["rm_scores"].sum(-1)
    plain_model = AutoModelForSequenceClassification.from_pretrained(model).eval()
    for row in (0, 1):
        pair = tokenizer(PROMPTS[row], ANSWERS[row], truncation=True, max_length=10)
        logits = plain_model(
            **{name: torch.tensor([values]) for name, values in pair.items()}
        ).logits
        assert logits.item() == pytest.approx(scores[row].item(), abs=1e-5)


@pytest.mark.parametrize("labels", [2, 3])
def test_another_number_of_labels_is_refused(tmp_path: Path, labels: int) -> None:
    model = save_kind(tmp_path, "decoder, sequence head", labels)
    with pytest.raises(ValueError, match=f"has {labels} labels .*needs 1"):
        make_worker(model, f"reward_model.model.input_tokenizer={model}")


def test_a_model_without_a_trained_score_head_is_refused(tmp_path: Path) -> None:
    from hone.models.tiny import save_pretrained, tiny_lm

    tokenizer = character_tokenizer(ALPHABET)
    lm = tiny_lm(len(tokenizer), hidden=16, layers=1, mlp=16)
    writer = save_pretrained(lm, tokenizer, tmp_path / "writer")
    with pytest.raises(ValueError, match=r"generates text and has no score head.*type=judge"):
        make_worker(writer)
    bare = save_kind(tmp_path / "bare", "decoder, sequence head")
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"architectures": None}))
    weights = load_file(bare / "model.safetensors")
    save_file({n: w for n, w in weights.items() if "score" not in n}, bare / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    with pytest.raises(ValueError, match=r"no trained weights for score.weight"):
        make_worker(bare)


def test_the_reward_models_own_chat_template_renders_the_conversation(tmp_path: Path) -> None:
    """This holds with the policy's vocabulary too, if the policy has another template."""
    model = save_classifier(tmp_path / "judge")
    policy = save_classifier(tmp_path / "policy")
    for folder, end in ((model, ":"), (policy, "=")):
        tokenizer = character_tokenizer(ALPHABET)
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}" + end + "{% endfor %}"
        tokenizer.save_pretrained(folder)
    worker = make_worker(model, f"reward_model.model.input_tokenizer={policy}")
    batch = batch_of(worker.tokenizer)
    batch.non_tensor_batch["raw_prompt"] = object_array(
        [PROMPTS[0], *([{"role": "user", "content": prompt}] for prompt in PROMPTS[1:])]
    )
    scores = worker.compute_rm_score(batch).batch["rm_scores"].sum(-1)
    texts = [f"{p}:{a}:" for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    assert scores.tolist() == pytest.approx(expected(model, texts), abs=1e-5)


def test_an_offloaded_model_scores_the_same_and_uses_no_memory_between_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_classifier(tmp_path)
    batch = batch_of(character_tokenizer(ALPHABET))
    same = f"reward_model.model.input_tokenizer={model}"
    expected_scores = make_worker(model, same).compute_rm_score(batch).batch["rm_scores"]
    monkeypatch.setattr(offload, "ACCELERATORS", {"cpu"})  # the CPU stands for the accelerator
    offloaded = make_worker(model, same, "reward_model.model.fsdp_config.param_offload=true")
    for _ in range(2):
        assert not any(p.untyped_storage().nbytes() for p in offloaded.model.parameters())
        assert torch.equal(offloaded.compute_rm_score(batch).batch["rm_scores"], expected_scores)


def test_the_scores_do_not_change_with_the_weight_file(tmp_path: Path) -> None:
    model = save_classifier(tmp_path)
    worker = make_worker(model, f"reward_model.model.input_tokenizer={model}")
    batch = batch_of(worker.tokenizer)
    scores = worker.compute_rm_score(batch).batch["rm_scores"]
    weights = model / "model.safetensors"
    with weights.open("r+b") as file:
        file.write(bytes(weights.stat().st_size))
    assert torch.equal(worker.compute_rm_score(batch).batch["rm_scores"], scores)
