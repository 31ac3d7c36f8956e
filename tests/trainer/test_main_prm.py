"""`hone train-prm`: the loss of the paper, two stages, the same however it is cut, killed or started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hone import cli
from hone.config import ConfigError, replace
from hone.config.sft import PRMConfig
from hone.data.files import remote_files
from hone.models.load import UnsupportedModel, load_classifier
from hone.models.paths import ModelNotFound, resolve_model_path
from hone.trainer import main_prm
from hone.trainer.ranks import Ranks, launch
from hone.trainer.sft.run import SFTRun
from hone.trainer.sft.tasks import StepTask
from hone.verl.dialect import load_config

from .around_fixtures import tiny_model, write_jsonl
from .test_sft import numbers

Run = Callable[..., Path]
ROWS = [
    {
        "prompt": f"{i}+1=",
        "completions": [f"{i}+1", *["so"] * (i % 3), str(i + 1 + 2 * (i % 2))],
        "labels": [True, *[None] * (i % 3), 0.1 if i % 2 else 0.9],
    }
    for i in range(16)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), layers=2)


@pytest.fixture
def settings(tmp_path: Path, model: Path) -> list[str]:
    return [
        f"data.train_files={write_jsonl(tmp_path / 'train.jsonl', ROWS)}",
        f"data.val_files={write_jsonl(tmp_path / 'val.jsonl', ROWS[:5])}",
        f"model.path={model}",
        "data.train_batch_size=4",
        "optim.lr=1e-2",
        "head_stage.lr=1e-2",
        "head_stage.total_training_steps=3",
        "trainer.total_training_steps=4",
        "trainer.logger=[jsonl]",
    ]


def config_of(settings: Sequence[str], folder: Path, *overrides: str) -> PRMConfig:
    run_folder = f"trainer.default_local_dir={folder}"
    config: Any = load_config([*settings, run_folder, *overrides], config_name="prm_trainer")
    return config


@pytest.fixture
def train(settings: list[str], tmp_path: Path) -> Run:
    def go(name: str, *overrides: str) -> Path:
        main_prm.run(config_of(settings, tmp_path / name, *overrides))
        return tmp_path / name

    return go


def weights(folder: Path | str) -> dict[str, torch.Tensor]:
    lm = load_classifier(str(folder), ("bad", "good"), dtype=torch.float32)
    return {name: p.detach() for name, p in lm.named_parameters()}


def plain_loss(folder: Path, rows: Sequence[dict[str, Any]]) -> float:
    """The mean cross-entropy over the steps in float64, from transformers' own classifier and softmax."""
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    path = resolve_model_path(str(folder))
    tokenizer = AutoTokenizer.from_pretrained(path)
    lm = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float64).eval()
    losses = []
    for row in rows:
        turn = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        for step, label in zip(row["completions"], row["labels"], strict=True):
            text += step + "\n"
            if label is not None:
                ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
                chance = torch.log_softmax(lm(ids).logits[0, -1], -1)
                losses.append(-(1 - float(label)) * chance[0] - float(label) * chance[1])
    return float(torch.stack(losses).mean().detach())


