"""PRIME's reward model: log-ratios, the cross-entropy update, independence of micro-batches."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from hone.workers.process_reward_model import ImplicitRewardModelWorker
from tests.engine.batches import rows
from tests.workers.tasks import config_of, write_model

OUTCOME = [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0]
BETA = 0.05


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def batch():
    worker = rows()
    worker.batch["prompts"] %= 20
    worker.batch["responses"] %= 20
    worker.batch["outcome"] = torch.tensor(OUTCOME)
    worker.batch["group"] = torch.tensor([0, 0, 0, 1, 1, 2, 3])
    worker.batch["global_row"] = torch.arange(len(OUTCOME))
    return worker


def make_worker(model, *overrides):
    worker = ImplicitRewardModelWorker(
        config_of(
            model,
            "algorithm.adv_estimator=rloo",
            "reward_model.enable=true",
            "reward_model.type=prime",
            f"reward_model.model.path={model}",
            "reward_model.model.optim.optimizer=SGD",
            "reward_model.model.optim.lr=20",
            "reward_model.mini_batch_size=7",
            *overrides,
        )
    )
    worker.init_model()
    return worker


def step(worker, batch):
    out = worker.update_rm(batch.select(), total_rows=len(batch))
    return out.batch["log_ratio"], out.meta_info["metrics"]


def log_probs(lm, batch, row):
    """Returns the log-probs [T] of one row by plain transformers, with gradient."""
    columns = batch.batch
    width = columns["prompts"].shape[1]
    ids = torch.cat([columns["prompts"][row], columns["responses"][row]])
    keep = columns["attention_mask"][row].bool()
    logits = lm(input_ids=ids[keep][None]).logits[0, :-1].double()
    scores = torch.log_softmax(logits, -1).gather(1, ids[keep][1:, None])[:, 0]
    response = int(keep[width:].sum())
    mask = columns["response_mask"][row, :response]
    return scores[-response:] * mask


def test_the_update_is_one_step_of_cross_entropy_and_the_ratio_is_that_of_plain_transformers(
    model, batch
):
    ratio, metrics = step(make_worker(model), batch)
    lm, frozen = (AutoModelForCausalLM.from_pretrained(model).double() for _ in range(2))
    with torch.no_grad():
        reference = [log_probs(frozen, batch, i) for i in range(len(OUTCOME))]
    logits = torch.stack(
        [BETA * (log_probs(lm, batch, i) - reference[i]).sum() for i in range(len(OUTCOME))]
    )
    has_tokens = batch.batch["response_mask"].any(-1)  # other rows are not in the loss
    target = torch.tensor(OUTCOME).double()[has_tokens]
    loss = torch.nn.functional.binary_cross_entropy(logits[has_tokens].sigmoid(), target)
    loss.backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in lm.parameters()]).norm()
        for parameter in lm.parameters():
            parameter -= 20 * parameter.grad
        expected = [log_probs(lm, batch, i) - reference[i] for i in range(len(OUTCOME))]
    assert metrics["reward_model/dpo_loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert metrics["reward_model/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for i, tokens in enumerate(expected):
        torch.testing.assert_close(
            ratio[i, : len(tokens)].double(), tokens, rtol=1e-3, atol=1e-5, msg=f"row {i}"
        )
    assert ratio.abs().max() > 1e-3


@pytest.mark.parametrize("loss", ["ce", "dpo"])
def test_micro_batches_do_not_change_the_result(model, batch, loss):
    kind = f"reward_model.model.loss_type={loss}"
    whole, whole_metrics = step(make_worker(model, kind), batch)
    small, small_metrics = step(
        make_worker(model, kind, "reward_model.micro_batch_size_per_gpu=2"), batch
    )
    torch.testing.assert_close(small, whole, rtol=1e-4, atol=1e-6)
    assert small_metrics["reward_model/dpo_loss"] == pytest.approx(
        whole_metrics["reward_model/dpo_loss"]
    )


def test_update_before_scores_after_training_and_update_after_scores_before_it(model, batch):
    worker = make_worker(model, "reward_model.model.update=after")
    first, _ = step(worker, batch)
    assert (first == 0).all()
    second, _ = step(worker, batch)
    before, _ = step(make_worker(model), batch)
    torch.testing.assert_close(second, before)
    assert (before != 0).any()


def test_without_updates_the_model_equals_its_reference(model, batch):
    ratio, metrics = step(make_worker(model, "reward_model.model.update=none"), batch)
    assert (ratio == 0).all()
    assert metrics == {}


def test_training_lowers_the_loss(model, batch):
    worker = make_worker(
        model, "reward_model.model.optim.optimizer=AdamW", "reward_model.model.optim.lr=1e-2"
    )
    losses = [step(worker, batch)[1]["reward_model/dpo_loss"] for _ in range(15)]
    assert losses[-1] < 0.8 * losses[0]
