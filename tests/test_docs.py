"""The documents stay true: every command is run or checked, every name of the tour exists."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hone import cli
from hone.data.prepare import argument_parser
from hone.launch import command as launch
from hone.retrieval import serve
from hone.trainer import main_eval_prm, main_eval_rm, quickstart, sweep
from hone.trainer.benchmarks import split_overrides
from hone.trainer.command_line import compose_arguments
from hone.verl.dialect import compose
from hone.workers import serve_reward_model

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "docs/*/*.md", "recipes/*/*.md", "examples/**/*.md")
    for page in ROOT.glob(pattern)
)
TREES = {
    "train": "ppo_trainer",
    "sft": "sft_trainer",
    "train-prm": "prm_trainer",
    "train-rm": "rm_trainer",
    "dpo": "dpo_trainer",
    "generate": "generation",
    "eval": "evaluation",
    "main_ppo": "ppo_trainer",
    "main_sft": "sft_trainer",
    "main_prm": "prm_trainer",
    "main_rm": "rm_trainer",
    "main_dpo": "dpo_trainer",
    "main_generation": "generation",
    "main_eval": "evaluation",
}
KNOWN_TAGS = {"gpu", "hub", "cluster"}
SHELL = {
    "cd",
    "docker",
    "git",
    "pip",
    "export",
    "ray",
    "mkdir",
    "source",
    "apt-get",
    "sbatch",
    "kubectl",
}
"""Commands that are not ours to check."""


def commands(page: Path) -> list[str]:
    """The lines of the page's bash blocks, continuation lines joined."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:bash|sh|shell)\n(.*?)```", text, flags=re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def all_commands() -> Iterator[Any]:
    for page in PAGES:
        for number, line in enumerate(commands(page)):
            yield pytest.param(line, id=f"{page.relative_to(ROOT)}-{number}")


def words_of(line: str) -> list[str]:
    line = re.sub(r"\$\{?\w+\}?", "value", line)
    return shlex.split(line, comments=True)


def check(words: list[str]) -> None:
    """Parse and compose what the command would run; raises where it could not."""
    while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
        words = words[1:]
    if not words or words[0] in SHELL:
        return
    program = Path(words[0]).name
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
        assert next(w for w in words[1:] if "=" not in w) in targets
    elif program == "bash":
        check_script(ROOT / words[1], words[2:])
    elif program == "hone":
        check_verb(words[1], words[2:])
    elif program in ("python", "python3", "torchrun"):
        check_module(words)
    else:
        pytest.fail(f"nobody checks {words[0]!r}: add it to the checks, or to SHELL")


def check_module(words: list[str]) -> None:
    if "-c" in words:
        compile(words[words.index("-c") + 1], "page", "exec")
        return
    if "-m" not in words:
        assert (ROOT / next(w for w in words[1:] if w.endswith(".py"))).is_file()
        return
    at = words.index("-m")
    module, rest = words[at + 1], words[at + 2 :]
    name = module.rpartition(".")[2]
    if name in TREES and module.startswith("hone.trainer"):
        check_overrides(TREES[name], rest)
    elif module == "hone.cli":
        check_verb(rest[0], rest[1:])
    elif module in ("pytest", "venv", "pip"):
        return
    else:
        importlib.import_module(module)


def check_overrides(tree: str, rest: list[str]) -> None:
    words = [word for word in _from_root(rest) if word not in sweep.SWEEP_FLAGS]
    if len(words) < len(rest):
        sweep.combinations(words, tree)
    else:
        compose_arguments(words, schema=tree, program="hone")


def _from_root(rest: list[str]) -> list[str]:
    """Config folders are named as seen from the repository."""
    return [str(ROOT / word) if before == "--config-path" else word
            for before, word in zip(["", *rest], rest, strict=False)]  # fmt: skip