def test_the_validation_loss_is_the_cross_entropy_of_the_exported_classifier(train: Run) -> None:
    folder = train("run")
    last = numbers(folder)[-1]
    assert last["val/loss"] == pytest.approx(plain_loss(folder, ROWS[:5]), rel=1e-5)
    parts = 8 * last["val/accuracy_of_good_steps"] + 2 * last["val/accuracy_of_bad_steps"]
    assert last["val/accuracy"] == pytest.approx(parts / 10)
    assert [row["step"] for row in numbers(folder / "head")] == [1, 2, 3]
    assert [row["step"] for row in numbers(folder)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_the_first_stage_trains_the_head_alone_and_the_second_starts_from_it(
    train: Run, model: Path
) -> None:
    folder = train("run", "trainer.total_training_steps=1", "optim.lr=0")
    fresh, head, last = weights(model), weights(folder / "head"), weights(folder)
    changed = {name for name in fresh if not torch.equal(fresh[name], head[name])}
    assert changed == {"score.weight", "score.bias"}
    assert all(torch.equal(head[name], last[name]) for name in head)
    folder = train("whole", "head_stage.total_epochs=0")
    assert not (folder / "head").exists()
    after = weights(folder)
    assert all(not torch.equal(fresh[name], after[name]) for name in fresh)
    only_head = train("only_head", "trainer.total_epochs=0")
    assert {n for n, p in weights(only_head).items() if not torch.equal(p, fresh[n])} == changed


def test_how_a_batch_is_cut_changes_nothing(train: Run) -> None:
    uninterrupted = train("whole")
    rows = ["data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=1"]
    for folder in (train("tokens", "data.max_token_len_per_gpu=40", "data.max_length=40"),
                   train("rows", *rows)):  # fmt: skip
        for a, b in zip(numbers(uninterrupted), numbers(folder), strict=True):
            assert b == pytest.approx(a, rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["head", "all"])
def test_a_killed_run_resumes_with_the_numbers_of_the_uninterrupted_one(
    train: Run,
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
) -> None:
    uninterrupted = train("whole", "trainer.save_freq=1")
    fit = SFTRun.fit

    def dying(self: SFTRun) -> None:
        if self._task.trained_part == stage:
            step = self.trainer.step

            def last() -> dict[str, float]:
                if self.trainer.step_number == 2:
                    raise KeyboardInterrupt
                return step()

            monkeypatch.setattr(self.trainer, "step", last)
        fit(self)

    monkeypatch.setattr(SFTRun, "fit", dying)
    with pytest.raises(KeyboardInterrupt):
        train("killed", "trainer.save_freq=1")
    monkeypatch.setattr(SFTRun, "fit", fit)
    killed = train("killed", "trainer.save_freq=1")
    for part in ("head", "."):
        assert numbers(killed / part) == numbers(uninterrupted / part)
    for name, tensor in weights(uninterrupted).items():
        assert torch.equal(tensor, weights(killed)[name]), name


def test_lora_trains_adapters_and_head_and_exports_both(train: Run) -> None:
    folder = train("run", "model.lora_rank=2", "optim.lr=1e-1", "head_stage.total_epochs=1")
    step = folder / "global_step_4"
    assert (step / "lora_adapter" / "adapter_model.safetensors").is_file()
    before, after = weights(folder / "head"), weights(step)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {"score.weight", "score.bias"} < changed
    assert all("proj" in name or name.startswith("score") for name in changed)
    last = numbers(folder)[-1]["val/loss"]
    assert last == pytest.approx(plain_loss(folder, ROWS[:5]), rel=1e-5)


def test_the_worker_of_rl_reads_the_tokens_the_model_was_trained_on(
    train: Run, settings: list[str], tmp_path: Path
) -> None:
    from hone.agents.collate import collate_outputs
    from hone.agents.contract import AgentLoopOutput
    from hone.data.prompt_ids import render_prompt
    from hone.workers.process_reward_model import ProcessRewardModelWorker

    folder = train("run")
    config = config_of(settings, folder)
    run = SFTRun(replace(config, "model.path", str(folder)), Ranks(), task=StepTask())
    row = run.rows[1]
    batch = StepTask().collate([row], run.tokenizer.pad_token_id)
    trained = run.trainer.engine.infer(batch)["scores"][0][batch.batch["response_mask"][0] == 1]
    tokenizer = run.tokenizer
    prompt = render_prompt("1+1=", tokenizer)
    # The character tokenizer has no "\n\n" token, so the response's steps end at "\n".
    response = tokenizer.encode("1+1\nso\n4\n", add_special_tokens=False)
    data = collate_outputs([AgentLoopOutput(prompt, response, [1] * len(response))], pad_token_id=0)
    path = resolve_model_path(str(folder))
    worker = ProcessRewardModelWorker(
        load_config(
            [
                "reward_model.enable=true",
                "reward_model.type=prm",
                f"reward_model.model.path={path}",
                f"actor_rollout_ref.model.path={path}",
                "reward_model.split_step_char='\n'",
                "reward_model.credit_assignment=gamma-decay",
                "trainer.device=cpu",
            ]
        )
    )
    worker.init_model()
    scored = worker.compute_rm_score(data).batch
    scores = scored["step_rewards"][scored["step_mask"].bool()]
    assert scores[[0, 2]].tolist() == pytest.approx(torch.tanh(trained / 2).tolist(), abs=1e-5)


def test_a_model_with_other_labels_is_refused(train: Run, model: Path) -> None:
    folder = train("run", "trainer.total_epochs=0")
    with pytest.raises(
        UnsupportedModel, match=r"with 2 labels, but a SequenceClassification model with 1"
    ):
        load_classifier(str(folder), ("reward",), dtype=torch.float32)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["head_stage.total_epochs=0", "trainer.total_epochs=0"], "leave nothing to train"),
        (["checkpoint.save_contents=[model]"], "needs hf_model"),
    ],
)
def test_a_run_without_a_result_is_refused(train: Run, overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        train("run", *overrides)


def test_the_command_trains_validates_and_names_a_bad_row(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = f"trainer.default_local_dir={tmp_path / 'run'}"
    assert cli.main(["train-prm", *settings, run_folder]) == 0
    assert (tmp_path / "run" / "global_step_4" / "huggingface" / "config.json").is_file()
    bad = write_jsonl(tmp_path / "bad.jsonl", [*ROWS[:2], ROWS[2] | {"labels": [1]}])
    assert cli.main(["train-prm", *settings, run_folder, f"data.train_files={bad}"]) == 2
    assert "bad.jsonl, row 2: 'completions' has" in capsys.readouterr().err
    assert cli.main(["train-prm", "model.path=m"]) == 2
    assert "data.train_files was not given" in capsys.readouterr().err


def test_a_finished_head_is_found_under_its_run(train: Run, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        resolve_model_path(str(tmp_path))
    folder = train("run", "head_stage.total_training_steps=9")
    assert Path(resolve_model_path(str(folder))).parts[-2] == "global_step_4"  # not head's step 9


@pytest.mark.slow
def test_two_ranks_give_the_numbers_of_one(train: Run, settings: list[str], tmp_path: Path) -> None:
    one, two = train("one"), tmp_path / "two"
    launch(2, "hone.trainer.main_prm", [*settings, f"trainer.default_local_dir={two}"])
    for part in ("head", "."):
        for a, b in zip(numbers(one / part), numbers(two / part), strict=True):
            assert b == pytest.approx(a, rel=1e-3, abs=1e-5)
    for name, tensor in weights(one).items():
        assert torch.allclose(tensor, weights(two)[name], atol=1e-4), name


def test_each_stage_has_its_own_place_in_a_store(settings: list[str], tmp_path: Path) -> None:
    store = f"memory://{tmp_path.name}/prm"
    config = config_of(settings, tmp_path / "run", f"trainer.default_hdfs_dir={store}")
    main_prm.run(config)
    manifests = {name for name in remote_files(store) if name.endswith("manifest.json")}
    assert manifests == {"global_step_4/manifest.json", "head/global_step_3/manifest.json"}


@pytest.mark.parametrize(
    ("place", "num_stages"),
    [
        ("run/head/global_step_2", 2),
        ("HERE/run/head/global_step_2", 2),
        ("memory://prm/head/global_step_2", 2),
        ("HERE/run/global_step_2", 1),
        ("memory://prm/global_step_2", 1),
    ],
)
def test_a_checkpoint_to_resume_belongs_to_the_stage_whose_folder_it_is_in(
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    num_stages: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    resume = ["trainer.resume_mode=resume_path", "trainer.default_hdfs_dir=memory://prm"]
    path = f"trainer.resume_from_path={place.replace('HERE', str(tmp_path))}"
    assert len(main_prm.stages(config_of(settings, Path("run"), *resume, path))) == num_stages
