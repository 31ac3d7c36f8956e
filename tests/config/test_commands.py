"""`hone config show | explain | check`."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hone.config import ConfigError, config_to_dict, load_config
from hone.config.commands import check, explain, show
from hone.config.describe import describe_keys
from hone.config.trees import TREES


def lines_with(text: str, start: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith(start)]


def test_show_gives_every_value_with_its_origin() -> None:
    text = show(["trainer.seed=3", "algorithm.group_size=2"])
    (seed,) = [line for line in lines_with(text, "seed: 3") if "command line" in line]
    assert seed.endswith("# command line")
    assert "# command line, written algorithm.group_size" in text
    assert "# follows data.max_prompt_length" in text
    leaves = [line for line in text.splitlines() if "# " in line]
    assert len(leaves) == len(describe_keys(TREES["ppo_trainer"]))


@pytest.mark.parametrize("name", sorted(TREES))
def test_what_show_prints_is_yaml_that_loads_to_the_same_tree(name: str) -> None:
    shown = OmegaConf.to_container(OmegaConf.create(show(config_name=name)))
    assert shown == config_to_dict(load_config(config_name=name))


def test_show_can_leave_defaults_out() -> None:
    text = show(["trainer.seed=3"], only_set=True)
    assert text == f"trainer:\n{'  seed: 3':<52}  # command line\n"


def test_show_lists_what_has_no_effect() -> None:
    text = show(["actor_rollout_ref.rollout.load_format=dummy"])
    assert (
        "# set, but without effect here:\n#   actor_rollout_ref.rollout.load_format=dummy: " in text
    )


def test_show_quotes_what_yaml_would_read_otherwise() -> None:
    overrides = ["trainer.experiment_name='null'", "trainer.project_name='a: b'"]
    shown = OmegaConf.create(show(overrides))
    assert shown.trainer.experiment_name == "null"
    assert shown.trainer.project_name == "a: b"


def test_explain_tells_all_about_a_key() -> None:
    assert explain("actor_rollout_ref.rollout.n") == (
        "actor_rollout_ref.rollout.n\n"
        "  Responses a prompt (group size).\n"
        "\n"
        "  takes    an integer (1 or more)\n"
        "  default  1\n"
        "  state    works\n"
        "  also     algorithm.group_size, sampling_params.n, actor_rollout_ref.rollout.n_agent\n"
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
        ("algorithm.group_size", "is another name: actor_rollout_ref.rollout.n"),
        ("ray_init.num_cpus", "CPUs Ray may use"),
        ("max_turns", "one more: so many searches, then the answer"),
        ("actor_rollout_ref.actor.megatron.anything", "refused\n  megatron is not built"),
        ("actor_rollout_ref.rollout.name", "works with native, hf; otherwise: "),
        ("lr", "3 keys end in 'lr'"),
        ("data.n_samples", "tree     generation"),
        ("model.partial_pretrain", "is another name: model.path"),
    ],
)
def test_explain_knows_blocks_old_names_and_absent_keys(key: str, piece: str) -> None:
    assert piece in explain(key)


def test_explain_offers_the_nearest_key() -> None:
    with pytest.raises(
        ConfigError, match=r"no key 'algorithm\.adv_estmator'\. Did you mean 'algorithm.adv_est"
    ):
        explain("algorithm.adv_estmator")


def test_every_key_can_be_explained() -> None:
    keys = [info.key for tree in TREES.values() for info in describe_keys(tree)]
    for key in keys[::17]:
        assert explain(key).startswith(key)


def test_check_accepts_a_good_file_and_lists_its_notes(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("trainer: {seed: 2}\nactor_rollout_ref: {rollout: {mode: async}}\n")
    code, text = check(file)
    assert code == 0
    assert text.startswith(f"{file}: fine, a ppo_trainer config that sets 2 keys\n- ")


def test_check_reports_every_problem(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("trainer: {sed: 2}\ndata: {shufle: true}\n")
    code, text = check(file)
    assert code == 1
    assert "2 problem(s)" in text
    assert "Did you mean 'shuffle'? (mine.yaml)" in text


def test_check_recognises_the_tree_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "warm.yaml"
    file.write_text("model: {partial_pretrain: m}\noptim: {lr: 1e-4}\ndata: {max_length: 12}\n")
    assert "a sft_trainer config" in check(file)[1]


@pytest.mark.parametrize("name", ["missing.yaml", "notes.txt"])
def test_check_says_when_there_is_nothing_to_check(tmp_path: Path, name: str) -> None:
    assert check(tmp_path / name)[0] == 1
