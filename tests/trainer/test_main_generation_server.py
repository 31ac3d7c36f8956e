"""Generation with the keys of a training run: what `hone generate` is told."""

from __future__ import annotations

import pytest

from hone.config import ConfigError
from hone.trainer import main_generation, main_generation_server
from hone.trainer.command_line import composed_of

COMMAND = [
    'actor_rollout_ref.model.path="models/it\'s here"',
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.temperature=0.6",
    "actor_rollout_ref.rollout.prompt_length=2048",
    "actor_rollout_ref.rollout.response_length=1024",
    "actor_rollout_ref.rollout.n=4",
    "data.train_files=[a.parquet,b.parquet]",
    "data.prompt_key=question",
    "trainer.n_gpus_per_node=1",
]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    words: list[str] = []
    monkeypatch.setattr(main_generation, "main", words.extend)
    return words


def test_the_keys_of_training_say_what_is_generated(told: list[str]) -> None:
    main_generation_server.main([*COMMAND, "+data.output_path=out=1.parquet"])
    config = composed_of(told, tree="generation", program="test").config
    assert config.model.path == "models/it's here"
    assert config.data.path == ("a.parquet", "b.parquet")
    assert (config.data.prompt_key, config.data.n_samples) == ("question", 4)
    assert config.data.output_path == "out=1.parquet"
    assert (config.rollout.temperature, config.rollout.top_k) == (0.6, -1)
    assert (config.rollout.prompt_length, config.rollout.response_length) == (2048, 1024)


def test_a_mistake_is_told_in_the_words_of_training(told: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"rollout has no key 'temperatur'"):
        main_generation_server.main([*COMMAND, "actor_rollout_ref.rollout.temperatur=1"])
    assert not told