def check_verb(verb: str, rest: list[str]) -> None:
    if verb in ("eval-prm", "eval-rm"):
        program = main_eval_prm if verb == "eval-prm" else main_eval_rm
        _, overrides = program.build_parser().parse_known_args(rest)
        check_overrides("prm_trainer" if verb == "eval-prm" else "rm_trainer", overrides)
    elif verb == "eval" and "--bench" in rest:
        overrides = [word for word in rest if "=" in word and not word.startswith("-")]
        generating, scoring = split_overrides(overrides)
        compose(generating, config_name="generation")
        compose(scoring, config_name="evaluation")
    elif verb in TREES:
        check_overrides(TREES[verb], rest)
    elif [verb, *rest][:2] == ["data", "prepare"] and len(rest) > 1:
        argument_parser(rest[1]).parse_args(rest[2:])
    elif verb == "quickstart":
        chosen, overrides = cli._build_parser().parse_known_args([verb, *rest])
        assert chosen.verb == verb
        files = {"train": Path("train.jsonl"), "test": Path("test.jsonl")}
        usual = quickstart.overrides(files, Path("base"), Path("run"), chosen.seed)
        compose([*usual, *overrides])
    elif verb == "config":
        assert cli.main([verb, *rest]) == 0
    elif verb == "launch":
        launch._parser().parse_args(rest[: rest.index("--")])
        check(rest[rest.index("--") + 1 :])
    elif verb == "jobs":
        assert rest == [] or rest[0] in ("list", "logs", "stop")
    elif verb == "serve-rm":
        serve_reward_model.build_parser().parse_intermixed_args(rest)
    elif verb == "serve-retriever":
        parser = argparse.ArgumentParser()
        serve.add_arguments(parser)
        parser.parse_intermixed_args(rest)
    else:
        chosen, unknown = cli._build_parser().parse_known_args([verb, *rest])
        assert chosen.verb == verb
        assert not unknown


