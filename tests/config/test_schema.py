"""The schema as a whole: defaults, verl's keys, derived quantities, cost of importing."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import pytest

from hone.config import ConfigError, PPOTrainerConfig, config_to_dict
from hone.config.apply import compose_settings
from hone.config.errors import ConfigError as SameError
from hone.config.keys import leaves as keys_of
from hone.config.sources import Setting
from hone.config.trees import TREES
from hone.verl.dialect import VERL_KEYS, load_config

from .verl_keys import NEWER_KEYS, VERL_TREE, leaves

VERL = [*leaves(VERL_TREE), *NEWER_KEYS.items()]


def problems_of(settings: list[Setting]) -> list[str]:
    try:
        compose_settings(TREES["ppo_trainer"], settings, dialect=VERL_KEYS)
    except ConfigError as error:
        return error.problems
    return []


def test_verls_tree_is_about_as_large_as_the_real_one() -> None:
    assert len(list(leaves(VERL_TREE))) > 500


def test_no_default_of_verl_is_refused() -> None:
    assert problems_of([Setting(key, value, "verl.yaml") for key, value in VERL]) == []


def test_every_key_of_verl_is_known_on_the_command_line() -> None:
    problems = problems_of([Setting(key, value, "command line") for key, value in VERL])
    assert [p for p in problems if "has no key" in p or "expected" in p] == []


@pytest.mark.parametrize("name", sorted(TREES))
def test_every_default_may_be_written_out(name: str) -> None:
    tree = TREES[name]
    settings = [
        Setting(info.key, info.default, "file.yaml") for info in keys_of(tree.root).values()
    ]
    assert (
        compose_settings(tree, settings, dialect=VERL_KEYS).config
        == compose_settings(tree, []).config
    )


@pytest.mark.parametrize("name", sorted(TREES))
def test_every_key_has_a_docstring(name: str) -> None:
    for info in keys_of(TREES[name].root).values():
        assert info.doc.endswith((".", "…")), info.key


@pytest.mark.parametrize("name", sorted(TREES))
def test_every_block_has_a_docstring(name: str) -> None:
    def walk(cls: type) -> None:
        assert cls.__doc__
        assert not cls.__doc__.startswith(cls.__name__ + "("), cls
        for field in dataclasses.fields(cls):
            if dataclasses.is_dataclass(field.default_factory):
                walk(field.default_factory)  # type: ignore[arg-type]

    walk(TREES[name].root)


def test_a_config_is_frozen() -> None:
    config = load_config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.trainer.seed = 2  # type: ignore[misc]


def test_a_config_survives_pickling() -> None:
    config = load_config(["trainer.seed=7"])
    assert pickle.loads(pickle.dumps(config)) == config


def test_an_error_survives_pickling_with_its_problems() -> None:
    error = pickle.loads(pickle.dumps(SameError(["one", "two"])))
    assert error.problems == ["one", "two"]
    assert str(error) == "2 problems\n- one\n- two"


def test_a_plain_dict_of_a_config_loads_back_to_the_same_config() -> None:
    config = load_config(["trainer.seed=7", "data.train_files=[a,b]"])
    settings = [Setting(k, v, "resolved.yaml") for k, v in leaves(config_to_dict(config))]
    assert compose_settings(TREES["ppo_trainer"], settings, dialect=VERL_KEYS).config == config


def test_defaults_start_on_the_machine_at_hand() -> None:
    config = load_config()
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.world_size) == (1, 1, 1)
    assert config.trainer.device == "auto"
    assert config.trainer.logger == ("console", "jsonl")
    assert config.resolved_controller == "local"
    assert config.actor_rollout_ref.rollout.name == "native"


def test_batch_sizes_derive_in_sequences_and_updates() -> None:
    config = load_config(
        [
            "data.train_batch_size=64",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "actor_rollout_ref.actor.ppo_epochs=2",
        ]
    )
    actor = config.actor_rollout_ref.actor
    assert actor.sequences_per_update == 128
    assert config.critic.sequences_per_update == 128


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], None),
        (["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"], 4),
        (["actor_rollout_ref.actor.ppo_micro_batch_size=8"], 4),
        (["actor_rollout_ref.actor.ppo_micro_batch_size=1"], 1),
        (
            [
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
                "actor_rollout_ref.actor.use_dynamic_bsz=true",
            ],
            None,
        ),
    ],
)
def test_micro_batches_are_formed_by_tokens_unless_a_size_is_set(
    overrides: list[str], expected: int | None
) -> None:
    actor = load_config(overrides).actor_rollout_ref.actor
    assert actor.sequences_per_micro_batch(2, "ppo_") == expected


def test_other_passes_follow_the_actor_budget_and_their_own_size() -> None:
    config = load_config(
        [
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=3",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size=6",
            "critic.ppo_micro_batch_size_per_gpu=5",
            "reward_model.micro_batch_size_per_gpu=7",
        ]
    )
    policy = config.actor_rollout_ref
    assert policy.ref.log_prob_max_token_len_per_gpu == 4096
    assert policy.ref.sequences_per_micro_batch(2, "log_prob_") == 3
    assert policy.rollout.sequences_per_micro_batch(2, "log_prob_") == 3
    assert config.critic.sequences_per_micro_batch(2, "ppo_") == 5
    assert config.critic.sequences_per_micro_batch(2, "forward_") == 5
    assert config.reward_model.sequences_per_micro_batch(2) == 7


def test_small_batches_shrink_the_default_mini_batch() -> None:
    small = load_config(["data.train_batch_size=16"])
    assert small.actor_rollout_ref.actor.ppo_mini_batch_size == 16
    assert small.critic.ppo_mini_batch_size == 16
    assert load_config().actor_rollout_ref.actor.ppo_mini_batch_size == 256


def test_longest_sequence_and_generation_round_derive() -> None:
    config = load_config(["data.max_prompt_length=100", "data.max_response_length=50"])
    assert config.actor_rollout_ref.rollout.max_total_tokens == 150
    assert config.data.prompts_per_generation == 1024
    assert not config.actor_rollout_ref.model.uses_lora


def test_two_ranks_choose_ray() -> None:
    assert load_config(["trainer.n_gpus_per_node=2"]).resolved_controller == "ray"
    assert load_config(["trainer.controller=ray"]).resolved_controller == "ray"


def test_importing_and_loading_touches_no_heavy_package() -> None:
    code = (
        "import sys; import hone.config as c; c.load_config(['trainer.seed=3']); "
        "print([m for m in ('torch', 'ray', 'transformers', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_importing_alone_does_not_load_hydra() -> None:
    code = "import sys; import hone.config; print('hydra' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_the_root_class_is_what_load_config_returns() -> None:
    config: Any = load_config()
    assert isinstance(config, PPOTrainerConfig)


@pytest.mark.parametrize(
    "override",
    [
        "checkpoint_engine.update_weights_bucket_megabytes=0",
        "max_num_batched_tokens=0",
        "multi_turn.max_observation_tokens=-1",
        "multi_turn.max_tool_response_length=-1",
        "nnodes=-1",
    ],
)
def test_a_number_that_would_hang_or_be_misread_is_out_of_range(override: str) -> None:
    with pytest.raises(ConfigError, match="is out of range; use"):
        load_config([f"actor_rollout_ref.rollout.{override}"])
