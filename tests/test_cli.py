"""`hone`: light help, every verb reachable, a user's mistake is one sentence and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hone import cli
from hone.trainer import command_line, config_notes

VERBS = (
    *("train", "sft", "generate", "eval", "export", "config", "data", "model"),
    *("doctor", "report", "runs", "quickstart", "recipes", "wandb-workspace"),
)


def test_help_names_every_verb_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom hone.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'ray', 'hydra', 'numpy', 'rich'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=280
    )
    assert "HEAVY []" in done.stdout
    for verb in VERBS:
        assert f"\n    {verb}" in done.stdout


def test_without_a_verb_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "usage: hone" in capsys.readouterr().out


@pytest.mark.parametrize("verb", [*cli.PROGRAMS])
def test_a_program_has_its_own_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([verb, "--help"])
    assert end.value.code == 0
    assert f"usage: hone {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["train", "sft", "generate"])
def test_the_help_begins_with_short_keys_and_loads_no_torch(verb: str) -> None:
    code = (
        "import sys\nfrom hone import cli\n"
        f"try: cli.main([{verb!r}, '--help'])\n"
        "except SystemExit: print('HEAVY', [m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout
    example = f"hone {verb} model=MODEL data=rows.jsonl"
    assert done.stdout.index(example) < done.stdout.index("--config-path")


def test_the_help_of_quickstart_shows_how_to_change_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["quickstart", "--help"])
    shown = capsys.readouterr().out
    assert "usage: hone quickstart [--seed N] [--out FOLDER] [key=value ...]" in shown
    assert "algorithm.adv_estimator=rloo" in shown


NOWHERE = ["data.path=/nowhere.parquet"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "algorithm.adv_estmator=grpo"], "Did you mean"),
        (["sft", "optim.learning_rate=1"], "no key"),
        (["sft", "model.path=/nowhere/at/all"], "does not exist"),
        (["generate", "rollout.temperatur=1"], "Did you mean"),
        (["generate", *NOWHERE, "model.path=x", "data.output_path=o.parquet"], "/nowhere.parquet"),
        (["generate", *NOWHERE, "model.path=x"], "data.output_path was not given"),
        (["eval"], "data.path was not given"),
        (["eval", "data.path=/nowhere.parquet"], "/nowhere.parquet"),
        (["eval", "--bench", "gsm8k"], "--model is missing"),
        (["export", "/nowhere", "out"], "no checkpoint folder"),
        (["sft", "model.path=no_such_folder", "data.train_files=r.jsonl"], "model.path=no_such_f"),
        (
            ["generate", "model.path=no/folder", "data.path=r.jsonl", "data.output_path=o.parquet"],
            "model.path=no/folder: there is no model",
        ),
        (["report", "/nowhere"], "/nowhere"),
        (["train", "--dry_run"], "there is no option --dry_run. Did you mean '--dry-run'?"),
        (["sft", "--config-pat=x"], "Did you mean '--config-path'?"),
        (["report", "/nowhere", "--out", "."], "--out . is a folder; name the file"),
        (["config", "explain", "algorithm.adv_estmator"], "Did you mean"),
        (["data", "prepare", "gsm"], "Did you mean"),
        (["model", "get", "nonsense", "out"], "known: smollm2-135m"),
        (["model", "tiny", "out", "--family", "nonsense"], "no decoder family 'nonsense'"),
        (["model", "tiny", "out", "--hidden", "30", "--heads", "4"], "use hidden=32"),
        (["data", "prepare", "gsm8k", "--local_dir", "x", "--source_dir", "/nowhere"], "/nowhere"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "r.jsonl").write_text('{"question": "1+1=", "answer": "2", "prompt": "1+1="}\n')
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("model.override_config.rms_norm_epss=1", "'rms_norm_epss'"),
        ("model.target_modules=[nowhere]", "nowhere"),
        ("model.target_modules=[lm_head]", "leave lm_head out"),
    ],
)
def test_a_model_that_cannot_be_trained_as_asked_is_a_sentence_too(
    setting: str, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm

    tokenizer = character_tokenizer()
    lm = tiny_lm(len(tokenizer), hidden=16, layers=1, tie_embeddings=False)
    model = save_pretrained(lm, tokenizer, tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    arguments = [
        f"model.path={model}",
        "model.lora_rank=2",
        f"data.train_files={tmp_path / 'rows.jsonl'}",
        "data.train_batch_size=1",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        setting,
    ]
    assert cli.main(["sft", *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said


def test_an_unknown_option_of_a_verb_is_refused() -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["report", "run", "--outt", "x"])
    assert end.value.code == 2


def test_a_bug_of_ours_keeps_its_traceback() -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        command_line.run_program(broken)


def test_a_users_yaml_without_defaults_gets_the_programs_tree(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data: {max_length: 77}\n")
    composed = command_line.compose_arguments(
        ["--config-path", str(tmp_path), "--config-name", "mine", "optim.lr=2e-5"],
        schema="sft_trainer",
        program="hone sft",
    )
    assert composed.config.data.max_length == 77
    assert composed.origins["optim.lr"] == "command line"
    assert "mine.yaml" in composed.origins["data.max_length"]


def test_keys_without_effect_are_listed_once_at_start(capsys: pytest.CaptureFixture[str]) -> None:
    from hone.tracking.console import screen

    screen.cache_clear()
    composed = command_line.compose_arguments(
        ["data.pad_mode=right"], schema="sft_trainer", program="hone sft"
    )
    config_notes.print_config_notes(composed)
    screen.cache_clear()
    assert capsys.readouterr().out.count("data.pad_mode=right") == 1


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run a verb; its exit code and what it said."""
    from hone.tracking.console import screen

    def run(*arguments: str) -> tuple[int, str]:
        screen.cache_clear()
        code = cli.main(list(arguments))
        screen.cache_clear()
        return code, capsys.readouterr().out

    return run


