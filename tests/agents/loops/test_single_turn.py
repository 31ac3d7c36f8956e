"""The default loop with a scripted engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hone.rollout.scripted import ScriptedRollout


def test_a_response_ends_where_the_model_length_ends(
    runner: Callable[..., Any], rows: Any, tokenizer: Any
) -> None:
    engine = ScriptedRollout(["x" * 12], tokenizer=tokenizer)
    batch = runner(engine, "actor_rollout_ref.rollout.max_model_len=17").run(rows(["1+1=23456789"]))
    prompt = len(batch.batch["prompts"][0])
    assert tokenizer.decode(batch.batch["responses"][0]) == "x" * (17 - prompt)
    assert batch.non_tensor_batch["stop_reason"][0] == "length"
