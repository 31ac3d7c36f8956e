"""The policy on packed rows against plain Hugging Face eager attention, one row at a time."""

from __future__ import annotations

import pytest
import torch

from hone.models.policy import PolicyModel, ValueModel, hidden_states, layout_attention
from hone.models.tiny import tiny_lm
from hone.ops.attention import AttentionOptions
from tests.engine.batches import ROWS, VOCABULARY, pack_batch, rows

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma"]


def decoder_of(family, **changes):
    lm = tiny_lm(VOCABULARY, family=family, hidden=32, mlp=48, seed=3)
    for name, value in changes.items():
        setattr(lm.config, name, value)
    # The logits of fresh weights are nearly uniform; larger weights make attention matter.
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return lm


def one_by_one(lm, batch):
    """Returns the hidden states [M, d] that predict each target, by eager attention on single rows."""
    width = batch.batch["prompts"].shape[1]
    states = []
    for i in range(len(batch)):
        real = batch.batch["attention_mask"][i].bool()
        ids = torch.cat([batch.batch["prompts"][i], batch.batch["responses"][i]])[real]
        hidden = lm.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        start = int(real[:width].sum())
        columns = batch.batch["response_mask"][i].nonzero().flatten()
        states.append(hidden[start + columns - 1])
    return torch.cat(states)


def eager(family, **changes):
    lm = decoder_of(family, **changes)
    lm.set_attn_implementation("eager")
    return lm


CASES = [(f, {}) for f in FAMILIES] + [("mistral", {"sliding_window": 3})]
CASES += [("qwen2", {"window": 2})]


def build(family, changes):
    """Returns our model and the eager one; qwen2 reads its window only when it is built."""
    if "window" not in changes:
        return decoder_of(family, **changes), eager(family, **changes)
    models = []
    for name in ("hone", "eager"):
        lm = decoder_of(family)
        config = lm.config
        config.use_sliding_window, config.sliding_window = True, changes["window"]
        config.layer_types = ["full_attention", "sliding_attention"]
        fresh = type(lm)._from_config(config, attn_implementation=name)
        fresh.load_state_dict(lm.state_dict())
        models.append(fresh)
    return models[0], models[1]


def assert_close(actual, expected, name=""):
    """The bound allows for norms and the eager softmax, which round to float32 in any dtype."""
    bound = 1e-5 * float(expected.abs().max())
    assert float((actual - expected).abs().max()) < bound, name


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_packed_equals_one_by_one_forward_and_gradient(family, changes, share):
    ours, plain = (lm.double() for lm in build(family, changes))
    batch = rows()
    packed = pack_batch(batch, share)
    actual = hidden_states(ours.model, packed)[packed.predicting_position]
    expected = one_by_one(plain, batch)
    assert_close(actual, expected)
    gradient = torch.randn(
        expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    (actual * gradient).sum().backward()
    (expected * gradient).sum().backward()
    for (name, x), reference in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if reference.grad is not None:  # an untied head has no gradient
            assert_close(x.grad, reference.grad, name)


def test_a_small_window_changes_the_result():
    """Without this, the windowed cases above would prove nothing."""
    batch = rows()
    wide, narrow = (
        one_by_one(eager("mistral", sliding_window=w).double(), batch) for w in (4096, 3)
    )
    assert (wide - narrow).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_entropy_equal_softmax_of_whole_logits(family):
    batch, temperature = rows(), 0.7
    policy = PolicyModel(decoder_of(family))
    out = policy(pack_batch(batch, True), temperature=temperature, with_entropy=True)
    plain = eager(family).double()
    logits = plain.lm_head(one_by_one(plain, batch)) / temperature
    log_p = torch.log_softmax(logits, -1)
    mask = batch.batch["response_mask"].bool()
    target = batch.batch["responses"][mask]
    expected = log_p.gather(-1, target[:, None])[:, 0]
    torch.testing.assert_close(out["log_probs"][mask].double(), expected, rtol=1e-4, atol=1e-4)
    entropy = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(out["entropy"][mask].double(), entropy, rtol=1e-4, atol=1e-4)
    assert (out["log_probs"][~mask] == 0).all()
    assert (out["entropy"][~mask] == 0).all()


def test_decoding_logits_are_the_logits_of_the_log_probs():
    batch = rows()
    policy = PolicyModel(decoder_of("qwen2"))
    policy._softcap, policy._logit_scale = 5.0, 0.5
    packed = pack_batch(batch, True)
    hidden = hidden_states(policy.decoder, packed)[packed.predicting_position]
    log_p = torch.log_softmax(policy.logits(hidden) / 0.9, -1)
    expected = packed.unpack(log_p.gather(-1, packed.target[:, None])[:, 0])
    actual = policy(packed, temperature=0.9)["log_probs"]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_tool_tokens_are_context_of_later_tokens_but_not_targets():
    """Changing a tool token changes the log-probs of later tokens only."""
    policy = PolicyModel(decoder_of("qwen2"))
    batch, changed = rows(), rows()
    row = 2  # its positions 2 and 3 are tool tokens
    changed.batch["responses"][row, 2] = 39
    before = policy(pack_batch(batch, True), temperature=1.0)["log_probs"]
    after = policy(pack_batch(changed, True), temperature=1.0)["log_probs"]
    others = torch.arange(len(ROWS)) != row
    torch.testing.assert_close(after[others], before[others])
    torch.testing.assert_close(after[row, :3], before[row, :3])
    assert before[row, 2] == before[row, 3] == 0
    assert (after[row, 4:] - before[row, 4:]).abs().min() > 1e-6


def test_the_gradient_at_tool_tokens_is_exactly_zero():
    """The outputs at tokens outside the response mask do not depend on the parameters."""
    policy = PolicyModel(decoder_of("qwen2"))
    batch = rows()
    out = policy(pack_batch(batch, True), temperature=1.0)["log_probs"]
    outside_mask = batch.batch["response_mask"] == 0
    for parameter, grad in zip(
        policy.parameters(),
        torch.autograd.grad(
            (out * outside_mask).sum(), list(policy.parameters()), allow_unused=True
        ),
        strict=True,
    ):
        assert grad is None or (grad == 0).all(), parameter.shape


@pytest.mark.parametrize("share", [False, True])
def test_padding_and_rows_without_targets_cause_no_nan(share):
    policy = PolicyModel(decoder_of("qwen2"))
    batch = rows(prompt_pad=5, response_pad=4)
    batch.batch["response_mask"][:3] = 0
    out = policy(pack_batch(batch, share), temperature=1.0, with_entropy=True)
    (out["log_probs"].sum() + out["entropy"].sum()).backward()
    assert all(torch.isfinite(x).all() for x in out.values())
    assert all(torch.isfinite(p.grad).all() for p in policy.parameters())


def test_a_pack_without_any_target_has_a_gradient_of_zero():
    """A rank without rows runs such a batch to join the collectives."""
    policy = PolicyModel(decoder_of("qwen2"))
    batch = rows(2)
    batch.batch["response_mask"].zero_()
    policy(pack_batch(batch, True), temperature=1.0)["log_probs"].sum().backward()
    assert all((p.grad == 0).all() for p in policy.parameters() if p.grad is not None)
    assert any(p.grad is not None for p in policy.parameters())


def test_values_start_at_zero_and_follow_the_head():
    model = ValueModel(decoder_of("qwen2"))
    batch = rows(response_pad=2)
    packed = pack_batch(batch, True)
    values = model(packed)["values"]
    assert values.shape == batch.batch["responses"].shape
    assert values.dtype == torch.float32
    assert (values == 0).all()
    with torch.no_grad():
        model.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))
        model.value_head.bias.fill_(0.5)
    values = model(packed)["values"]
    hidden = hidden_states(model.decoder, packed)[packed.predicting_position]
    expected = packed.unpack((hidden @ model.value_head.weight[0] + 0.5).float())
    torch.testing.assert_close(values, expected)
    mask = batch.batch["response_mask"].bool()
    assert (values[~mask] == 0).all()
    assert (values[mask] != 0).all()


