"""The model card says what was trained on what and how, and nothing of the machine."""

from __future__ import annotations

from pathlib import Path

from hone.tracking import RunFolder
from hone.trainer.model_card import write_card


def card_of(tmp_path: Path, config: dict, origins: dict, steps: int = 3) -> str:  # type: ignore[type-arg]
    run, out = RunFolder(tmp_path / "run"), tmp_path / "out"
    run.path.mkdir()
    out.mkdir()
    run.write_config(config, origins)
    for step in range(steps):
        score = {"critic/score/mean": step / 10, "val-core/sums/acc/mean@1": step / 5}
        run.metrics.append(score, step)
    checkpoint = run.checkpoint(2) / "actor"
    write_card(out, checkpoint, "mine")
    return (out / "README.md").read_text(encoding="utf-8")


CONFIG = {
    "actor_rollout_ref": {"model": {"path": "Qwen/Qwen3-0.6B"}},
    "algorithm": {"adv_estimator": "rloo"},
    "data": {"train_files": ["/home/me/data/train.parquet"], "val_files": []},
    "trainer": {"default_local_dir": "/home/me/run", "api_key": "s3cret"},
    "ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"WANDB": "s3cret"}}}},
}


def test_a_card_has_base_model_data_settings_curves_and_evaluation(tmp_path: Path) -> None:
    text = card_of(tmp_path, CONFIG, {"algorithm.adv_estimator": "command line"})
    assert "base_model: Qwen/Qwen3-0.6B" in text
    assert "# mine" in text
    assert "by reinforcement learning (`rloo`), 2 steps" in text
    assert "| train | train.parquet |" in text
    assert "algorithm.adv_estimator: rloo" in text
    assert "| `val-core/sums/acc/mean@1` | 0 (step 0) | 0.4 (step 2) |" in text
    assert "![metrics by step](curves.png)" in text
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_card_names_neither_places_of_the_machine_nor_secrets(tmp_path: Path) -> None:
    keys = ("data.train_files", "trainer.default_local_dir", "trainer.api_key")
    keys += ("ray_kwargs.ray_init.runtime_env",)
    text = card_of(tmp_path, CONFIG, dict.fromkeys(keys, "command line"))
    assert "/home" not in text
    assert str(tmp_path) not in text
    assert "s3cret" not in text
    assert "trainer.default_local_dir: run" in text


def test_a_card_has_no_password_of_a_url_and_no_header(tmp_path: Path) -> None:
    kwargs = {"url": "https://me:s3cret@judge.example/v1?k=s3cret", "headers": ["Bearer s3cret"]}
    config = CONFIG | {"custom_reward_function": {"reward_kwargs": kwargs}}
    keys = [f"custom_reward_function.reward_kwargs.{name}" for name in kwargs]
    text = card_of(tmp_path, config, dict.fromkeys(keys, "command line"))
    assert "reward_kwargs.url: https://<redacted>@judge.example/v1?<redacted>" in text
    assert "s3cret" not in text


def test_steps_after_the_checkpoint_are_not_its_evaluation(tmp_path: Path) -> None:
    text = card_of(tmp_path, CONFIG, {}, steps=5)
    assert "0.4 (step 2)" in text
    assert "(step 4)" not in text


def test_a_checkpoint_outside_of_a_run_still_has_a_card(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_card(tmp_path / "out", tmp_path / "global_step_1" / "actor", "alone")
    assert "# alone" in (tmp_path / "out" / "README.md").read_text()
