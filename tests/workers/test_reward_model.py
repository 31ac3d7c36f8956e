"""The reward model: its score is the classifier's own, whatever the padding; it joins the rule's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hone.config import load_config
from hone.engine import offload
from hone.models.tiny import character_tokenizer
from hone.protocol import DataProto
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


def worker(model: Path, *overrides: str) -> RewardModelWorker:
    made = RewardModelWorker(
        load_config(
            ["reward_model.enable=true", f"reward_model.model.path={model}",
             "trainer.device=cpu", *overrides]
        )
    )  # fmt: skip
    made.init_model()
    return made


def expected(model: Path, texts: list[str]) -> list[float]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    net = AutoModelForSequenceClassification.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [tokenizer.encode(t, add_special_tokens=False) for t in texts]
    return [net(torch.tensor([ids])).logits.item() for ids in rows]


@pytest.mark.parametrize("rows", ["null", "1", "2"])
def test_the_score_is_the_classifiers_on_the_last_token(tmp_path: Path, rows: str) -> None:
    model = save_classifier(tmp_path)
    made = worker(
        model,
        f"reward_model.model.input_tokenizer={model}",
        f"reward_model.micro_batch_size_per_gpu={rows}",
    )
    scores = made.compute_rm_score(batch_of(made.tokenizer)).batch["rm_scores"]
    assert scores.shape == (3, 8)
    found = [scores[i, len(answer) - 1].item() for i, answer in enumerate(ANSWERS)]
    whole = expected(model, [p + a for p, a in zip(PROMPTS, ANSWERS, strict=True)])
    assert found == pytest.approx(whole, abs=1e-5)
    assert scores.count_nonzero() == 3


def test_a_long_row_loses_its_head(tmp_path: Path) -> None:
    model = save_classifier(tmp_path)
    made = worker(model, f"reward_model.model.input_tokenizer={model}", "reward_model.max_length=3")
    scores = made.compute_rm_score(batch_of(made.tokenizer)).batch["rm_scores"].sum(-1)
    tails = [(p + a)[-3:] for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    assert scores.tolist() == pytest.approx(expected(model, tails), abs=1e-5)


def test_another_tokenizer_reads_the_text(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    save_classifier(policy, "+=" + ALPHABET[::-1])
    model = save_classifier(tmp_path / "judge")
    made = worker(model, f"reward_model.model.input_tokenizer={policy}")
    scores = made.compute_rm_score(batch_of(made.writer)).batch["rm_scores"].sum(-1)
    whole = expected(model, [p + a for p, a in zip(PROMPTS, ANSWERS, strict=True)])
    assert scores.tolist() == pytest.approx(whole, abs=1e-5)


def test_a_model_without_a_token_head_is_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(
        "bert", vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, num_labels=1,
    )  # fmt: skip
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    character_tokenizer(ALPHABET).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="without a `score` head"):
        worker(tmp_path, f"reward_model.model.input_tokenizer={tmp_path}")


def test_an_offloaded_model_scores_the_same_and_holds_no_memory_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_classifier(tmp_path)
    batch = batch_of(character_tokenizer(ALPHABET))
    same = f"reward_model.model.input_tokenizer={model}"
    expected_scores = worker(model, same).compute_rm_score(batch).batch["rm_scores"]
    monkeypatch.setattr(offload, "ACCELERATORS", {"cpu"})  # the CPU plays the accelerator
    resting = worker(model, same, "reward_model.model.fsdp_config.param_offload=true")
    for _ in range(2):
        assert not any(p.untyped_storage().nbytes() for p in resting.model.parameters())
        assert torch.equal(resting.compute_rm_score(batch).batch["rm_scores"], expected_scores)