Said = Callable[..., tuple[int, str]]


def test_config_shows_explains_and_checks(said: Said, tmp_path: Path) -> None:
    code, text = said("config", "show", "--tree", "generation", "--only-set", "data.n_samples=3")
    assert (code, "n_samples: 3" in text) == (0, True)
    code, text = said("config", "explain", "data.train_batch_size")
    assert (code, "takes" in text) == (0, True)
    code, text = said("config", "explain", "--tree", "sft_trainer", "data.prompt_key")
    assert (code, "question" in text, "ppo_trainer" in text) == (0, True, False)
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("defaults: [sft_trainer, _self_]\ndata: {max_length: 64}\n")
    bad.write_text("data: {max_lenth: 64}\n")
    (tmp_path / "mine.yaml").write_text("data: {max_length: 64}\noptim: {lr: 1e-5}\n")
    mine = ("--only-set", "-cp", str(tmp_path), "-cn")
    for of_sft in (("--tree", "sft_trainer", *mine, "mine"), (*mine, "good")):
        code, text = said("config", "show", *of_sft)
        assert (code, "max_length: 64" in text) == (0, True), of_sft
    assert said("config", "show", "-cn", "sft_trainer", "--only-set", "data.max_length=3")[0] == 0
    assert said("config", "check", str(good))[0] == 0
    assert said("config", "check", str(good), str(bad))[0] == 1


def test_a_tiny_model_is_made_and_used_by_the_data_check(said: Said, tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    code, text = said("model", "tiny", str(model), "--hidden", "32", "--layers", "1")
    assert (code, "parameters" in text) == (0, True)
    assert json.loads((model / "config.json").read_text())["hidden_size"] == 32
    code, text = said("model", "tiny", str(tmp_path / "usual"))
    assert (code, "88,960 parameters" in text) == (0, True)
    before = (model / "model.safetensors").read_bytes()
    # What is there is not replaced.
    assert cli.main(["model", "tiny", str(model), "--seed", "3"]) == 2
    assert (model / "model.safetensors").read_bytes() == before
    rows = tmp_path / "rows.jsonl"
    row = {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": "1+1="}],
        "reward_model": {"style": "rule", "ground_truth": 2},
    }
    rows.write_text(json.dumps(row) + "\n")
    code, text = said("data", "check", str(rows), "--tokenizer", str(model))
    assert (code, "prompt length in tokens" in text) == (0, True)
    rows.write_text(json.dumps(row | {"data_source": "poetry"}) + "\n")
    assert said("data", "check", str(rows))[0] == 1


def test_data_sets_are_listed_and_prepared(said: Said, tmp_path: Path) -> None:
    code, text = said("data", "prepare")
    assert (code, "countdown" in text) == (0, True)
    sizes = ("--train_size", "4", "--test_size", "2")
    code, _ = said("data", "prepare", "multiply", "--local_dir", str(tmp_path), *sizes)
    assert code == 0
    assert (tmp_path / "train.parquet").is_file()


def test_the_help_of_a_data_set_shows_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    for name, own in (("gsm8k", "--hub"), ("countdown", "--max_target")):
        with pytest.raises(SystemExit) as end:
            cli.main(["data", "prepare", name, "--help"])
        text = capsys.readouterr().out
        assert (end.value.code, f"usage: hone data prepare {name} " in text) == (0, True)
        for option in ("--local_dir", "--source_dir", own):
            assert option in text
    with pytest.raises(SystemExit) as end:
        cli.main(["data", "prepare", "gsm8k", "--nonsense"])
    assert end.value.code == 2
    assert "usage: hone data prepare gsm8k" in capsys.readouterr().err
    assert cli.main(["data", "prepare", "--help"]) == 0
    assert "hone data prepare NAME --help" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        cli.main(["data", "prepare", "--hub"])
    assert end.value.code == 2
    assert "name the data set first" in capsys.readouterr().err


def test_a_run_becomes_a_page(said: Said, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"reward/mean": 0.5, "step": 1}\n')
    code, _ = said("report", str(run), "--out", str(tmp_path / "page.html"))
    assert code == 0
    assert "reward/mean" in (tmp_path / "page.html").read_text()


def test_doctor_examines_without_the_slow_tests(said: Said) -> None:
    code, text = said("doctor", "--quick")
    assert code == 0
    assert "bubblewrap" in text


def test_a_misspelt_verb_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["trian"])
    assert stopped.value.code == 2
    assert "there is no verb 'trian'. Did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "key"),
    [("--train_files", "data.train_files"), ("--train-batch-size=8", "data.train_batch_size")],
)
def test_a_setting_written_as_an_option_is_answered_with_its_key(
    option: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", option, "x.parquet"]) == 2
    told = capsys.readouterr().err
    assert f"there is no option {option.partition('=')[0]}; settings are key=value" in told
    assert f"as in {key}={option.partition('=')[2] or 'VALUE'}" in told
    assert "usage" not in told
