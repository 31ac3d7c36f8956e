"""Names of the checkpoint; tests/engine/megatron/test_engine.py resumes checkpoints under other layouts."""

from __future__ import annotations

from types import SimpleNamespace

from hone.engine.megatron.checkpoint import _aliases, _key


def test_names_are_those_of_the_checkpoints_of_fsdp2():
    assert _key("model.norm.weight") == "lm/model/norm/weight"
    assert _key("value_head.bias") == "value_head/bias"
    tied, untied = SimpleNamespace(tied=True), SimpleNamespace(tied=False)
    embedding = "model.embed_tokens.weight"
    assert _aliases(tied, embedding) == ["lm.model.embed_tokens.weight", "lm.lm_head.weight"]
    assert _aliases(untied, embedding) == ["lm.model.embed_tokens.weight"]
