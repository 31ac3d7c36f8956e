"""From overrides and files to the tree: precedence, unknown keys, origins, notes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from hone.config import ConfigError, replace
from hone.config.keys import get
from hone.config.sources import read_config
from hone.types import JsonValue
from hone.verl.dialect import VERL_KEYS, compose, load_config


def error(overrides: list[str], **keywords: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, **keywords)  # type: ignore[call-overload]
    return str(caught.value)


def test_overrides_take_numbers_lists_nulls_strings_and_plus_signs() -> None:
    config = load_config(
        [
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "data.train_files=['~/data/a.parquet','b.parquet']",
            "+data.seed=null",
            "++trainer.total_epochs=3",
            'trainer.logger=["tensorboard"]',
            "trainer.experiment_name=2024",
            "actor_rollout_ref.actor.clip_ratio_high=0.28",
        ]
    )
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.data.train_files == ("~/data/a.parquet", "b.parquet")
    assert config.data.seed is None
    assert config.trainer.total_epochs == 3
    assert config.trainer.logger == ("tensorboard",)
    assert config.trainer.experiment_name == "2024"


def test_one_value_is_read_as_a_list_of_one() -> None:
    config = load_config(["trainer.logger=console", "data.train_files=/data/train.parquet"])
    assert config.trainer.logger == ("console",)
    assert config.data.train_files == ("/data/train.parquet",)


def test_a_misspelt_key_suggests_the_right_one() -> None:
    assert error(["algorithm.adv_estmator=grpo"]) == (
        "algorithm has no key 'adv_estmator'. Did you mean 'adv_estimator'? (command line)"
    )


def test_a_key_in_the_wrong_block_names_the_right_block() -> None:
    assert "Did you mean 'data.train_batch_size'?" in error(["trainer.train_batch_size=4"])


def test_a_key_without_a_similar_key_is_still_an_error() -> None:
    assert error(["zzzz.qqqq=1"]) == "the config has no key 'zzzz'. (command line)"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "trainer.total_epochs=abc",
            "trainer.total_epochs=abc is a string; expected an integer (command line)",
        ),
        ("data.shuffle=3", "data.shuffle=3 is an integer; expected true or false (command line)"),
        (
            "trainer.device=tpu",
            "trainer.device=tpu is a string; expected one of auto, cpu, cuda (command line)",
        ),
        (
            "data.train_files=null",
            "data.train_files is null; expected a list of strings (command line)",
        ),
        (
            "actor_rollout_ref.rollout.stop_token_ids=[a]",
            "actor_rollout_ref.rollout.stop_token_ids=[a] is a list; "
            "expected a list of integers (command line)",
        ),
    ],
)
def test_a_wrong_type_is_reported_with_the_expected_type(override: str, sentence: str) -> None:
    assert error([override]) == sentence


def test_a_wrong_type_is_reported_once_not_for_every_key_that_follows_it() -> None:
    assert error(["data.max_prompt_length=long"]).count("\n") == 0


def test_problems_of_every_kind_are_reported_together() -> None:
    wrong = ["trainer.total_epohcs=3", "trainer.seed=x", "actor_rollout_ref.rollout.top_p=2"]
    text = error([*wrong, "data.shuffle=3"])
    assert text.startswith("4 problems\n- ")
    for part in ("total_epochs", "trainer.seed=x is a string", "top_p=2 is out of", "data.shuffle"):
        assert part in text


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.train_batch_size=many", "actor_rollout_ref.actor.ppo_mini_batch_size=2048"],
        ["actor_rollout_ref.rollout.nn=4", "algorithm.adv_estimator=rloo"],
    ],
)
def test_a_problem_that_follows_from_another_is_not_reported(
    overrides: list[str],
) -> None:
    assert "\n" not in error(overrides)


def test_keys_that_follow_a_value_out_of_range_are_not_checked_with_it() -> None:
    size = "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=0"
    assert error([size]) == f"{size} is out of range; use 1 or more (command line)"


def test_a_problem_hides_no_problem_of_another_key_with_the_same_ending() -> None:
    problems = error(["critic.stratgy=fsdp2", "actor_rollout_ref.actor.strategy=nosuch"])
    assert "Did you mean 'strategy'?" in problems
    assert "actor_rollout_ref.actor.strategy=nosuch is unknown" in problems


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("actor.optim.lr=1", " Did you mean 'actor_rollout_ref.actor.optim.lr'?"),
        ("rollout.n=4", " Did you mean 'actor_rollout_ref.rollout.n'?"),
        ("rollout.total_epoch=4", ""),
        ("critic.model.optim.lr=1", ""),
        ("engine_kwargs.dynamo=1", ""),
        (
            "clip_grad=3",
            " Did you mean 'actor_rollout_ref.actor.optim.clip_grad' or 'critic.optim.clip_grad' or "
            "'reward_model.model.optim.clip_grad'?",
        ),
        ("rollot.temperature=1", ""),
        ("algorithm.kl_ctrl.kl_cof=1", " Did you mean 'kl_coef'?"),
        ("actor.clip_rato_low=1", " Did you mean 'actor_rollout_ref.actor.clip_ratio_low'?"),
    ],
)
def test_a_suggestion_stays_in_the_block_that_was_written(override: str, suggestion: str) -> None:
    assert error([override]).endswith(f"'.{suggestion} (command line)")


def test_a_block_cannot_be_set_to_a_value_except_null() -> None:
    assert "critic is a block of keys" in error(["critic=3"])
    assert load_config(["reward_model.sandbox_fusion=null"]) == load_config()


def test_a_value_has_no_keys_inside() -> None:
    assert "trainer.seed is a value, it has no key 'x'" in error(["trainer.seed.x=3"])


def test_any_key_can_be_added_to_a_mapping_and_removed() -> None:
    config = load_config(
        [
            "actor_rollout_ref.model.override_config.attention_dropout=0.1",
            "+data.apply_chat_template_kwargs.enable_thinking=false",
            "actor_rollout_ref.model.override_config.rope.theta=1e6",
            "~actor_rollout_ref.model.override_config.attention_dropout",
        ]
    )
    assert config.actor_rollout_ref.model.override_config == {"rope": {"theta": 1e6}}
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}


def test_a_name_that_a_mapping_lacks_cannot_be_removed_from_it() -> None:
    block = "actor_rollout_ref.model.override_config"
    assert f"{block} has no key 'nope' to remove" in error([f"~{block}.nope"])
    assert f"{block} has no key 'a.nope' to remove" in error(
        [f"+{block}.a.b=1", f"~{block}.a.nope"]
    )


def test_a_name_inside_a_mapping_may_have_dots(tmp_path: Path) -> None:
    override = "reward_model.scores={math.v2:'f.py:score'}"
    assert load_config([override]).reward_model.scores == {"math.v2": "f.py:score"}
    (tmp_path / "mine.yaml").write_text(
        "reward_model: {scores: {math.v2: a, math.v3: b}}\ntrainer: {alarms.window: 3}\n"
    )
    config = load_config([override], config_name="mine", config_path=tmp_path)
    assert config.reward_model.scores == {"math.v2": "f.py:score", "math.v3": "b"}
    assert config.trainer.alarms.window == 3


def test_a_mapping_where_null_was_the_default_can_be_filled() -> None:
    config = load_config(["actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-8"])
    assert config.actor_rollout_ref.actor.optim.override_optimizer_config == {"eps": 1e-8}


def test_a_declared_key_cannot_be_removed() -> None:
    assert "data.seed cannot be removed; give it a value or null" in error(["~data.seed"])
    assert "algorithm.kl_ctrl cannot be removed" in error(["~algorithm.kl_ctrl"])


def test_a_sweep_is_not_a_list() -> None:
    assert "write a list as key=[a,b]" in error(["trainer.logger=console,wandb"])


def test_an_argument_that_is_no_override_is_explained() -> None:
    assert "write trainer.seed=VALUE" in error(["trainer.seed"])


def test_origins_name_the_source_of_each_value() -> None:
    composed = compose(["trainer.seed=3", "algorithm.group_size=2"])
    assert composed.origins["trainer.seed"] == "command line"
    assert (
        composed.origins["actor_rollout_ref.rollout.n"]
        == "command line, written algorithm.group_size"
    )
    assert "data.seed" not in composed.origins


def test_neutral_keys_of_one_topic_are_noted_in_one_line() -> None:
    sizes = ("expert", "context", "pipeline_model", "data")
    keys = [f"actor_rollout_ref.rollout.{size}_parallel_size" for size in sizes]
    (note,) = compose([f"{key}=2" for key in keys]).notes
    assert note.startswith(f"{keys[0]}=2, {keys[1]}=2, {keys[2]}=2 and 1 more: each rank decodes")


def test_a_value_that_equals_what_hone_does_needs_no_note() -> None:
    composed = compose(
        [
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            "actor_rollout_ref.actor.strategy=fsdp",
            "actor_rollout_ref.actor.state_masking=true",
            "actor_rollout_ref.model.use_remove_padding=true",
        ]
    )
    assert composed.notes == ()


def test_a_key_without_effect_is_noted() -> None:
    (note,) = compose(["algorithm.kl_ctrl.kl_coef=0.01"]).notes
    assert note == (
        "algorithm.kl_ctrl.kl_coef=0.01: no effect while algorithm.use_kl_in_reward=false"
    )
    assert (
        compose(["algorithm.kl_ctrl.kl_coef=0.01", "algorithm.use_kl_in_reward=true"]).notes == ()
    )


def test_the_message_of_a_refused_key_names_an_alternative() -> None:
    assert error(["actor_rollout_ref.model.hf_config_path=other"]) == (
        "actor_rollout_ref.model.hf_config_path=other is refused: the model's own config.json is "
        "read; use override_config (command line)"
    )


def test_refused_keys_of_one_topic_are_one_problem() -> None:
    keys = ("staleness_threshold", "partial_rollout")
    text = error([f"async_training.{key}=1" for key in keys])
    assert text.startswith(
        "async_training.staleness_threshold=1, async_training.partial_rollout=1 are"
    )


@pytest.mark.parametrize(
    ("override", "key", "becomes"),
    [
        ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.name", "native"),
        ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.name", "native"),
        ("actor_rollout_ref.actor.strategy=veomni", "actor_rollout_ref.ref.strategy", "fsdp2"),
        ("trainer.device=npu", "trainer.device", "auto"),
        ("critic.model.fsdp_config.dtype=float16", "critic.model.fsdp_config.dtype", "auto"),
        ("trainer.default_hdfs_dir=''", "trainer.default_hdfs_dir", None),
    ],
)
def test_another_engine_or_device_runs_with_ours_and_a_note(
    override: str, key: str, becomes: str | None
) -> None:
    composed = compose([override])
    assert get(composed.config, key) == becomes
    (note,) = composed.notes
    assert note.startswith(f"{override}: ")


def test_an_empty_shell_variable_is_no_adapter_module_stop_string_or_search() -> None:
    model, rollout = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
    composed = compose(
        [f"{model}.lora_adapter_path=", f"{model}.external_lib=", f"{rollout}.stop="]
    )
    config = composed.config
    assert not config.actor_rollout_ref.model.uses_lora
    assert config.critic.model.external_lib is config.actor_rollout_ref.model.external_lib is None
    assert config.actor_rollout_ref.rollout.stop == ()
    composed = compose(["search.url=", "rollout.stop="], config_name="generation")
    assert composed.config.search.url is None
    assert composed.config.rollout.stop == ()
    assert composed.notes[0].startswith("search.url='': it is empty")


@pytest.mark.parametrize("name", ["vllm", "vllm_async"])
def test_vllm_is_used_where_its_package_is_installed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hone.config.checks.find_spec", lambda name: object())
    composed = compose([f"actor_rollout_ref.rollout.name={name}"])
    assert composed.config.actor_rollout_ref.rollout.name == "vllm"
    assert composed.notes == ()


def test_vllm_is_used_with_an_interpreter_of_its_own() -> None:
    rollout = "actor_rollout_ref.rollout"
    keys = ["name=vllm", "vllm.python=v/bin/python", "tensor_model_parallel_size=2"]
    keys.append("+engine_kwargs.vllm.quantization=fp8")
    composed = compose(
        [f"{key[0] if key[0] == '+' else ''}{rollout}.{key.lstrip('+')}" for key in keys]
    )
    config = composed.config.actor_rollout_ref.rollout
    assert (config.name, config.tensor_model_parallel_size) == ("vllm", 2)
    assert config.engine_kwargs.vllm == {"quantization": "fp8"}
    assert composed.notes == ()


def test_keys_of_vllm_have_no_effect_on_native_and_are_noted() -> None:
    rollout = "actor_rollout_ref.rollout"
    composed = compose(
        [
            f"{rollout}.name=vllm",
            f"{rollout}.tensor_model_parallel_size=2",
            f"{rollout}.data_parallel_size=1",
        ]
    )
    assert composed.config.actor_rollout_ref.rollout.name == "native"
    missing_note, size_note = composed.notes
    assert "vLLM is not installed here" in missing_note
    assert size_note.endswith("one rank decodes with the whole model")
    assert composed.config.actor_rollout_ref.rollout.tensor_model_parallel_size == 1


def test_native_ranks_share_a_model_in_equal_numbers() -> None:
    size = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    four = ["trainer.n_gpus_per_node=4", "data.train_batch_size=8"]
    composed = compose([f"{size}=2", *four])
    assert composed.config.actor_rollout_ref.rollout.tensor_model_parallel_size == 2
    assert not [note for note in composed.notes if "tensor_model_parallel_size" in note]
    assert f"{size}=3 does not divide 4 rollout ranks; use 2 or 4" in error([f"{size}=3", *four])
    assert "rollout.exact decodes on one rank" in error(
        [f"{size}=2", "actor_rollout_ref.rollout.exact=true", *four]
    )
    pool = ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=3"]
    assert f"{size}=2 does not divide 3 rollout ranks" in error([f"{size}=2", *four, *pool])


def test_keys_of_another_training_engine_run_with_one_note() -> None:
    megatron = "actor_rollout_ref.actor.megatron"
    composed = compose([f"{megatron}.pipeline_model_parallel_size=2", f"{megatron}.use_mbridge=2"])
    notes = "\n".join(composed.notes)
    assert "override_transformer_config are read" in notes
    assert "one rank computes whole sequences and whole layers" in notes
    offload = load_config([f"{megatron}.param_offload=true"]).actor_rollout_ref.actor.fsdp_config
    assert offload.param_offload


def test_megatron_runs_if_it_is_installed_and_fsdp2_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overrides = ["trainer.n_gpus_per_node=4", "data.train_batch_size=8"]
    overrides += ["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"]
    for spec, strategy in ((object(), "megatron"), (None, "fsdp2")):
        monkeypatch.setattr("hone.config.checks.find_spec", lambda name, spec=spec: spec)
        composed = compose(overrides, config_name="ppo_megatron_trainer")
        policy = composed.config.actor_rollout_ref
        assert (policy.actor.strategy, policy.ref.strategy) == (strategy, strategy)
        assert composed.config.critic.strategy == strategy
        assert policy.ref.megatron.tensor_model_parallel_size == 2
        missing = [note for note in composed.notes if "hone-rl[megatron]" in note]
        assert bool(missing) == (strategy == "fsdp2")
    assert any("other training engines are not read" in note for note in composed.notes)


def test_a_layout_of_megatron_that_does_not_fit_the_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hone.config.checks.find_spec", lambda name: object())
    sizes = [
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3",
    ]
    message = error(["actor_rollout_ref.actor.strategy=megatron", *sizes])
    assert "tensor_model_parallel_size=3 times pipeline_model_parallel_size=1" in message


def test_an_unknown_config_name_is_explained() -> None:
    assert "Did you mean 'generation'?" in error([], config_name="generatoin")


def test_other_names_of_a_tree_load_it() -> None:
    assert load_config(config_name="sft_trainer_engine") == load_config(config_name="sft_trainer")


def test_replace_changes_one_key_and_nothing_else() -> None:
    config = load_config()
    changed = replace(config, "actor_rollout_ref.actor.optim.lr", 0.5)
    assert changed.actor_rollout_ref.actor.optim.lr == 0.5
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert changed.data is config.data
    with pytest.raises(ConfigError, match=r"OptimConfig has no key 'lrr'\. Did you mean 'lr'"):
        replace(config, "actor_rollout_ref.actor.optim.lrr", 0.5)


def test_get_reads_a_dotted_key() -> None:
    assert get(load_config(), "trainer.seed") == 1


def test_a_users_config_overrides_the_schema_and_the_command_line_overrides_both(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - ppo_trainer\n  - _self_\n"
        "trainer:\n  seed: 5\n  total_epochs: 2\n"
        "algorithm.adv_estimator: grpo\n"
    )
    composed = compose(["trainer.seed=9"], config_name="mine", config_path=tmp_path)
    assert composed.config.trainer.seed == 9
    assert composed.config.trainer.total_epochs == 2
    assert composed.config.algorithm.adv_estimator == "grpo"
    assert composed.origins["trainer.total_epochs"] == "mine.yaml"
    assert composed.origins["trainer.seed"] == "command line"


def test_an_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {sed: 5}\n")
    text = error([], config_name="mine", config_path=str(tmp_path))
    assert text == "trainer has no key 'sed'. Did you mean 'seed'? (mine.yaml)"


def test_a_defaults_list_may_name_the_users_own_files_and_verls_groups(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - actor@actor_rollout_ref.actor: dp_actor\n  - base\n"
        "  - size@actor_rollout_ref.model: small\n  - _self_\ntrainer:\n  seed: 3\n"
    )
    (tmp_path / "base.yaml").write_text("trainer:\n  seed: 2\n  total_epochs: 7\n")
    (tmp_path / "size").mkdir()
    (tmp_path / "size" / "small.yaml").write_text("path: tiny\n_target_: some.Class\n")
    composed = compose(config_name="mine", config_path=tmp_path)
    assert composed.config.trainer.seed == 3
    assert composed.config.trainer.total_epochs == 7
    assert composed.config.actor_rollout_ref.model.path == "tiny"
    assert composed.origins["trainer.total_epochs"] == "base.yaml"


def test_a_config_composes_in_several_threads_and_inside_a_hydra_program(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer]\n")

    def seed(number: int) -> int | None:
        return load_config(
            [f"data.seed={number}"], config_name="mine", config_path=tmp_path
        ).data.seed

    with initialize_config_dir(str(tmp_path), version_base=None):
        with ThreadPoolExecutor(4) as executor:
            assert list(executor.map(seed, range(8))) == list(range(8))
        assert GlobalHydra.instance().is_initialized()


def test_a_defaults_list_that_leads_back_to_its_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [mine]\n")
    with pytest.raises(ConfigError, match=r"leads back to mine\.yaml"):
        compose(config_name="mine", config_path=tmp_path)


def test_a_yml_file_is_not_replaced_by_the_built_in_config_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "ppo_trainer.yml").write_text("data: {seed: 3}\n")
    with pytest.raises(ConfigError, match=r"ppo_trainer\.yml is not read, .* rename it"):
        compose(config_name="ppo_trainer.yml", config_path=tmp_path)


def test_a_missing_file_of_a_defaults_list_is_explained(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, other, _self_]\n")
    text = error([], config_name="mine", config_path=str(tmp_path))
    assert text.startswith("the defaults list of mine.yaml does not resolve: ")


def test_a_folder_without_the_named_tree_falls_back_to_the_schema(tmp_path: Path) -> None:
    assert load_config(config_path=tmp_path) == load_config()
    text = error([], config_name="min", config_path=str(tmp_path))
    assert text.startswith("there is no config 'min' in ")


def test_a_path_that_is_no_folder_is_explained(tmp_path: Path) -> None:
    assert "is no folder" in error([], config_path=str(tmp_path / "nowhere"))


def test_broken_yaml_is_explained(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match=r"mine.yaml is not valid YAML"):
        load_config(config_name="mine", config_path=tmp_path)


def test_a_users_config_for_another_tree_follows_its_defaults_list(tmp_path: Path) -> None:
    (tmp_path / "warm.yaml").write_text("defaults: [sft_trainer, _self_]\ndata: {max_length: 64}\n")
    composed = compose(config_name="warm", config_path=tmp_path)
    assert composed.config.data.max_length == 64
    assert compose(config_name="warm", config_path=tmp_path, schema="sft_trainer") == composed


@pytest.mark.parametrize(
    "name",
    [
        "ppo_trainer",
        "ppo_trainer.yaml",
        "ppo",
        "fully_async_ppo_trainer",
        "transfer_queue_ppo_trainer",
    ],
)
@pytest.mark.parametrize("folder", [None, "config", "./config", "/opt/verl/trainer/config"])
def test_verls_own_config_is_built_in_where_hydra_would_look_beside_the_program(
    name: str, folder: str | None
) -> None:
    assert compose(config_name=name, config_path=folder).config == load_config()


def test_a_recipes_config_keeps_the_values_in_which_it_differs() -> None:
    config = compose(config_name="dapo_trainer").config
    assert config.reward_manager.name == "dapo"
    named = compose(["reward_model.reward_manager=prime"], config_name="dapo_trainer").config
    assert named.reward_manager.name == "prime"


def test_a_file_of_the_current_folder_goes_before_the_built_in_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "ppo_trainer.yaml").write_text("trainer: {seed: 7}\n")
    monkeypatch.chdir(tmp_path)
    assert compose(config_path="config").config.trainer.seed == 7


def test_a_second_folder_adds_files_and_groups(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two" / "size").mkdir(parents=True)
    (tmp_path / "one" / "mine.yaml").write_text("defaults: [ppo_trainer, size: small, _self_]\n")
    text = "# @package _global_\ntrainer: {seed: %d}\n"
    (tmp_path / "two" / "size" / "small.yaml").write_text(text % 4)
    (tmp_path / "two" / "size" / "large.yaml").write_text(text % 5)
    folders = {"config_path": tmp_path / "one", "config_dir": tmp_path / "two"}
    assert compose(config_name="mine", **folders).config.trainer.seed == 4
    large = compose(["size=large", "+trainer.total_epochs=2"], config_name="mine", **folders)
    assert (large.config.trainer.seed, large.config.trainer.total_epochs) == (5, 2)


@pytest.mark.parametrize(
    ("tree", "choices"),
    [
        ("sft_trainer", ["engine=fsdp", "optim=fsdp"]),
        ("sft_trainer", ["model=hf_model"]),
        ("ppo_trainer", ["model_engine=dp", "critic=dp_critic"]),
        ("ppo_trainer", ["actor@actor_rollout_ref.actor=dp_actor", "hydra/job_logging=none"]),
    ],
)
def test_choices_of_verls_groups_that_name_the_default_change_nothing(
    tree: str, choices: list[str]
) -> None:
    assert compose(choices, config_name=tree) == compose(config_name=tree)


def test_the_choice_of_another_engine_is_its_strategy() -> None:
    def strategies(*choices: str, name: str = "ppo_trainer") -> dict[str, JsonValue]:
        _, settings = read_config(name, [], choices, VERL_KEYS)
        return {s.key: s.value for s in settings}

    actor, critic = "actor_rollout_ref.actor.strategy", "critic.strategy"
    assert strategies("model_engine=megatron") == {actor: "megatron", critic: "megatron"}
    assert strategies("critic=veomni_critic") == {critic: "veomni"}
    assert strategies(name="ppo_megatron_trainer") == {actor: "megatron", critic: "megatron"}
    assert strategies("engine=megatron", name="sft_trainer") == {"engine.strategy": "megatron"}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "trainer/total_epochs=3",
            "no config group 'trainer/total_epochs'; to set a key, write trainer.total_epochs=VALUE",
        ),
        (
            "trainer.total_epochs@x=3",
            "names the package of a key; write trainer.total_epochs=VALUE",
        ),
        ("data@data=1", "must be a string or a list"),
    ],
)
def test_a_key_that_is_written_like_a_group_is_not_ignored(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        compose([override])


def test_the_error_of_an_unknown_choice_lists_the_known_ones() -> None:
    assert "choose fsdp, automodel, megatron" in error(["engine=fsdb"], config_name="sft_trainer")
    assert "does not resolve" in error(["critic@critic=nothing"])


def test_the_users_defaults_list_may_override_verls_choices(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: ['file://verl/trainer/config', 'pkg://verl.trainer.config']}\n"
        "defaults:\n  - ppo_megatron_trainer\n  - override model_engine: dp\n  - _self_\n"
        "actor_rollout_ref: {actor: {strategy: fsdp}}\ntrainer: {seed: 4}\n"
    )
    composed = compose(config_name="mine", config_path=tmp_path)
    assert composed.config.trainer.seed == 4


def test_values_that_a_file_leaves_open_are_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "actor_rollout_ref: {rollout: {name: '???', max_num_seqs: null}, actor: {ppo_epochs: null}}\n"
        "data: {seed: null}\n"
    )
    composed = compose(config_name="mine", config_path=tmp_path)
    assert composed.config == load_config()
    assert "data.seed" in composed.origins  # which takes null


def test_references_cross_renames(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(
        "trainer:\n  checkpoint:\n    save_contents: [model]\n"
        "    load_contents: ${trainer.checkpoint.save_contents}\n"
    )
    config = compose(config_name="sft", config_path=tmp_path, schema="sft_trainer").config
    assert config.checkpoint.load_contents == ("model",)


def test_a_block_may_refer_to_a_block_and_a_key_to_one_that_only_the_file_has(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.yaml").write_text(
        "critic: {optim: '${actor_rollout_ref.actor.optim}'}\n"
        "actor_rollout_ref:\n  actor: {optim: {lr: 0.5}}\n"
        "  rollout: {mtp: '${oc.select:actor_rollout_ref.model.mtp, null}'}\n"
        "trainer: {seed: '${oc.select:nowhere.seed, 3}'}\n"
    )
    config = compose(config_name="mine", config_path=tmp_path).config
    assert (config.critic.optim.lr, config.trainer.seed) == (0.5, 3)


def test_a_key_that_the_user_adds_is_accepted_with_one_line() -> None:
    composed = compose(["+my_script.note=3", "+data.state_config_path=x", "+data.seed=4"])
    assert composed.config == load_config(["data.seed=4"])
    (note,) = composed.notes
    assert note == (
        "my_script.note=3, data.state_config_path=x: a key of your own; nothing here reads it"
    )


@pytest.mark.parametrize(
    "key", ["algorithm.adv_estmator", "data.max_promt_length", "actor.optim.lr"]
)
def test_a_key_that_the_user_adds_is_no_misspelt_one(key: str) -> None:
    assert "Did you mean" in error([f"+{key}=1"])


def test_a_group_of_the_users_own_is_removed_from_the_defaults_list(tmp_path: Path) -> None:
    (tmp_path / "size").mkdir()
    (tmp_path / "size/big.yaml").write_text("# @package _global_\ndata: {train_batch_size: 32}\n")
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, size: big, _self_]\n")
    for overrides, prompts in (([], 32), (["~size"], 1024)):
        config = load_config(overrides, config_name="mine", config_path=tmp_path)
        assert config.data.train_batch_size == prompts
