"""Several ranks equal one rank: updates, inference, decoding, checkpoints, exports."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hone.config.actor import CriticConfig
from hone.engine.sharding import decoder_layers, join_group
from hone.models.policy import hidden_states
from hone.models.tiny import tiny_lm
from hone.ops.attention import SegmentLayout
from hone.workers.critic import ValueObjective
from tests.engine import ranks
from tests.engine.batches import VOCABULARY, pack_batch, rows
from tests.engine.engines import ADAM, actor, critic, make_engine, policy, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    one = ranks.checkpoints(0, 1, folder)  # what the ranks load
    names = list(ranks.SCENARIOS)
    actual = ranks.spawn(names, 2, folder)
    return {name: [r[name] for r in actual] for name in names} | {"one": one, "folder": folder}


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    names = ["shapes", "infer"]
    actual = ranks.spawn(names, 4, folder)
    return {name: [r[name] for r in actual] for name in names}


def assert_update_equal(actual, expected, rel=1e-5):
    metrics, after = actual
    reference, expected_weights = expected
    assert set(metrics) == set(reference)
    for name, value in reference.items():
        assert metrics[name] == pytest.approx(value, rel=rel, abs=1e-6), name
    for name, tensor in expected_weights.items():
        # A bias of the keys shifts all scores of a query equally, so its true gradient is zero, and Adam
        # amplifies the rounding noise.
        if not name.endswith("k_proj.bias"):
            torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize("name", list(ranks.laws()))
def test_two_ranks_keep_the_normalisation_law(two, name):
    expected = ranks.update(make_engine(policy()), rows(), ranks.laws()[name])
    for actual in two["law"]:
        assert_update_equal(actual[name], expected)


SHAPES = ["keep gathered", "offload", "copies", "padded rows", "rows on one rank"]
SHAPES += ["gradient checkpointing", "clipped", "offloaded"]


def expected_shape(name):
    clip = 0.01 if name == "clipped" else 0.0
    return ranks.update(make_engine(policy(), grad_clip=clip), rows(), actor("kl_cov"))


@pytest.mark.parametrize("name", SHAPES)
def test_two_ranks_compute_the_update_of_one_under_every_sharding_and_offload(two, name):
    for actual in two["shapes"]:
        assert_update_equal(actual[name], expected_shape(name))


@pytest.mark.parametrize("name", SHAPES)
def test_four_ranks_compute_the_update_of_one(four, name):
    """With four ranks, `copies` is HSDP: two copies of the model over two ranks each."""
    for actual in four["shapes"]:
        assert_update_equal(actual[name], expected_shape(name))


@pytest.mark.parametrize("group", ["two", "four"])
def test_inference_is_that_of_one_rank(group, request):
    actual = request.getfixturevalue(group)["infer"]
    expected = make_engine(policy()).infer(rows(), temperature=0.7, with_entropy=True)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            torch.cat([f[name] for f in actual]), tensor, rtol=1e-5, atol=1e-6
        )


def test_the_critic_shards_too(two):
    engine = make_engine(critic())
    config = CriticConfig(loss_agg_mode="token-mean", loss_scale_factor=None)
    metrics = engine.train_minibatch(rows(), ValueObjective(config))
    after = weights(engine)
    for actual_metrics, _, actual_weights in two["values"]:
        assert actual_metrics == pytest.approx(metrics, rel=1e-5)
        for name, tensor in after.items():
            difference = (actual_weights[name] - tensor).norm()
            assert difference < 1e-5 * tensor.norm() + 1e-6, name


@pytest.mark.parametrize("moment", ["first", "after an update"])
def test_every_rank_decodes_its_own_number_of_steps_with_full_parameters(two, moment):
    model = policy()
    if moment == "after an update":
        ranks.update(make_engine(model), rows(), actor())
    with torch.inference_mode():
        expected = model.logits(hidden_states(model.decoder, pack_batch(rows(), True)))
    for actual in two["decode"]:
        is_full, sharded_again, logits = actual[moment]
        assert is_full
        assert sharded_again
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_an_infinite_gradient_on_one_rank_skips_the_update_on_all(two):
    assert two["not_finite"] == [(1.0, True), (1.0, True)]


@pytest.mark.parametrize("name", ["fp32", "bf16", "lora"])
def test_two_ranks_resume_bit_for_bit(two, name):
    for actual in two["checkpoints"]:
        (metrics, after), (resumed_metrics, resumed), _ = actual[name]
        assert resumed_metrics == metrics
        assert all(torch.equal(resumed[n], x) for n, x in after.items())


@pytest.mark.parametrize("name", ["fp32", "lora"])
def test_one_rank_resumes_a_checkpoint_of_two(two, name):
    make = policy if name == "fp32" else ranks.lora_policy
    engine = make_engine(make(), ADAM)
    engine.load(two["folder"] / f"{name}-2")
    assert engine.optimizer.updates == engine.optimizer.schedule_step == 2
    expected = two["checkpoints"][0][name][0]
    assert_update_equal(ranks.update(engine, rows(), actor()), expected, rel=1e-4)


def test_two_ranks_resume_a_checkpoint_of_one(two):
    expected = two["one"]["fp32"][0]
    for actual in two["load_from_one"]:
        assert_update_equal(actual["fp32"][1], expected, rel=1e-4)


def test_every_rank_refuses_another_model_with_the_same_message(two):
    messages = set(two["load_another_model"])
    assert len(messages) == 1
    message = messages.pop()
    assert "it has the additional" in message
    assert "bias (and 5 more)" in message


def test_masters_are_loaded_in_float32_under_another_world_size(two):
    engine = make_engine(policy(dtype=torch.bfloat16), ranks.BF16)
    engine.load(two["folder"] / "bf16-1")
    masters = ranks.full_masters(engine)
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters.values())
    for actual in two["load_from_one"]:
        assert all(torch.equal(actual["bf16"][0][name], m) for name, m in masters.items())
    from_two = make_engine(policy(dtype=torch.bfloat16), ranks.BF16)
    from_two.load(two["folder"] / "bf16-2")
    for name, master in ranks.full_masters(from_two).items():
        assert master.dtype == torch.float32
        torch.testing.assert_close(master, masters[name], rtol=0, atol=5e-4)
        assert not torch.equal(master, ranks.full_masters(make_engine(policy()))[name])


@pytest.mark.parametrize("name", ["plain", "lora"])
def test_the_export_of_two_ranks_has_the_same_logits(two, name):
    model = policy() if name == "plain" else ranks.lora_policy()
    ranks.update(make_engine(model), rows(), actor())
    folder = two["folder"] / f"export-{name}"
    exported = AutoModelForCausalLM.from_pretrained(
        folder / "huggingface", attn_implementation="eager"
    )
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    packed = pack_batch(rows(1), True)
    packed = packed.__class__(
        ids[0], torch.arange(6), SegmentLayout([6], []), *([packed.predicting_position] * 4), (1, 1)
    )
    with torch.no_grad():
        expected = model.logits(hidden_states(model.decoder, packed))
        actual = exported(input_ids=ids).logits[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert (folder / "lora_adapter").is_dir() == (name == "lora")


def test_the_decoder_layers_are_the_list_with_the_most_parameters():
    """They need not be the longest list: a layer may have more experts than the model has layers."""
    block = torch.nn.Linear(4, 4)
    layers = torch.nn.ModuleList(
        [torch.nn.ModuleDict({"experts": torch.nn.ModuleList([block] * 5)}) for _ in range(2)]
    )
    layers.append(torch.nn.Linear(8, 8))
    assert decoder_layers(torch.nn.ModuleDict({"layers": layers})) == list(layers)
    lm = tiny_lm(VOCABULARY)
    assert decoder_layers(lm) == list(lm.model.layers)
    assert decoder_layers(torch.nn.Linear(2, 2)) == []


def test_a_rank_joins_the_group_once_with_the_first_timeout(monkeypatch):
    joined = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "is_initialized", lambda: bool(joined))
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **kw: joined.append((a, kw)))
    join_group(torch.device("cpu"), 77)
    join_group(torch.device("cpu"), 88)
    ((backends,), options), *later = joined
    assert (backends, options["rank"], options["world_size"]) == ("gloo", 1, 2)
    assert options["timeout"] == timedelta(seconds=77)
    assert not later
