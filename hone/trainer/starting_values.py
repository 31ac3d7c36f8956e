"""Chooses values for the keys that `hone train` was not given, from the model, the data and the device.

`python -m hone.trainer.main_ppo` and a user's YAML (`--config-name`) keep verl's defaults.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hone.algorithms.advantages import estimator_group_use
from hone.config.sources import Setting
from hone.models.facts import model_facts
from hone.plugins import PluginError
from hone.trainer.config_notes import STARTING_VALUES_ORIGIN
from hone.trainer.threads import uses_gpu
from hone.types import JsonValue, Settings

REQUIRED_KEYS = {
    "actor_rollout_ref.model.path": "the model's folder or hub name",
    "data.train_files": "the files to train on",
}
ACTOR_KEY, ROLLOUT_KEY = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RESPONSES_PER_PROMPT = 8
PROMPTS_PER_STEP = {"cuda": 128, "cpu": 16}
MAX_RESPONSE_TOKENS = {"cuda": 1024, "cpu": 128}
LEARNING_RATES = ((1e9, 1e-6), (2e8, 3e-6), (5e7, 1e-5), (5e6, 3e-5), (0, 2e-4))
"""Pairs of a minimum number of parameters and a learning rate; smaller models use larger rates."""


def starting_values(settings: Settings) -> list[Setting]:
    """Returns values for keys that the user did not set; `settings` has the user's values by dotted key."""
    device = "cuda" if uses_gpu(settings.get("trainer.device", "auto")) else "cpu"
    model = model_facts(settings.get("actor_rollout_ref.model.path"))
    values: dict[str, Any] = {"data.val_files": [], "algorithm.adv_estimator": "grpo"}
    # An estimator that does not compare groups needs only one response per prompt.
    if _is_group_relative(settings.get("algorithm.adv_estimator", "grpo")):
        values[f"{ROLLOUT_KEY}.n"] = RESPONSES_PER_PROMPT
    files = settings.get("data.train_files")
    num_rows = _count_rows([files] if isinstance(files, str) else list(files or ()))
    # A power of two, no larger than the data set.
    batch_size = 2 ** int(math.log2(max(1, min(PROMPTS_PER_STEP[device], num_rows))))
    values["data.train_batch_size"] = batch_size
    values[f"{ACTOR_KEY}.ppo_mini_batch_size"] = settings.get("data.train_batch_size", batch_size)
    values |= _length_settings(settings, device, model.max_position_embeddings)
    if model.parameters is not None:
        num_parameters = model.parameters
        values[f"{ACTOR_KEY}.optim.lr"] = next(
            learning_rate
            for min_parameters, learning_rate in LEARNING_RATES
            if num_parameters >= min_parameters
        )
    return [
        Setting(key, value, STARTING_VALUES_ORIGIN)
        for key, value in values.items()
        if key not in settings
    ]


def _is_group_relative(estimator: JsonValue) -> bool:
    try:
        return estimator_group_use(str(estimator)) != "ignored"
    except PluginError:  # an unknown name is reported later
        return True


def _count_rows(files: Sequence[str]) -> int:
    """Returns the number of rows in the files.

    If there are no rows, or a file is unreadable, returns the largest default batch size; the data set
    reports the error later.
    """
    import pyarrow.lib
    import pyarrow.parquet as pq

    total = 0
    for name in files:
        path = Path(name).expanduser()
        try:
            if path.suffix == ".parquet":
                total += pq.read_metadata(path).num_rows
            else:
                with path.open("rb") as lines:
                    total += sum(1 for line in lines if line.strip())
        except (OSError, pyarrow.lib.ArrowInvalid):
            return max(PROMPTS_PER_STEP.values())
    return total or max(PROMPTS_PER_STEP.values())


def _length_settings(settings: Settings, device: str, max_length: int | None) -> dict[str, int]:
    """Returns prompt and response lengths for this device that fit the model's maximum length."""
    prompt_tokens = settings.get("data.max_prompt_length")
    response_tokens = MAX_RESPONSE_TOKENS[device]
    if max_length:
        max_response_tokens = max_length - prompt_tokens if prompt_tokens else max_length // 2
        response_tokens = min(response_tokens, max_response_tokens)
    lengths = {"data.max_response_length": max(1, response_tokens)}
    if max_length and prompt_tokens is None:
        prompt_tokens = max_length - settings.get("data.max_response_length", response_tokens)
        if prompt_tokens < 1:  # the checks of the prompts report the response length
            prompt_tokens = max_length
        lengths["data.max_prompt_length"] = min(512, prompt_tokens)
    return lengths
