"""ActorRolloutRefWorker: generate, log-probs, reference, update, checkpoint."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM

from hone.agents.collate import collate_outputs
from hone.agents.contract import AgentLoopBase, AgentLoopOutput
from hone.agents.groups import GroupRequest
from hone.agents.joining import join_ranks
from hone.agents.runner import AgentLoopFailed
from hone.controller.contract import GroupView, Mesh
from hone.controller.decorator import method_spec
from hone.controller.worker import Placement, free_port
from hone.engine import offload
from hone.protocol import DataProto
from hone.protocol.rows import row_dicts
from hone.verl import actor_rollout_ref
from hone.verl.actor_rollout_ref import ActorRolloutRefWorker, add_verl_columns
from tests.workers.ranks import TWO_RANK_RUNS, metrics_of, run_rank, run_steps, weights
from tests.workers.tasks import RESPONSE, config_of, prompts, with_advantages, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_worker(model):
    workers = []

    def build(*overrides, role="actor_rollout_ref"):
        worker = ActorRolloutRefWorker(config_of(model, *overrides), role)
        worker.init_model()
        workers.append(worker)
        return worker

    yield build
    for worker in workers:
        worker.close()


def test_rollout_log_probs_equal_the_trainers(make_worker):
    worker = make_worker()
    batch = worker.generate_sequences(prompts())
    assert batch.batch["responses"].shape[0] == 8
    assert batch.batch["responses"].shape[1] <= RESPONSE
    batch.meta_info["temperature"] = 0.9
    out = worker.compute_log_prob(batch).batch
    mask = batch.batch["response_mask"].bool()
    torch.testing.assert_close(
        out["old_log_probs"][mask], batch.batch["rollout_log_probs"][mask], rtol=1e-4, atol=1e-4
    )
    assert (out["entropys"][mask] > 0).all()
    actual = worker.compute_log_prob(batch, with_sum_pi_squared=True).batch["sum_pi_squared"][mask]
    assert ((actual > 0) & (actual <= 1)).all()


def test_only_the_verl_worker_reads_the_temperature_of_the_batch(make_worker):
    worker = make_worker()
    batch = worker.generate_sequences(prompts())
    batch.meta_info["temperature"] = 0.3

    def log_probs(out):
        return out.batch["old_log_probs"]

    default = log_probs(worker.actor.compute_log_prob(batch))  # rollout.temperature
    assert torch.equal(default, log_probs(worker.actor.compute_log_prob(batch, temperature=1.0)))
    from_batch = log_probs(worker.compute_log_prob(batch))
    assert torch.equal(from_batch, log_probs(worker.actor.compute_log_prob(batch, temperature=0.3)))
    assert not torch.equal(from_batch, default)


def test_generate_sequences_leaves_the_groups_of_a_trainer_alone(make_worker):
    worker = make_worker()
    (row, *_) = row_dicts(prompts().non_tensor_batch)
    row |= {"uid": "u", "sample_index": 0, "trajectory_id": "u-0", "raw_prompt": "ab"}
    request = GroupRequest(5, (row,), ({"temperature": 1.0},))
    worker.submit([request])
    assert len(worker.generate_sequences(prompts())) == 8
    (group,) = worker.pop_finished_groups(None, 0.0).groups
    assert (group.number, len(group.outputs)) == (5, 1)


class ForeignIds(AgentLoopBase):
    """Returns an id outside the vocabulary."""

    async def run(self, sampling_params, **row):
        return AgentLoopOutput([0], [10**9], [1])


def test_the_error_of_ids_outside_the_vocabulary_names_the_loop(make_worker):
    worker = make_worker(
        f"actor_rollout_ref.rollout.agent.default_agent_loop='{__file__}:ForeignIds'"
    )
    last = worker.actor.engine.model_facts.vocab_size - 1
    with pytest.raises(AgentLoopFailed, match=f"ForeignIds.* the model knows 0 to {last}$"):
        worker.generate_sequences(prompts())


class SeveralRows(AgentLoopBase):
    async def run(self, sampling_params, **row):
        return [AgentLoopOutput([0], [1], [1]), AgentLoopOutput([0], [1], [1])]


def test_a_loop_that_returns_several_rows_is_refused(make_worker):
    worker = make_worker(
        f"actor_rollout_ref.rollout.agent.default_agent_loop='{__file__}:SeveralRows'"
    )
    with pytest.raises(ValueError, match="one row per prompt row"):
        worker.generate_sequences(prompts())


@pytest.mark.parametrize("mask_width", [3, 4, 6])
def test_prompt_tokens_are_those_of_a_narrower_or_wider_attention_mask(mask_width):
    mask = torch.ones(1, mask_width, dtype=torch.int64)
    mask[0, 0] = 0
    batch = DataProto.from_dict({"input_ids": torch.arange(4)[None], "attention_mask": mask})
    rows = actor_rollout_ref.with_row_ids(batch)
    assert list(rows.non_tensor_batch["prompt_ids"][0]) == list(range(1, min(mask_width, 4)))


def test_the_batches_of_leading_ranks_are_joined(monkeypatch):
    """Of the ranks that share one model, only the first has a batch."""
    assert actor_rollout_ref.join_ranks is join_ranks
    monkeypatch.setattr(actor_rollout_ref, "join_ranks", lambda group, results: results)
    collect = method_spec(ActorRolloutRefWorker.generate_sequences).dispatch_mode.collect_fn
    meshes = {actor_rollout_ref.ROLLOUT_MESH: Mesh((0, 0, 1, 1), (True, False, True, False))}
    assert collect(GroupView(4, meshes), ["a", "", "b", ""]) == ["a", "b"]


def test_the_reference_is_the_initial_policy_and_does_not_change(make_worker):
    worker = make_worker()
    batch = with_advantages(worker.generate_sequences(prompts()))
    before = worker.compute_ref_log_prob(batch).batch["ref_log_prob"]
    assert torch.equal(before, worker.compute_log_prob(batch).batch["old_log_probs"])
    metrics_of(worker, batch)
    assert torch.equal(worker.compute_ref_log_prob(batch).batch["ref_log_prob"], before)
    assert not torch.equal(worker.compute_log_prob(batch).batch["old_log_probs"], before)


def test_with_lora_the_reference_is_the_actor_with_disabled_adapters(make_worker):
    worker = make_worker("actor_rollout_ref.model.lora_rank=4")
    assert worker.reference is worker.actor
    batch = with_advantages(worker.generate_sequences(prompts()))
    before = worker.compute_ref_log_prob(batch).batch["ref_log_prob"]
    for _ in range(2):
        metrics_of(worker, batch)
    torch.testing.assert_close(worker.compute_ref_log_prob(batch).batch["ref_log_prob"], before)
    assert (worker.compute_log_prob(batch).batch["old_log_probs"] - before).abs().max() > 1e-3


OFFLOAD = [
    f"actor_rollout_ref.{role}.fsdp_config.param_offload=true" for role in ("actor", "ref")
] + ["actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"]


def storage_bytes(module):
    return sum(p.untyped_storage().nbytes() for p in module.parameters())


@pytest.mark.parametrize("adapters", [0, 4])
def test_a_worker_with_offload_computes_the_same_steps(
    make_worker, adapters, monkeypatch, tmp_path
):
    """The rollout engine decodes with parameters that were offloaded in between."""
    lora = f"actor_rollout_ref.model.lora_rank={adapters}"
    plain = make_worker(lora)
    monkeypatch.setattr(offload, "ACCELERATORS", {"cpu"})  # the CPU stands for the accelerator
    offloaded = make_worker(lora, *OFFLOAD)
    for step in range(2):
        batches = [
            with_advantages(worker.generate_sequences(prompts())) for worker in (plain, offloaded)
        ]
        assert torch.equal(*(b.batch["responses"] for b in batches))
        assert torch.equal(*(b.batch["rollout_log_probs"] for b in batches))
        actual = [worker.compute_ref_log_prob(batches[0]).batch for worker in (plain, offloaded)]
        assert torch.equal(*(f["ref_log_prob"] for f in actual))
        assert metrics_of(plain, batches[0]) == metrics_of(offloaded, batches[0])
        assert storage_bytes(offloaded.actor.engine.module) == 0
        assert (
            offloaded.reference is offloaded.actor
            or storage_bytes(offloaded.reference.engine.module) == 0
        )
        offloaded.save_checkpoint(str(tmp_path / str(step)))
    assert all(torch.equal(weights(offloaded)[n], x) for n, x in weights(plain).items())
    again = make_worker(lora, *OFFLOAD)
    again.load_checkpoint(str(tmp_path / "1"))
    batch = with_advantages(plain.generate_sequences(prompts()))
    assert metrics_of(again, batch) == metrics_of(plain, batch)


def test_an_update_changes_weights_and_version_in_trainer_and_rollout(make_worker):
    worker = make_worker()
    batch = with_advantages(worker.generate_sequences(prompts()))
    assert {v for row in batch.non_tensor_batch["versions"] for v in row} == {0}
    before = weights(worker)
    metrics = metrics_of(worker, batch)
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/lr"] == 1e-2
    assert metrics["actor/skipped_updates"] == 0
    assert worker.version() == 1
    assert any(not torch.equal(weights(worker)[n], x) for n, x in before.items())
    again = worker.generate_sequences(prompts())
    assert {v for row in again.non_tensor_batch["versions"] for v in row} == {1}
    again.meta_info["temperature"] = 0.9
    mask = again.batch["response_mask"].bool()
    torch.testing.assert_close(
        worker.compute_log_prob(again).batch["old_log_probs"][mask],
        again.batch["rollout_log_probs"][mask],
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize(
    "settings",
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
def test_memory_settings_do_not_change_the_update(make_worker, settings):
    plain, other = make_worker(), make_worker(*settings)
    recomputes = "gradient_checkpointing" in settings[0]
    assert other.actor.engine.module.lm.is_gradient_checkpointing == recomputes
    batch = with_advantages(plain.generate_sequences(prompts()))
    expected, actual = metrics_of(plain, batch), metrics_of(other, batch)
    assert actual == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for n, x in weights(plain).items():
        # AdamW's first step is the sign of the gradient, which rounding may flip near zero.
        assert (weights(other)[n] - x).abs().mean() < 1e-4, n


def test_a_micro_batch_size_over_all_ranks_is_not_ignored(make_worker):
    worker = make_worker("actor_rollout_ref.actor.ppo_micro_batch_size=3")
    assert worker.actor.engine._train_micro_batch_rule.rows == 3
    assert make_worker().actor.engine._train_micro_batch_rule.rows is None


def test_the_number_of_updates_is_mini_batches_times_epochs(make_worker):
    worker = make_worker(
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_epochs=3"
    )
    batch = with_advantages(worker.generate_sequences(prompts()))
    batch = batch.union(worker.compute_log_prob(batch))
    metrics_of(worker, batch)
    assert (
        worker.actor.engine.optimizer.updates == 6
    )  # 4 prompts × 2 rows in updates of 2 × 2, 3 times
    assert worker.actor.engine.optimizer.schedule_step == 1


@pytest.mark.parametrize("lora", [0, 4])
def test_a_checkpoint_resumes_and_its_export_loads(make_worker, model, tmp_path, lora):
    change = f"actor_rollout_ref.model.lora_rank={lora}"
    worker, other = make_worker(change), make_worker(change)
    batch = with_advantages(worker.generate_sequences(prompts()))
    metrics_of(worker, batch)
    worker.save_checkpoint(str(tmp_path))
    expected = metrics_of(worker, batch)
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


def test_a_checkpoint_has_only_the_configured_contents(make_worker, tmp_path):
    worker = make_worker("actor_rollout_ref.actor.checkpoint.save_contents=[model]")
    batch = with_advantages(worker.generate_sequences(prompts()))
    metrics_of(worker, batch)
    worker.save_checkpoint(str(tmp_path))
    assert not (tmp_path / "huggingface").exists()
    other = make_worker()
    other.load_checkpoint(str(tmp_path))
    assert all(torch.equal(weights(other)[n], x) for n, x in weights(worker).items())
    assert other.version() == 0


def test_the_role_ref_has_no_actor(make_worker):
    worker = make_worker(role="ref")
    assert not hasattr(worker, "engine")
    batch = with_advantages(make_worker().generate_sequences(prompts()))
    assert worker.compute_ref_log_prob(batch).batch["ref_log_prob"].shape == (
        batch.batch["responses"].shape
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_compute_the_steps_of_one(model, tmp_path):
    """The native engine decodes with gathered parameters; each rank has its own prompts."""
    mp.spawn(run_rank, (2, free_port(), str(model), str(tmp_path)), nprocs=2)
    actual = [torch.load(tmp_path / f"rank{r}.pt", weights_only=False) for r in range(2)]
    for name, overrides in TWO_RANK_RUNS.items():
        expected = run_steps(Placement(), model, tmp_path / f"worker-{name}", overrides)
        first, second = (f[name] for f in actual)
        steps = [
            first["tokens"][:4] + second["tokens"][:4],
            first["tokens"][4:] + second["tokens"][4:],
        ]
        assert steps[0] + steps[1] == expected["tokens"]
        for metrics, expected_metrics in zip(first["metrics"], expected["metrics"], strict=True):
            assert metrics == pytest.approx(expected_metrics, rel=1e-3, abs=1e-5)
        for n, x in expected["weights"].items():
            torch.testing.assert_close(first["weights"][n], x, rtol=1e-4, atol=1e-5)
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "huggingface")


def test_loops_written_for_verl_find_ids_positions_and_the_loops_score() -> None:
    batch = collate_outputs(
        [AgentLoopOutput([10], [20, 21], [1, 1], reward_score=0.5)], pad_token_id=99
    )
    assert not {"input_ids", "position_ids", "rm_scores"} & set(batch.column_names())
    columns = add_verl_columns(batch).batch
    assert columns["input_ids"].tolist() == [[10, 20, 21]]
    assert columns["position_ids"].tolist() == [[0, 1, 2]]
    assert columns["rm_scores"].tolist() == [[0.0, 0.5]]
