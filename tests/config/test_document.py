"""`hone config show | explain | check`, and the generated docs/config.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import hone
from hone.config import ConfigError, config_to_dict
from hone.config.document import check, document, explain, format_with_origins, rollout_yaml
from hone.config.keys import leaves
from hone.config.trees import TREES
from hone.trainer.command_line import check_plan
from hone.verl.dialect import VERL, VERL_KEYS, compose, load_config
from hone.verl.rules import rules

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_generated_from_the_schema() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(VERL), (
        "run: python -m hone.config.document > docs/config.md"
    )


def test_verls_rollout_file_holds_the_defaults_of_the_schema() -> None:
    file = Path(hone.__file__).parent / "trainer" / "config" / "rollout" / "rollout.yaml"
    assert file.read_text(encoding="utf-8") == rollout_yaml(), (
        "run: python -m hone.config.document rollout > hone/trainer/config/rollout/rollout.yaml"
    )
    rollout = OmegaConf.load(file)
    assert "function_tool_path" in rollout.multi_turn
    assert rollout.multi_turn.function_tool_path is None


def test_the_appendix_holds_every_neutral_and_refused_key() -> None:
    appendix = document(VERL).partition("## Other keys and values")[2]
    assert all(
        f"`{rule.pattern}` | {rule.state} |" in appendix for rule in rules("refused", "neutral")
    )


def test_every_key_has_a_row() -> None:
    page = document(VERL)
    for tree in TREES.values():
        for info in leaves(tree.root).values():
            assert f"| `{info.key.rpartition('.')[2]}` | " in page, info.key


def test_docstrings_of_parents_are_found() -> None:
    leaf = leaves(TREES["ppo_trainer"].root)["actor_rollout_ref.rollout.temperature"]
    assert leaf.doc.startswith("Softmax temperature")


def lines_with(text: str, start: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith(start)]


def show(overrides: Sequence[str] = (), only_set: bool = False, tree: str = "ppo_trainer") -> str:
    return format_with_origins(compose(overrides, config_name=tree), only_set)


def test_show_gives_every_value_with_its_origin() -> None:
    text = show(["trainer.seed=3", "algorithm.group_size=2"])
    (seed,) = [line for line in lines_with(text, "seed: 3") if "command line" in line]
    assert seed.endswith("# command line")
    assert "# command line, written algorithm.group_size" in text
    assert "# follows data.max_prompt_length" in text
    lines = [line for line in text.splitlines() if "# " in line]
    assert len(lines) == len(leaves(TREES["ppo_trainer"].root))


@pytest.mark.parametrize("name", sorted(TREES))
def test_what_show_prints_is_yaml_that_loads_to_the_same_tree(name: str) -> None:
    loaded = OmegaConf.to_container(OmegaConf.create(show(tree=name)))
    assert loaded == config_to_dict(load_config(config_name=name))


def test_show_can_leave_defaults_out() -> None:
    text = show(["trainer.seed=3"], only_set=True)
    assert text == f"trainer:\n{'  seed: 3':<52}  # command line\n"


def test_show_lists_keys_without_effect() -> None:
    text = show(["actor_rollout_ref.rollout.load_format=safetensors"])
    assert (
        "# set, but without effect here:\n#   actor_rollout_ref.rollout.load_format=safetensors: "
        in text
    )


def test_show_quotes_strings_that_yaml_would_read_as_another_type() -> None:
    overrides = ["trainer.experiment_name='null'", "trainer.project_name='a: b'"]
    loaded = OmegaConf.create(show(overrides))
    assert loaded.trainer.experiment_name == "null"
    assert loaded.trainer.project_name == "a: b"


def test_explain_describes_a_key_completely() -> None:
    assert explain("actor_rollout_ref.rollout.n", dialect=VERL) == (
        "actor_rollout_ref.rollout.n\n"
        "  Responses per prompt (group size).\n"
        "\n"
        "  takes    an integer (1 or more)\n"
        "  default  1\n"
        "  short    n\n"
        "  also     algorithm.group_size, actor_rollout_ref.rollout.n_agent\n"
        "  tree     ppo_trainer\n"
    )


@pytest.mark.parametrize(
    ("key", "piece"),
    [
        ("actor_rollout_ref.rollout.prompt_length", "default  follows data.max_prompt_length"),
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "256, or data.train_batch_size where that is smaller",
        ),
        ("algorithm.kl_ctrl", "kl_coef    0.001"),
        ("algorithm.group_size", "is another name of actor_rollout_ref.rollout.n"),
        ("ray_init.num_cpus", "CPUs Ray may use"),
        ("max_turns", "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=*+1"),
        (
            "actor_rollout_ref.actor.megatron.anything",
            "neutral with other values than off, true, 1\n  of the settings of Megatron",
        ),
        ("distillation.enabled", "refused with other values than off\n  on-policy distillation"),
        ("data.pad_mode", "neutral with other values than no_padding"),
        ("actor_rollout_ref.rollout.name", "becomes native"),
        ("weight_decay", "keys end in 'weight_decay'"),
        ("lr", "short for actor_rollout_ref.actor.optim.lr (ppo_trainer), optim.lr (sft_tr"),
        ("learning_rate", "lr: learning rate; short for"),
        ("rollout.n", "is short for actor_rollout_ref.rollout.n"),
        ("data.n_samples", "tree     generation"),
        ("model.partial_pretrain", "is another name of model.path"),
    ],
)
def test_explain_describes_blocks_old_names_and_keys_without_field(key: str, piece: str) -> None:
    assert piece in explain(key, dialect=VERL)


def test_explain_lists_every_tree_of_a_key_with_its_default() -> None:
    text = explain("data.prompt_key", dialect=VERL)
    assert lines_with(text, "default") == [
        *("default  prompt", "default  question"),
    ]
    trees = (
        "ppo_trainer, prm_trainer, rm_trainer, dpo_trainer, generation",
        "sft_trainer",
    )  # without effect in evaluation
    assert lines_with(text, "tree") == [f"tree     {names}" for names in trees]
    (only,) = lines_with(explain("data.prompt_key", "sft_trainer", dialect=VERL), "default")
    assert only == "default  question"


def test_a_block_is_explained_in_each_tree_too() -> None:
    text = explain("checkpoint", dialect=VERL) + explain("data", dialect=VERL)
    for tree in ("ppo_trainer", "sft_trainer", "generation", "evaluation"):
        assert f"data: a block of {tree}" in text
    assert explain("data", "evaluation", dialect=VERL).startswith("data: a block of evaluation\n")


@pytest.mark.parametrize(
    ("key", "tree", "sentence"),
    [
        ("actor.lr", None, r"Did you mean 'actor_rollout_ref\.actor\.optim\.lr'\?"),
        ("optim.lr_warmup", None, "Did you mean"),
        ("critic.lr", None, r"Did you mean 'critic\.optim\.lr'\?"),
        ("actor.fsdp_config.lr", None, r"no key 'actor\.fsdp_config\.lr'\."),
        ("actor_rollout_ref.path", None, r"Did you mean 'actor_rollout_ref\.model\.path'\?"),
        ("algorithm.gamma", "sft_trainer", r"no key 'algorithm\.gamma' in sft_trainer"),
    ],
)
def test_a_partial_key_suggests_the_keys_with_its_parts(
    key: str, tree: str | None, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        explain(key, tree, dialect=VERL)


def test_explain_offers_the_nearest_key() -> None:
    with pytest.raises(
        ConfigError, match=r"no key 'algorithm\.adv_estmator'\. Did you mean 'algorithm.adv_est"
    ):
        explain("algorithm.adv_estmator", dialect=VERL)


def test_every_key_can_be_explained() -> None:
    keys = [info.key for tree in TREES.values() for info in leaves(tree.root).values()]
    for key in keys[::17]:
        assert explain(key, dialect=VERL).startswith(key)


def test_check_accepts_a_good_file_and_lists_its_notes(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    actor = "{shuffle: true, ulysses_sequence_parallel_size: 2}"
    file.write_text(f"trainer: {{seed: 2}}\nactor_rollout_ref: {{actor: {actor}}}\n")
    code, text = check(file, dialect=VERL)
    assert code == 0
    assert text.startswith(f"{file}: fine, a ppo_trainer config that sets 3 keys\n- ")


@pytest.mark.parametrize(
    ("tree", "changed", "notes"),
    [
        ("ppo_trainer", ["data.max_prompt_length=77", "data.train_batch_size=8"], 0),
        ("ppo_trainer", ["critic.optim.lr=2e-6", "algorithm.adv_estimator=grpo"], 1),
        ("sft_trainer", ["data.pad_mode=right", "data.max_length=12"], 0),
        ("generation", ["data.n_samples=3"], 0),
    ],
)
def test_check_has_no_note_about_the_defaults_in_a_saved_config(
    tmp_path: Path, tree: str, changed: list[str], notes: int
) -> None:
    file = tmp_path / "config.yaml"
    config = config_to_dict(load_config(changed, config_name=tree))
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    code, text = check(file, check_plan, VERL_KEYS)
    assert code == 0
    assert f"fine, a {tree} config" in text
    assert len(text.splitlines()) == 1 + notes


def test_a_neutral_key_is_noted_unless_its_value_equals_what_hone_does() -> None:
    key = "actor_rollout_ref.rollout.pipeline_model_parallel_size"
    assert f"#   {key}=2: each rank decodes with the whole model" in show([f"{key}=2"])
    assert key not in show([f"{key}=1"])


def test_check_reports_every_problem(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("trainer: {sed: 2}\ndata: {shufle: true}\n")
    code, text = check(file, dialect=VERL)
    assert code == 1
    assert "2 problem(s)" in text
    assert "Did you mean 'shuffle'? (mine.yaml)" in text


def test_check_recognises_the_tree_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "warm.yaml"
    file.write_text("model: {partial_pretrain: m}\noptim: {lr: 1e-4}\ndata: {max_length: 12}\n")
    assert "a sft_trainer config" in check(file, dialect=VERL)[1]


@pytest.mark.parametrize("name", ["missing.yaml", "notes.txt"])
def test_check_reports_a_missing_file_and_another_format(tmp_path: Path, name: str) -> None:
    assert check(tmp_path / name, dialect=VERL)[0] == 1