def test_the_value_model_has_no_lm_head():
    model = ValueModel(decoder_of("qwen2", tie_word_embeddings=False))
    assert model.lm.get_output_embeddings() is None
    assert not any("lm_head" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("share", [False, True])
def test_gradient_checkpointing_changes_neither_values_nor_gradients(share):
    batch = rows()
    results = []
    for checkpointing in (False, True):
        policy = PolicyModel(decoder_of("qwen2"))
        if checkpointing:
            policy.lm.gradient_checkpointing_enable({"use_reentrant": False})
        policy.train()
        out = policy(pack_batch(batch, share), temperature=1.0)["log_probs"]
        out.square().sum().backward()
        results.append([out, *(p.grad for p in policy.parameters())])
    for plain, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-6, atol=1e-7)


class Module(torch.nn.Module):
    layer_idx = 3


class RecordingLayout:
    def attend(self, q, k, v, options):
        self.shapes, self.options = (q.shape, k.shape, v.shape), options
        return q


def call(**options):
    layout = RecordingLayout()
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    out, weights = layout_attention(Module(), q, k, k, None, layout=layout, **options)
    assert weights is None
    assert torch.equal(out, q.transpose(1, 2))
    return layout


def test_tokens_are_the_first_dimension_and_options_name_the_layer():
    layout = call(scaling=0.5, sliding_window=7, dropout=0.1)
    assert layout.shapes == ((5, 4, 8), (5, 2, 8), (5, 2, 8))
    assert layout.options == AttentionOptions(3, 0.5, 7)


def test_a_window_that_the_module_does_not_pass_is_applied():
    class Windowed(Module):
        sliding_window = 4

    layout, q = RecordingLayout(), torch.randn(1, 4, 5, 8)
    layout_attention(Windowed(), q, q, q, None, layout=layout)
    assert layout.options.window == 4
    layout_attention(Windowed(), q, q, q, None, layout=layout, sliding_window=None)
    assert layout.options.window is None


def test_the_scale_defaults_to_one_over_root_of_the_head_width():
    assert call().options.scaling == 8**-0.5


def test_a_call_without_a_layout_is_refused():
    lm = tiny_lm(20, hidden=32)
    with pytest.raises(RuntimeError, match="called without a layout"):
        lm(input_ids=torch.tensor([[1, 2, 3]]))


def test_score_capping_and_sinks_reach_the_layout():
    sinks = torch.zeros(4)
    options = call(softcap=30.0, s_aux=sinks).options
    assert options.softcap == 30.0
    assert options.sinks is sinks


def test_values_narrower_than_keys_are_padded_for_the_cache_and_truncated_after():
    layout = RecordingLayout()
    q, v = torch.randn(1, 4, 5, 8), torch.randn(1, 4, 5, 6)
    out, _ = layout_attention(Module(), q, q, v, None, layout=layout)
    assert layout.shapes == ((5, 4, 8),) * 3
    assert out.shape == (1, 5, 4, 6)
