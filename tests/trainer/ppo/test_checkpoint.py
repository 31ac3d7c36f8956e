"""Checkpoints: resumed runs go on as if nothing had happened; damage and full disks are survived."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save

from hone.engine.saved_state import no_single_process_warning
from hone.tracking import RunFolder
from hone.tracking.manifest import FolderNotShared, find_damage, write_manifest
from hone.trainer.ppo import checkpoint
from hone.trainer.ppo.checkpoint import CheckpointError

from ..runs import Run, Task, opened

FOUR = ("trainer.save_freq=1", "trainer.total_training_steps=4")
TWO = ("trainer.save_freq=1", "trainer.total_training_steps=2")
FIXED_SCHEDULE = "actor_rollout_ref.actor.optim.total_training_steps=4"


@pytest.fixture(scope="module")
def uninterrupted(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four steps of GRPO that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    return Run(folder).train(task.overrides(folder, *FOUR))


RESUMED = {
    "grpo": [],
    "critic": ["algorithm.adv_estimator=gae"],
    "adaptive-kl-epochs": [
        "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=20", "algorithm.kl_ctrl.target_kl=0.001",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.shuffle=true",
    ],
    "cosine-lora": [
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", FIXED_SCHEDULE,
        "actor_rollout_ref.model.lora_rank=4",
    ],
    "bf16-pf-ppo": ["actor_rollout_ref.actor.fsdp_config.dtype=bf16", "algorithm.use_pf_ppo=true"],
}  # fmt: skip
SLOW = [pytest.mark.slow]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(overrides, id=name, marks=[] if name in ("grpo", "critic") else SLOW)
        for name, overrides in RESUMED.items()
    ],
)
def test_a_resumed_run_has_the_metrics_of_an_uninterrupted_one(
    train: Callable[..., Run], overrides: list[str]
) -> None:
    uninterrupted = train(*FOUR, *overrides, folder="whole")
    train(*TWO, *overrides, folder="parts")
    parts = train(*FOUR, *overrides, folder="parts")
    assert [line["step"] for line in parts.metrics] == [1, 2, 3, 4]
    assert parts.numbers == uninterrupted.numbers


def test_the_adaptive_kl_weight_moves_and_is_kept(train: Callable[..., Run]) -> None:
    run = train(
        *FOUR,
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=20",
    )
    weights = run.series("actor/reward_kl_penalty_coeff")
    assert len(set(weights)) == 4
    state = checkpoint.read_state(run.checkpoint(3))
    assert state["kl_controller"]["value"] == weights[3]


def test_what_lies_in_a_checkpoint(train: Callable[..., Run]) -> None:
    run = train(*TWO, "algorithm.adv_estimator=gae")
    assert run.checkpoints() == ["global_step_1", "global_step_2"]
    names = {p.name for p in run.checkpoint(2).iterdir()}
    assert names == {"actor", "critic", "trainer_state.json", "manifest.json"}
    assert (run.checkpoint(2) / "actor" / "huggingface" / "model.safetensors").is_file()
    assert (run.folder / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_the_last_step_is_saved_whatever_the_frequency(train: Callable[..., Run]) -> None:
    assert train("trainer.save_freq=-1").checkpoints() == ["global_step_2"]
    assert train(
        "trainer.save_freq=3", "trainer.total_training_steps=4", folder="b"
    ).checkpoints() == [
        "global_step_3",
        "global_step_4",
    ]


def test_a_finished_run_says_so_and_leaves_its_folder_alone(
    train: Callable[..., Run], task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(*TWO)
    files = {p: p.read_bytes() for p in run.folder.rglob("*") if p.is_file()}
    copy = shutil.copytree(task.model, tmp_path / "copy")
    capsys.readouterr()
    train(*TWO, "actor_rollout_ref.rollout.n=3", f"actor_rollout_ref.model.path={copy}", origins={})
    output = capsys.readouterr().out.splitlines()
    assert len(output) == 1
    assert output[0].startswith(f"already at step 2 of 2: nothing to do ({run.checkpoint(2)})")
    assert {p: p.read_bytes() for p in run.folder.rglob("*") if p.is_file()} == files


def test_validation_alone_keeps_the_config_of_the_weights(
    train: Callable[..., Run], task: Task, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(*TWO)
    written = (run.folder / "config.yaml").read_text()
    capsys.readouterr()
    train(*TWO, task.validated(), "trainer.val_only=true", "actor_rollout_ref.rollout.n=3")
    assert capsys.readouterr().out == f"resumed from {run.checkpoint(2)}\n"
    assert any(name.startswith("val-core/") for name in run.metrics[-1])
    assert (run.folder / "config.yaml").read_text() == written
    fresh = train(task.validated(), "trainer.val_only=true", folder="fresh")
    assert (fresh.folder / "config.yaml").is_file()


def test_a_run_that_trains_nothing_discards_nothing(
    train: Callable[..., Run], task: Task, tmp_path: Path
) -> None:
    from hone.models.load import load_tokenizer
    from hone.models.tiny import save_pretrained, tiny_lm

    run = train(*FOUR)
    metrics, checkpoints = run.metrics, run.checkpoints()
    earlier = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run.checkpoint(2)}")
    for source in (earlier, ("trainer.resume_mode=disable",)):
        train(*FOUR, task.validated(), "trainer.val_only=true", *source)
    train(*TWO, *earlier)  # already at step 2 of 2
    tokenizer = load_tokenizer(task.model)
    other = tiny_lm(len(tokenizer), hidden=32, layers=1, mlp=48, tie_embeddings=False)
    model = save_pretrained(other, tokenizer, tmp_path / "other")
    with pytest.raises(Exception, match="holds another model"):
        train(*FOUR, *earlier, f"actor_rollout_ref.model.path={model}")
    assert run.checkpoints() == checkpoints
    assert run.metrics[:4] == metrics
    assert [line["step"] for line in run.metrics[4:]] == [2, 0]


def test_the_latest_checkpoint_is_the_one_that_a_run_resumes_from(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    run = RunFolder(tmp_path)
    for step in (1, 2, 3):
        run.checkpoint(step).mkdir()
    run.latest_file.write_text("3")
    checkpoint.discard_after(run, (2, run.checkpoint(2)))
    assert run.latest_file.read_text() == "2"
    checkpoint.discard_after(run, None)
    assert not run.latest_file.exists()


def test_a_run_folder_in_the_home_folder(
    train: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    train(*TWO, "trainer.default_local_dir=~/run", "trainer.rollout_data_dir=~/rollouts")
    assert (tmp_path / "home" / "run" / "global_step_2").is_dir()
    assert (tmp_path / "home" / "rollouts" / "step_2.parquet").is_file()
    assert not (tmp_path / "~").exists()


def test_a_run_says_where_it_goes_on_and_where_its_result_lies(
    train: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    console = "trainer.logger=[console,jsonl]"
    run = train(*TWO, console)
    last, look = capsys.readouterr().out.splitlines()[-2:]
    assert last.startswith(f"done at step 2: the model is in {run.checkpoint(2)};")
    assert last.endswith(f"are in {run.folder}")
    assert look == f"look at it: hone report {run.folder} --out report.html"
    train(*FOUR, console)
    output = capsys.readouterr().out.splitlines()
    assert output[0] == f"resumed from {run.checkpoint(2)}"
    assert f"the model is in {run.checkpoint(4)}" in output[-2]
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4]
    train(console, "trainer.total_training_steps=1", folder="unsaved")
    assert "no checkpoint of it was saved" in capsys.readouterr().out.splitlines()[-2]


def test_another_model_over_a_run_is_a_sentence_and_exit_code_2(
    train: Callable[..., Run], task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hone import cli
    from hone.models.load import load_tokenizer
    from hone.models.tiny import save_pretrained, tiny_lm

    run = train(*TWO)
    written = (run.folder / "config.yaml").read_text()
    tokenizer = load_tokenizer(task.model)
    other = tiny_lm(
        len(tokenizer), hidden=32, layers=2, mlp=48, tie_embeddings=False, family="llama"
    )
    save_pretrained(other, tokenizer, tmp_path / "llama")
    for setting in (f"model.path={tmp_path / 'llama'}", "model.lora_rank=4"):
        overrides = task.overrides(run.folder, *FOUR, f"actor_rollout_ref.{setting}")
        capsys.readouterr()
        assert cli.main(["train", *overrides]) == 2
        output = capsys.readouterr().err
        assert f"ModelMismatch: {run.checkpoint(2)}/actor holds another model" in output
        assert (run.folder / "config.yaml").read_text() == written


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def delete(file: Path) -> None:
    file.unlink()


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    train: Callable[..., Run], uninterrupted: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = train(*TWO)
    for number, (harm, which) in enumerate(
        [
            (delete, "actor/huggingface/model.safetensors"),
            (flip, "actor/__0_0.distcp"),
            (truncate, "manifest.json"),
            (delete, "manifest.json"),
        ]
    ):
        copy = RunFolder(shutil.copytree(first.folder, tmp_path / f"copy-{number}"))
        harm(copy.checkpoint(2) / which)
        assert checkpoint.newest_valid_checkpoint(copy) == (1, copy.checkpoint(1)), which
    truncate(first.checkpoint(2) / "trainer_state.json")
    with caplog.at_level(logging.WARNING):
        run = train(*FOUR)
    assert any("global_step_2 is damaged" in r.getMessage() for r in caplog.records)
    assert run.numbers == uninterrupted.numbers
    assert find_damage(run.checkpoint(2)) is None  # written again


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_without_any_sound_checkpoint_the_run_stops_and_changes_nothing(
    train: Callable[..., Run], task: Task, capsys: pytest.CaptureFixture[str]
) -> None:
    from hone import cli

    run = train(*TWO)
    numbers = run.numbers
    for step in (1, 2):
        delete(run.checkpoint(step) / "trainer_state.json")
    (run.folder / ".global_step_3.tmp").mkdir()
    (run.folder / ".global_step_3.tmp" / "half").write_text("x")
    before = contents(run.folder)
    assert cli.main(["train", *task.overrides(run.folder, *TWO)]) == 2
    output = capsys.readouterr().err
    assert "has 2 checkpoints, but none can be resumed (global_step_2: trainer_state.json" in output
    assert "nothing was changed" in output
    assert "trainer.resume_mode=disable" in output
    assert contents(run.folder) == before
    assert train(*TWO, "trainer.resume_mode=disable").numbers == numbers


def test_a_resealed_state_of_another_kind_is_a_sentence(train: Callable[..., Run]) -> None:
    run = train(*TWO)
    for text in ("[]", "{}", "5", "[" * 100_000):
        (run.checkpoint(2) / "trainer_state.json").write_text(text)
        write_manifest(run.checkpoint(2))
        with pytest.raises(CheckpointError, match="is not the state of a run"):
            train(*FOUR)


def test_pruning_leaves_a_link_and_what_it_leads_to_alone(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    run = train(*TWO)
    archive = tmp_path / "archive" / "global_step_1"
    archive.parent.mkdir()
    run.checkpoint(1).rename(archive)
    run.checkpoint(1).symlink_to(archive)
    before = contents(archive)
    train(*FOUR, "trainer.max_actor_ckpt_to_keep=1")
    assert run.checkpoints() == ["global_step_1", "global_step_4"]
    assert run.checkpoint(1).is_symlink()
    assert contents(archive) == before
    train(*TWO, "trainer.resume_mode=disable")  # set aside, then written again in its place
    assert contents(archive) == before
    assert find_damage(archive) is None


def test_a_checkpoint_is_on_the_disk_before_it_counts_and_before_others_go(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    sync, rename = os.fsync, os.rename

    def synced(handle: int) -> None:
        calls.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        sync(handle)

    def renamed(source: Any, target: Any, **keywords: Any) -> None:
        calls.append(("rename", str(target)))
        rename(source, target, **keywords)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    run = train(*TWO)
    final = run.checkpoint(2)
    at = calls.index(("rename", str(final)))
    before = {name for kind, name in calls[:at] if kind == "sync"}
    temporary = checkpoint.temporary_folder(RunFolder(run.folder), 2)
    for file in final.rglob("*"):
        assert str(temporary / file.relative_to(final)) in before, file
    assert str(run.folder / "metrics.jsonl") in before
    assert ("sync", str(run.folder)) in calls[at:]


def test_every_file_of_a_run_is_readable_as_the_umask_says(train: Callable[..., Run]) -> None:
    before = os.umask(0o022)
    try:
        run = train(*TWO, "actor_rollout_ref.model.lora_rank=2")
    finally:
        os.umask(before)
    modes = {p.name: oct(p.stat().st_mode & 0o777) for p in run.folder.rglob("*") if p.is_file()}
    assert "adapter_model.safetensors" in modes
    assert set(modes.values()) == {"0o644"}


class Command:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_a_resealed_checkpoint_of_others_runs_nothing(
    train: Callable[..., Run], task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hone import cli

    run = train(*TWO)
    for file in ("actor/.metadata", "actor/__0_0.distcp"):
        (run.checkpoint(2) / file).write_bytes(pickle.dumps(Command(tmp_path / "ran")))
        write_manifest(run.checkpoint(2))
        if file == "actor/.metadata":
            assert cli.main(["train", *task.overrides(run.folder, *FOUR)]) == 2
            assert "nothing of it was run" in capsys.readouterr().err
            shutil.rmtree(run.checkpoint(2) / "actor" / "huggingface")
            write_manifest(run.checkpoint(2))
            assert cli.main(["export", str(run.folder), str(tmp_path / "out")]) == 2
            assert "nothing of it was run" in capsys.readouterr().err
    assert cli.main(["export", str(run.checkpoint(2)), str(tmp_path / "out")]) == 2
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def test_old_checkpoints_go_also_after_resuming(train: Callable[..., Run]) -> None:
    keep = "trainer.max_actor_ckpt_to_keep=2"
    assert train(*TWO, keep).checkpoints() == ["global_step_1", "global_step_2"]
    assert train(*FOUR, keep).checkpoints() == ["global_step_3", "global_step_4"]
    assert train(*FOUR, keep, "trainer.max_critic_ckpt_to_keep=1", folder="b").checkpoints() == [
        "global_step_4"
    ]


def test_a_damaged_checkpoint_takes_no_place_among_the_kept(train: Callable[..., Run]) -> None:
    run = train(*FOUR)
    for step in (3, 4):
        truncate(run.checkpoint(step) / "trainer_state.json")
    train(
        "trainer.save_freq=-1", "trainer.total_training_steps=3", "trainer.max_actor_ckpt_to_keep=1"
    )
    assert [n for n in run.checkpoints() if not n.endswith(".earlier")] == ["global_step_3"]
    assert find_damage(run.checkpoint(3)) is None


def test_disable_starts_anew_and_forgets_the_run_before(
    train: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    first = train(*FOUR).numbers
    with caplog.at_level(logging.WARNING):
        run = train(*TWO, "trainer.resume_mode=disable")
    assert [line["step"] for line in run.metrics] == [1, 2]
    assert run.numbers == first[:2]
    # The earlier run's later checkpoints are not mistaken for this one's.
    assert train(*FOUR).numbers == first
    assert "global_step_4.earlier" in run.checkpoints()
    assert any("renamed to global_step_4.earlier" in r.getMessage() for r in caplog.records)


def test_a_path_names_the_checkpoint_to_continue(
    train: Callable[..., Run], uninterrupted: Run
) -> None:
    source = uninterrupted.checkpoint(2)
    run = train(*FOUR, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={source}")
    assert run.numbers == uninterrupted.numbers[2:]


def test_a_path_to_nothing_is_told(train: Callable[..., Run], tmp_path: Path) -> None:
    for path, sentence in (("nowhere", "must name a folder global_step_N"),
                           ("global_step_x", "must name a folder global_step_N"),
                           ("global_step_9", "does not exist")):  # fmt: skip
        with pytest.raises(CheckpointError, match=sentence):
            train(
                "trainer.resume_mode=resume_path",
                f"trainer.resume_from_path={tmp_path / path}",
            )


def test_half_a_checkpoint_of_a_killed_process_is_cleared(train: Callable[..., Run]) -> None:
    run = train(*TWO)
    leftover = run.folder / ".global_step_3.tmp"
    (leftover / "actor").mkdir(parents=True)
    train("trainer.total_training_steps=2")
    assert not leftover.exists()


@pytest.mark.parametrize("where", ["state", "model"])
def test_a_full_disk_is_told_and_the_last_checkpoint_stays(
    train: Callable[..., Run],
    uninterrupted: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    real = checkpoint.write_state

    def no_room(folder: Path, state: dict[str, Any]) -> None:
        if state["step"] == 3:
            raise full
        real(folder, state)

    if where == "state":
        monkeypatch.setattr(checkpoint, "write_state", no_room)
    else:
        from torch.distributed.checkpoint import filesystem

        write = filesystem._write_item

        def no_room_for_3(*arguments: Any, **keywords: Any) -> Any:
            if "global_step_3" in str(arguments[0]) or "global_step_3" in str(
                getattr(arguments[1], "name", "")
            ):
                raise full
            return write(*arguments, **keywords)

        monkeypatch.setattr(filesystem, "_write_item", no_room_for_3)
    with pytest.raises(CheckpointError) as caught:
        train(*FOUR)
    message = str(caught.value)
    assert "the disk is full: step 3" in message
    assert "global_step_2 is untouched" in message
    assert "Free space" in message
    run = Run(tmp_path / "run")
    assert run.checkpoints() == ["global_step_1", "global_step_2"]
    assert not list(run.folder.glob(".global_step_*"))
    monkeypatch.undo()
    assert train(*FOUR).numbers == uninterrupted.numbers


def weights_in_training(trainer: Any) -> dict[str, torch.Tensor]:
    worker = trainer.actor._executor._host.worker("actor")
    return {name: tensor.clone() for name, tensor in worker.engine.named_hf_weights()}


@pytest.mark.parametrize("level", ["checkpoint", "run"])
def test_a_run_may_start_from_another_run(
    train: Callable[..., Run], task: Task, tmp_path: Path, level: str
) -> None:
    first = train(*TWO)
    path = first.checkpoint(2) if level == "checkpoint" else first.folder
    with opened(task.overrides(tmp_path / "b", f"actor_rollout_ref.model.path={path}")) as trainer:
        started = weights_in_training(trainer)
    exported = load_file(first.checkpoint(2) / "actor" / "huggingface" / "model.safetensors")
    assert all(torch.equal(started[name], exported[name]) for name in exported)
    with opened(task.overrides(tmp_path / "c")) as trainer:
        untrained = weights_in_training(trainer)
    assert not all(torch.equal(untrained[name], exported[name]) for name in exported)


def test_the_export_opens_with_transformers_and_is_the_trained_policy(
    train: Callable[..., Run], task: Task
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hone.agents.collate import input_ids

    run = train(*TWO)
    folder = run.checkpoint(2) / "actor" / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with opened(task.overrides(run.folder)) as trainer:
        trainer.resume()
        assert trainer.global_step == 2
        batch = trainer.collect()
    row = batch.batch["attention_mask"][0].bool()
    ids = input_ids(batch)[0][row]
    length = int(batch.batch["response_mask"][0].sum())
    log_p = torch.log_softmax(model(ids[None]).logits[0], -1)[-length - 1 : -1]
    expected = log_p.gather(-1, ids[-length:, None]).squeeze(-1)
    result = batch.batch["rollout_log_probs"][0, :length]
    torch.testing.assert_close(result, expected.detach(), rtol=1e-4, atol=1e-4)
    assert tokenizer.decode(tokenizer.encode("1+2=", add_special_tokens=False)) == "1+2="


def test_a_checkpoint_whose_shards_lie_on_another_disk_is_not_kept(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)

    def write() -> None:
        with checkpoint.atomic_folder(run, 1) as folder, no_single_process_warning():
            for role in ("actor", "critic"):
                save({"x": torch.ones(2)}, checkpoint_id=str(folder / role), no_dist=True)
            (folder / "critic" / "__0_0.distcp").unlink()  # as if its rank were on another machine

    with pytest.raises(
        FolderNotShared, match=r"critic/__0_0\.distcp \(the shard of rank 0\) .* same"
    ):
        write()
    assert run.checkpoints() == []
