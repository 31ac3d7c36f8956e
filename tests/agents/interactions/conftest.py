"""A fixture that runs one row through the tool loop with an interaction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone.protocol import DataProto
from hone.rollout.scripted import ScriptedRollout


@pytest.fixture
def run_row(
    runner: Callable[..., Any], rows: Callable[..., DataProto], tokenizer: Any, tmp_path: Path
) -> Callable[..., Any]:
    def run(
        listed: str, lines: list[str], *overrides: str, prompt: Any = None, **kwargs: Any
    ) -> tuple[str, str, dict[str, Any]]:
        (tmp_path / "envs.yaml").write_text(f"interaction:\n{listed}")
        batch = runner(
            ScriptedRollout(lines, tokenizer=tokenizer),
            "data.prompt_format=chat",
            "data.max_response_length=900",
            "data.max_prompt_length=2000",
            "actor_rollout_ref.rollout.multi_turn.enable=true",
            f"actor_rollout_ref.rollout.multi_turn.interaction_config_path={tmp_path / 'envs.yaml'}",
            *overrides,
        ).run(rows([prompt or [{"role": "user", "content": "Guess"}]], interaction_kwargs=[kwargs]))
        fields = {name: column[0] for name, column in batch.non_tensor_batch.items()}
        prompt, response = (tokenizer.decode(batch.batch[n][0]) for n in ("prompts", "responses"))
        return prompt, response, fields

    return run