def check_script(script: Path, rest: list[str]) -> None:
    """Let the shell expand the script with `echo` in place of Python, and check what it would run."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "echo", "BASE_MODEL": "MODEL"}
    environment |= {"DATA_DIR": "data", "SEEDS": "1", "TOGETHER": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["bash", str(script), *rest],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=280,
        )
    lines = done.stdout.splitlines()
    assert lines
    for line in lines:
        check_module(["python", *shlex.split(line)])


@pytest.mark.slow
@pytest.mark.parametrize("line", all_commands())
def test_every_command_in_the_documents_would_start(line: str) -> None:
    tag = re.search(r"# needs: ([\w, ]+)", line)
    if tag:
        assert {word.strip() for word in tag.group(1).split(",")} <= KNOWN_TAGS
    check(words_of(line))


def test_the_check_notices_a_wrong_command() -> None:
    for line in (
        "hone train algorithm.adv_estmator=grpo",
        "hone eval --bench gsm8k rollout.top_x=1",
        "hone data prepare countdown --local_dir x --no_such_option 1",
        "python -m hone.trainer.main_sft optim.lrr=1",
        "make no-such-target",
        "hone report run --no-such-option",
        "unheard-of command",
    ):
        with pytest.raises((Exception, SystemExit, pytest.fail.Exception)):
            check(words_of(line))


def test_every_name_of_the_tour_exists() -> None:
    text = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    names = re.findall(r"`(hone/[\w/]+\.py):([\w.]+)`", text)
    assert len(names) > 30
    for path, name in names:
        assert (ROOT / path).is_file(), path
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            assert hasattr(found, part), f"{path}:{name}"
            found = getattr(found, part)


@pytest.mark.parametrize("name", ["tuning", "checkpoints", "quickstart", "agents"])
def test_every_key_that_a_page_names_exists(name: str) -> None:
    from hone.config.document import explain
    from hone.verl.dialect import VERL

    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    keys = set(re.findall(r"(?<![\w./…])([a-z]\w*(?:\.\w+)+)=", text))
    assert keys
    for key in keys:
        assert explain(key, dialect=VERL)


def test_every_path_that_pages_link_to_exists() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_lines_of_the_rewards_page_compose_and_its_judge_is_made() -> None:
    from hone.rewards.judge import Judge
    from hone.verl.dialect import load_config

    text = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```\n(reward_model\.enable=true.*?)```", text, flags=re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert load_config(line.split()).reward_model.enable
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", text, flags=re.S) if "Judge" in c)
    namespace: dict[str, object] = {}
    exec(compile(code, "docs/rewards.md", "exec"), namespace)
    assert isinstance(namespace["judge"], Judge)


def loop_of_the_agents_page() -> str:
    text = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.S)[0]


def played(answers: list[str], *overrides: str) -> tuple[str, str]:
    """What the loop of the page made of two answers: all of it, and what the policy wrote."""
    from hone.agents.groups import GroupRequest
    from hone.agents.runner import LoopRunner
    from hone.models.tiny import character_tokenizer
    from hone.rollout.scripted import ScriptedRollout
    from hone.verl.dialect import load_config

    tokenizer = character_tokenizer()
    engine = ScriptedRollout(answers, tokenizer=tokenizer)
    runner = LoopRunner(load_config(overrides), engine, tokenizer, run_seed=1)
    row = {
        "prompt_ids": tokenizer.encode("2+3="),
        "agent_name": "second_thought",
        "uid": "u",
        "sample_index": 0,
        "trajectory_id": "u-0",
    }
    runner.submit([GroupRequest(0, (row,), ({"temperature": 1.0},))])
    runner.run_until(lambda: False)  # until no loop runs
    ((output,),) = (group.outputs for group in runner.pop_finished())
    written = [
        t
        for t, by_policy in zip(output.response_ids, output.response_mask, strict=True)
        if by_policy
    ]
    return tokenizer.decode(output.response_ids), tokenizer.decode(written)


def test_the_loop_of_the_agents_page_plays() -> None:
    exec(compile(loop_of_the_agents_page(), "agents.md", "exec"), {"__name__": "agents_page"})
    all_of_it, written = played(["five", "six"], "data.max_response_length=64")
    assert written == "five</s>six</s>"
    assert "Are you sure?" in all_of_it
    # A first turn that would take all there is leaves room for the second.
    all_of_it, written = played(["5" * 99, "6" * 99], "data.max_response_length=33")
    assert all_of_it == "5" * 10 + "Are you sure?" + "6" * 10


def test_a_relative_target_is_sought_where_the_command_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.plugins import PluginError

    (tmp_path / "configs").mkdir()
    listed = tmp_path / "configs" / "loops.yaml"
    listed.write_text("- name: second_thought\n  _target_: page_loops.py:SecondThought\n")
    own = loop_of_the_agents_page().replace('@register("second_thought")\n', "")
    (tmp_path / "page_loops.py").write_text(own)
    setting = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={listed}"
    monkeypatch.chdir(tmp_path)
    assert played(["5", "6"], setting)[1] == "5</s>6</s>"
    monkeypatch.chdir(tmp_path / "configs")
    with pytest.raises(PluginError, match=r"page_loops\.py"):
        played(["5", "6"], setting)


def test_the_recipes_pass_the_check_and_say_what_they_set() -> None:
    from hone.config.document import check as check_yaml
    from hone.verl.dialect import VERL

    files = sorted(ROOT.glob("recipes/tinyzero/*.yaml"))
    assert len(files) == 6
    for file in files:
        status, text = check_yaml(file, dialect=VERL)
        assert status == 0, text


def test_tinyzeros_script_and_yaml_ask_for_the_same_training() -> None:
    script = ROOT / "recipes" / "tinyzero" / "scripts" / "train_tiny_zero.sh"
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "echo", "BASE_MODEL": "M", "DATA_DIR": "D"}
    done = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, check=True
    )
    overrides = shlex.split(done.stdout)[2:]
    said = compose(overrides).config
    written = compose(config_name="countdown_ppo", config_path=ROOT / "recipes/tinyzero").config
    for one in (said, written):
        assert one.algorithm.adv_estimator == "gae"
    assert said.algorithm == written.algorithm
    assert said.actor_rollout_ref.actor.optim == written.actor_rollout_ref.actor.optim
    assert said.critic.optim == written.critic.optim
    for key in ("train_batch_size", "max_prompt_length", "max_response_length", "prompt_format"):
        assert getattr(said.data, key) == getattr(written.data, key)
    for key in ("ppo_mini_batch_size", "clip_ratio", "entropy_coeff", "ppo_epochs"):
        assert getattr(said.actor_rollout_ref.actor, key) == getattr(
            written.actor_rollout_ref.actor, key
        )


def test_the_script_says_which_variable_is_missing() -> None:
    script = ROOT / "recipes" / "tinyzero" / "scripts" / "train_tiny_zero.sh"
    done = subprocess.run(
        ["bash", str(script)], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "set BASE_MODEL" in done.stderr


@pytest.mark.slow
def test_every_command_of_the_quickstart_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    block = text[text.index("## Every command once") :]
    block = re.findall(r"```bash\n(.*?)```", block, flags=re.S)[0]
    run: Callable[[list[str]], int] = cli.main
    for line in block.strip().splitlines():
        words = shlex.split(line)
        if words[0] == "hone":
            assert run(words[1:]) == 0, line
        else:
            own = line.replace("python", shlex.quote(sys.executable), 1)
            subprocess.run(["bash", "-c", own], check=True, timeout=280)
    for file in ("responses.parquet", "scores.png", "report.html", "exported/config.json"):
        assert (tmp_path / file).is_file(), file
    origins = json.loads((tmp_path / "runs" / "grpo" / "config_origins.json").read_text())
    assert origins["algorithm.adv_estimator"] == "command line"
    assert json.loads((tmp_path / "scores.json").read_text())["sources"]
