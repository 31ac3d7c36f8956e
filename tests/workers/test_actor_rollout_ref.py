"""The actor's worker: generate, log-probs, reference, update, checkpoint, on one set of parameters."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM

from hone.agents.collate import join_ranks
from hone.agents.contract import AgentLoopBase, AgentLoopOutput
from hone.agents.runner import AgentLoopFailed
from hone.controller.decorator import Mesh, method_spec
from hone.controller.worker import Placement, free_port
from hone.controller.worker_group import GroupView
from hone.engine import offload
from hone.workers import actor_rollout_ref
from hone.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.workers.ranks import TWO_RANK_RUNS, metrics_of, run_rank, walk, weights
from tests.workers.tasks import RESPONSE, config_of, prompts, with_advantages, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def worker(model):
    made = []

    def build(*overrides, role="actor_rollout_ref"):
        one = ActorRolloutRefWorker(config_of(model, *overrides), role)
        one.init_model()
        made.append(one)
        return one

    yield build
    for one in made:
        one.close()


def test_rollout_log_probs_are_the_trainers(worker):
    one = worker()
    batch = one.generate_sequences(prompts())
    assert batch.batch["responses"].shape[0] == 8
    assert batch.batch["responses"].shape[1] <= RESPONSE
    batch.meta_info["temperature"] = 0.9
    out = one.compute_log_prob(batch).batch
    mask = batch.batch["response_mask"].bool()
    torch.testing.assert_close(
        out["old_log_probs"][mask], batch.batch["rollout_log_probs"][mask], rtol=1e-4, atol=1e-4
    )
    assert (out["entropys"][mask] > 0).all()
    found = one.compute_log_prob(batch, with_sum_pi_squared=True).batch["sum_pi_squared"][mask]
    assert ((found > 0) & (found <= 1)).all()


def test_only_verls_face_reads_a_temperature_from_the_batch(worker):
    one = worker()
    batch = one.generate_sequences(prompts())
    batch.meta_info["temperature"] = 0.3

    def log_probs(out):
        return out.batch["old_log_probs"]

    own = log_probs(one.actor.compute_log_prob(batch))  # rollout.temperature
    assert torch.equal(own, log_probs(one.actor.compute_log_prob(batch, temperature=1.0)))
    face = log_probs(one.compute_log_prob(batch))
    assert torch.equal(face, log_probs(one.actor.compute_log_prob(batch, temperature=0.3)))
    assert not torch.equal(face, own)


class ForeignIds(AgentLoopBase):
    """Answers with an id that no model knows."""

    async def run(self, sampling_params, **row):
        return AgentLoopOutput([0], [10**9], [1])


def test_ids_the_model_does_not_know_name_the_loop(worker):
    one = worker(f"actor_rollout_ref.rollout.agent.default_agent_loop='{__file__}:ForeignIds'")
    last = one.actor.engine.facts.vocabulary - 1
    with pytest.raises(AgentLoopFailed, match=f"ForeignIds.* the model knows 0 to {last}$"):
        one.generate_sequences(prompts())


class SeveralRows(AgentLoopBase):
    async def run(self, sampling_params, **row):
        return [AgentLoopOutput([0], [1], [1]), AgentLoopOutput([0], [1], [1])]


def test_a_loop_of_several_rows_is_refused(worker):
    one = worker(f"actor_rollout_ref.rollout.agent.default_agent_loop='{__file__}:SeveralRows'")
    with pytest.raises(ValueError, match="one row per prompt row"):
        one.generate_sequences(prompts())


def test_what_ranks_generate_is_joined_as_one_would_have_made_it(monkeypatch):
    """Of several ranks with one model, the first has the batch."""
    assert actor_rollout_ref.join_ranks is join_ranks
    monkeypatch.setattr(actor_rollout_ref, "join_ranks", lambda group, results: results)
    collect = method_spec(ActorRolloutRefWorker.generate_sequences).dispatch_mode.collect_fn
    meshes = {actor_rollout_ref.ROLLOUT: Mesh((0, 0, 1, 1), (True, False, True, False))}
    assert collect(GroupView(4, meshes), ["a", "", "b", ""]) == ["a", "b"]


def test_the_reference_is_the_policy_as_loaded_and_stays(worker):
    one = worker()
    batch = with_advantages(one.generate_sequences(prompts()))
    before = one.compute_ref_log_prob(batch).batch["ref_log_prob"]
    assert torch.equal(before, one.compute_log_prob(batch).batch["old_log_probs"])
    metrics_of(one, batch)
    assert torch.equal(one.compute_ref_log_prob(batch).batch["ref_log_prob"], before)
    assert not torch.equal(one.compute_log_prob(batch).batch["old_log_probs"], before)


def test_with_lora_the_reference_is_the_actor_with_its_adapters_off(worker):
    one = worker("actor_rollout_ref.model.lora_rank=4")
    assert one.reference is one.actor
    batch = with_advantages(one.generate_sequences(prompts()))
    before = one.compute_ref_log_prob(batch).batch["ref_log_prob"]
    for _ in range(2):
        metrics_of(one, batch)
    torch.testing.assert_close(one.compute_ref_log_prob(batch).batch["ref_log_prob"], before)
    assert (one.compute_log_prob(batch).batch["old_log_probs"] - before).abs().max() > 1e-3


OFFLOAD = [
    f"actor_rollout_ref.{role}.fsdp_config.param_offload=true" for role in ("actor", "ref")
] + ["actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"]


def bytes_held(module):
    return sum(p.untyped_storage().nbytes() for p in module.parameters())


@pytest.mark.parametrize("adapters", [0, 4])
def test_a_worker_that_offloads_walks_the_same_steps(worker, adapters, monkeypatch, tmp_path):
    """The rollout engine decodes with parameters that have been away and back in between."""
    lora = f"actor_rollout_ref.model.lora_rank={adapters}"
    plain = worker(lora)
    monkeypatch.setattr(offload, "ACCELERATORS", {"cpu"})  # the CPU plays the accelerator
    resting = worker(lora, *OFFLOAD)
    for step in range(2):
        batches = [with_advantages(one.generate_sequences(prompts())) for one in (plain, resting)]
        assert torch.equal(*(b.batch["responses"] for b in batches))
        assert torch.equal(*(b.batch["rollout_log_probs"] for b in batches))
        found = [one.compute_ref_log_prob(batches[0]).batch for one in (plain, resting)]
        assert torch.equal(*(f["ref_log_prob"] for f in found))
        assert metrics_of(plain, batches[0]) == metrics_of(resting, batches[0])
        assert bytes_held(resting.actor.engine.module) == 0
        assert (
            resting.reference is resting.actor or bytes_held(resting.reference.engine.module) == 0
        )
        resting.save_checkpoint(str(tmp_path / str(step)))
    assert all(torch.equal(weights(resting)[n], x) for n, x in weights(plain).items())
    again = worker(lora, *OFFLOAD)
    again.load_checkpoint(str(tmp_path / "1"))
    batch = with_advantages(plain.generate_sequences(prompts()))
    assert metrics_of(again, batch) == metrics_of(plain, batch)


def test_an_update_moves_weights_and_version_and_the_rollout_sees_both(worker):
    one = worker()
    batch = with_advantages(one.generate_sequences(prompts()))
    assert {v for row in batch.non_tensor_batch["versions"] for v in row} == {0}
    before = weights(one)
    metrics = metrics_of(one, batch)
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/lr"] == 1e-2
    assert metrics["actor/skipped_updates"] == 0
    assert one.version() == 1
    assert any(not torch.equal(weights(one)[n], x) for n, x in before.items())
    again = one.generate_sequences(prompts())
    assert {v for row in again.non_tensor_batch["versions"] for v in row} == {1}
    again.meta_info["temperature"] = 0.9
    mask = again.batch["response_mask"].bool()
    torch.testing.assert_close(
        one.compute_log_prob(again).batch["old_log_probs"][mask],
        again.batch["rollout_log_probs"][mask],
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize(
    "cut",
    [
        ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"],
        ["actor_rollout_ref.actor.ppo_micro_batch_size=3"],
        [
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20",
        ],
        ["actor_rollout_ref.model.enable_gradient_checkpointing=true"],
    ],
)
def test_settings_of_memory_do_not_change_the_update(worker, cut):
    plain, other = worker(), worker(*cut)
    recomputes = "gradient_checkpointing" in cut[0]
    assert other.actor.engine.module.lm.is_gradient_checkpointing == recomputes
    batch = with_advantages(plain.generate_sequences(prompts()))
    expected, found = metrics_of(plain, batch), metrics_of(other, batch)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for n, x in weights(plain).items():
        # AdamW's first step is the sign of the gradient: rounding may turn entries near zero.
        assert (weights(other)[n] - x).abs().mean() < 1e-4, n


def test_a_micro_batch_size_over_all_ranks_is_not_ignored(worker):
    one = worker("actor_rollout_ref.actor.ppo_micro_batch_size=3")
    assert one.actor.engine._train_rule.rows == 3
    assert worker().actor.engine._train_rule.rows is None


def test_mini_batches_and_epochs_make_updates(worker):
    one = worker(
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_epochs=3"
    )
    batch = with_advantages(one.generate_sequences(prompts()))
    batch = batch.union(one.compute_log_prob(batch))
    metrics_of(one, batch)
    assert (
        one.actor.engine.optimizer.updates == 6
    )  # 4 prompts × 2 rows in updates of 2 × 2, 3 times
    assert one.actor.engine.optimizer.schedule_step == 1


@pytest.mark.parametrize("lora", [0, 4])
def test_a_checkpoint_continues_and_its_export_opens(worker, model, tmp_path, lora):
    change = f"actor_rollout_ref.model.lora_rank={lora}"
    one, other = worker(change), worker(change)
    batch = with_advantages(one.generate_sequences(prompts()))
    metrics_of(one, batch)
    one.save_checkpoint(str(tmp_path))
    expected = metrics_of(one, batch)
    other.load_checkpoint(str(tmp_path))
    assert other.version() == 1
    assert metrics_of(other, batch) == expected
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    start = AutoModelForCausalLM.from_pretrained(model)
    assert opened.config.hidden_size == 32
    assert not torch.equal(
        opened.model.layers[0].mlp.up_proj.weight, start.model.layers[0].mlp.up_proj.weight
    )
    assert (tmp_path / "lora_adapter").is_dir() == bool(lora)


def test_a_checkpoint_holds_what_was_asked_for(worker, tmp_path):
    one = worker("actor_rollout_ref.actor.checkpoint.save_contents=[model]")
    batch = with_advantages(one.generate_sequences(prompts()))
    metrics_of(one, batch)
    one.save_checkpoint(str(tmp_path))
    assert not (tmp_path / "huggingface").exists()
    other = worker()
    other.load_checkpoint(str(tmp_path))
    assert all(torch.equal(weights(other)[n], x) for n, x in weights(one).items())
    assert other.version() == 0


def test_a_role_of_reference_alone_has_no_actor(worker):
    one = worker(role="ref")
    assert not hasattr(one, "engine")
    batch = with_advantages(worker().generate_sequences(prompts()))
    assert one.compute_ref_log_prob(batch).batch["ref_log_prob"].shape == (
        batch.batch["responses"].shape
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_walk_the_steps_of_one(model, tmp_path):
    """Sharded: the native engine decodes with gathered parameters, each rank its own prompts."""
    mp.spawn(run_rank, (2, free_port(), str(model), str(tmp_path)), nprocs=2)
    found = [torch.load(tmp_path / f"rank{r}.pt", weights_only=False) for r in range(2)]
    for name, overrides in TWO_RANK_RUNS.items():
        expected = walk(Placement(), model, tmp_path / f"one-{name}", overrides)
        first, second = (f[name] for f in found)
        steps = [
            first["tokens"][:4] + second["tokens"][:4],
            first["tokens"][4:] + second["tokens"][4:],
        ]
        assert steps[0] + steps[1] == expected["tokens"]
        for mine, wanted in zip(first["metrics"], expected["metrics"], strict=True):
            assert mine == pytest.approx(wanted, rel=1e-3, abs=1e-5)
        for n, x in expected["weights"].items():
            torch.testing.assert_close(first["weights"][n], x, rtol=1e-4, atol=1e-5)
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "huggingface")
