"""`hone generate`: n samples a row, the same file after a kill, sharded over ranks or not."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.config import ConfigError, replace
from hone.data.reading import read_rows
from hone.data.rows import BadRowPolicy, DataError
from hone.rollout.contract import RolloutError, Sampling, TokenOutput
from hone.tracking.console import screen
from hone.tracking.lock import lock_target
from hone.tracking.manifest import write_manifest
from hone.trainer import generation as generation_module
from hone.trainer import main_generation
from hone.trainer.generation import Generation, build_engine, respond
from hone.trainer.job_files import GenerationError, JobFiles
from hone.trainer.ranks import Ranks
from hone.verl.dialect import load_config

from .around_fixtures import prompts, tiny_model, write_jsonl

COUNT = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(tmp_path: Path, model: Path) -> list[str]:
    rows = write_jsonl(tmp_path / "rows.jsonl", prompts(COUNT))
    return [
        f"data.path={rows}",
        f"model.path={model}",
        "data.n_samples=3",
        "data.batch_size=2",
        "rollout.response_length=6",
        "rollout.prompt_length=32",
        f"data.output_path={tmp_path / 'out.parquet'}",
    ]


def generation(settings: list[str], ranks: Ranks | None = None) -> Generation:
    config = load_config(settings, config_name="generation")
    return Generation(config, ranks or Ranks())


def taken_away(output: Path) -> bytes:
    """What a run wrote, out of the way of the next one."""
    content = output.read_bytes()
    output.unlink()
    return content


def read(path: Path) -> list[dict[str, Any]]:
    return list(read_rows(path, BadRowPolicy("raise")).scan())


def test_each_row_gets_its_samples_and_keeps_its_columns(settings: list[str]) -> None:
    out = generation(settings).run()
    rows = read(out)
    assert [row["extra_info"]["index"] for row in rows] == list(range(COUNT))
    assert all(len(row["responses"]) == 3 for row in rows)
    assert len({text for row in rows for text in row["responses"]}) > COUNT
    assert all(
        1 <= length <= 6 and (reason == "stop" or length == 6)
        for row in rows
        for length, reason in zip(row["response_lengths"], row["stop_reasons"], strict=True)
    )
    assert not list(out.parent.glob("*.parts"))


def test_greedy_decoding_gives_the_reference_engines_text(settings: list[str]) -> None:
    greedy = [*settings, "rollout.do_sample=false", "data.n_samples=1", "data.overwrite=true"]
    ours = read(generation(greedy).run())
    slow = read(generation([*greedy, "rollout.name=hf"]).run())
    assert [row["responses"] for row in ours] == [row["responses"] for row in slow]


def test_a_killed_run_resumes_at_the_row_and_writes_the_same_file(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = taken_away(generation(settings).run())
    append = JobFiles.append
    written: list[int] = []

    def dying(self: JobFiles, row: int, columns: dict[str, Any]) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(row)
        append(self, row, columns)

    monkeypatch.setattr(JobFiles, "append", dying)
    killed = generation(settings)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    file = next(killed.files.folder.glob("rank_*.jsonl"))
    with file.open("a") as stream:
        stream.write('{"row": 5, "colu')  # torn by the kill
    redone: list[int] = []

    def counting(self: JobFiles, row: int, columns: dict[str, Any]) -> None:
        redone.append(row)
        append(self, row, columns)

    monkeypatch.setattr(JobFiles, "append", counting)
    assert generation(settings).run().read_bytes() == expected
    assert sorted(written + redone) == list(range(COUNT))


def test_parts_of_another_job_are_left_alone_and_named(
    settings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = generation(settings)
    first.files.append(0, {"responses": ["stale"]})
    other = generation([*settings, "rollout.temperature=0.5"])
    rows = read(other.run())
    assert rows[0]["responses"] != ["stale"]
    assert str(first.files.folder) in caplog.text
    assert 0 in first.files.finished_columns()


def test_another_kind_of_output_keeps_the_work(settings: list[str], tmp_path: Path) -> None:
    first = generation(settings)
    first.files.append(0, {"responses": ["kept"]})
    generation([*settings, f"data.output_path={tmp_path / 'out.jsonl'}"]).run()
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["responses"] == ["kept"]


@pytest.mark.parametrize(
    "change",
    [
        *("trainer.seed=2", "rollout.seed=2", "data.max_samples=2", "data.n_samples=1"),
        *("rollout.top_p=0.5", "rollout.response_length=5", "rollout.name=hf"),
        *("model.custom_chat_template=x", "data.prompt_format=raw"),
    ],
)
def test_what_decides_the_responses_makes_another_job(settings: list[str], change: str) -> None:
    assert generation([*settings, change]).files.folder != generation(settings).files.folder


def test_where_and_how_fast_does_not_make_another_job(settings: list[str], tmp_path: Path) -> None:
    changes = ["data.batch_size=7", "trainer.n_gpus_per_node=2", f"data.path={tmp_path}/copy.jsonl"]
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "rows.jsonl").read_bytes())
    assert generation([*settings, *changes]).files.folder == generation(settings).files.folder


def test_the_arguments_of_another_engine_decide_its_responses(settings: list[str]) -> None:
    def folder(*overrides: str) -> Path:
        config: Any = load_config([*settings, *overrides], config_name="generation")
        # A name in the settings would become native on a machine without vLLM.
        return Generation(replace(config, "rollout.name", "vllm"), Ranks()).files.folder

    assert folder("+rollout.engine_kwargs.vllm.quantization=fp8") != folder()
    assert folder("+rollout.engine_kwargs.sglang.quantization=fp8") == folder()


def test_parts_that_a_killed_process_left_beside_its_output_are_deleted(
    settings: list[str],
) -> None:
    job = generation(settings)
    job.run()
    job.files.append(0, {"responses": ["stale"]})
    generation(settings).run()
    assert not job.files.folder.exists()


@pytest.mark.parametrize("option", [["--search", "http://x/a,b"], ["--search=http://x/a,b"]])
def test_the_url_of_a_search_may_have_commas_and_follow_an_equals_sign(option: list[str]) -> None:
    (argument,) = main_generation._expand_search_option(option)
    config: Any = load_config([argument], config_name="generation")
    assert config.search.url == "http://x/a,b"


def test_other_rows_make_another_job(settings: list[str], tmp_path: Path) -> None:
    before = generation(settings).files.folder
    write_jsonl(tmp_path / "rows.jsonl", prompts(COUNT, "multiply/three"))
    assert generation(settings).files.folder != before


def test_a_model_written_again_in_its_place_makes_another_job(
    settings: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    overrides = [*settings, f"model.path={folder}"]
    tiny_model(folder)
    before = generation(overrides)
    sizes = sorted((file.name, file.stat().st_size) for file in folder.iterdir())
    tiny_model(folder, seed=7)
    assert sorted((file.name, file.stat().st_size) for file in folder.iterdir()) == sizes
    assert generation(overrides).files.folder != before.files.folder


def test_a_newer_checkpoint_of_the_run_makes_another_job(
    settings: list[str], model: Path, tmp_path: Path
) -> None:
    overrides = [*settings, f"model.path={tmp_path / 'run'}"]
    folders = []
    for step in (1, 2):
        target = tmp_path / "run" / f"global_step_{step}" / "huggingface"
        shutil.copytree(model, target)  # the same bytes and times: only the place is another
        write_manifest(target.parent)
        folders.append(generation(overrides).files.folder)
    assert folders[0] != folders[1]


@pytest.mark.parametrize("key", ["tokenizer_path", "lora_adapter_path"])
def test_another_tokenizer_or_adapter_in_its_place_makes_another_job(
    settings: list[str], model: Path, tmp_path: Path, key: str
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(model, folder)
    overrides = [*settings, f"model.{key}={folder}"]
    before = generation(overrides).files.folder
    assert before == generation(overrides).files.folder
    os.utime(folder / "tokenizer.json", ns=(1, 1))
    assert generation(overrides).files.folder != before


def test_a_tiny_nucleus_is_greedy(settings: list[str]) -> None:
    one = [*settings, "data.n_samples=1", "data.overwrite=true"]
    greedy = read(generation([*one, "rollout.do_sample=false"]).run())
    drawn = read(generation([*one, "rollout.top_p=1e-6", "rollout.top_k=-1"]).run())
    free = read(generation([*one, "rollout.top_p=1.0", "rollout.top_k=-1"]).run())
    assert [row["responses"] for row in drawn] == [row["responses"] for row in greedy]
    assert [row["responses"] for row in free] != [row["responses"] for row in greedy]


def test_prompt_and_response_together_stay_within_the_models_length(settings: list[str]) -> None:
    job = generation([*settings, "rollout.ignore_eos=true", "data.max_samples=1"])
    ids = job._prompt_ids(0)
    limit = f"rollout.max_model_len={len(ids) + 2}"
    (row,) = read(
        generation([*settings, "rollout.ignore_eos=true", "data.max_samples=1", limit]).run()
    )
    assert row["response_lengths"] == [2, 2, 2]


def test_columns_that_parquet_cannot_hold_are_refused_before_anything_runs(
    settings: list[str], tmp_path: Path
) -> None:
    rows = prompts(2)
    rows[1]["reward_model"]["ground_truth"] = "2"
    write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"column 'reward_model'.*data.output_path=.*out\.jsonl"):
        generation(settings)
    generation([*settings, f"data.output_path={tmp_path / 'out.jsonl'}"])


def test_an_empty_struct_is_written_as_null(settings: list[str], tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{**row, "extra_info": {}} for row in prompts(2)])
    assert [row["extra_info"] for row in read(generation(settings).run())] == [None, None]


def test_an_old_column_of_responses_does_not_stand_in_the_way(
    settings: list[str], tmp_path: Path
) -> None:
    rows = [row | {"responses": old} for row, old in zip(prompts(2), (1, "x"), strict=True)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    assert all(len(row["responses"]) == 3 for row in read(generation(settings).run()))


def test_results_of_an_earlier_generation_do_not_stand_beside_new_responses(
    settings: list[str], tmp_path: Path
) -> None:
    old = {"responses": ["old"] * 3, "scores": [1.0] * 3, "log_probs": [[0.0]] * 3}
    rows = write_jsonl(tmp_path / "scored.jsonl", [prompts(1)[0] | old, prompts(1)[0]])
    first, second = read(generation([*settings, f"data.path={rows}"]).run())
    assert "old" not in first["responses"]
    for row in (first, second):
        assert row.get("scores") is None
        assert row.get("log_probs") is None


def test_the_file_of_prompts_is_never_replaced(settings: list[str], tmp_path: Path) -> None:
    for path in ("rows.jsonl", "../" + tmp_path.name + "/rows.jsonl"):
        output = [f"data.output_path={tmp_path / path}", "data.overwrite=true"]
        with pytest.raises(ConfigError, match=r"would replace a file of data\.path"):
            generation([*settings, *output])


def test_ranks_share_the_rows_and_write_what_one_rank_writes(settings: list[str]) -> None:
    expected = taken_away(generation(settings).run())

    class Together(Ranks):
        def barrier(self) -> None:
            """The ranks of this test take turns."""

    second = generation(settings, Together(rank=1, world_size=2))
    second.run()
    assert sorted(second.files.finished_columns()) == [1, 3, 5]
    # With rank 1's rows done, rank 0 of another size finishes the rest.
    assert generation(settings).run().read_bytes() == expected


@pytest.mark.slow
def test_two_started_ranks_write_the_same_file(settings: list[str]) -> None:
    expected = taken_away(generation(settings).run())
    command = [sys.executable, "-m", "hone.trainer.main_generation", *settings]
    subprocess.run([*command, "trainer.n_gpus_per_node=2"], check=True, timeout=1200)
    output = Path(settings[-1].partition("=")[2])
    assert output.read_bytes() == expected


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_has_started_and_the_next_run_finishes(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    expected = taken_away(generation(settings).run())
    job = generation(settings)
    append = job.files.append

    def signalled(row: int, columns: Any) -> None:
        append(row, columns)
        os.kill(os.getpid(), number)
        monkeypatch.setattr(job.files, "append", append)

    monkeypatch.setattr(job.files, "append", signalled)
    with pytest.raises(SystemExit) as caught:
        job.run()
    assert caught.value.code == code
    assert 0 < len(job.files.finished_columns()) < COUNT
    assert generation(settings).run().read_bytes() == expected


def test_two_processes_do_not_write_one_output(settings: list[str]) -> None:
    output = Path(settings[-1].partition("=")[2])
    with lock_target(output):
        command = [sys.executable, "-m", "hone.trainer.main_generation", *settings]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert f"FolderLocked: {output} is in use by" in done.stderr
    assert not output.exists()


def test_log_probs_are_kept_when_asked_for(settings: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    generation([*settings, "rollout.calculate_log_probs=true", f"data.output_path={out}"]).run()
    for line in out.read_text().splitlines():
        row = json.loads(line)
        assert [len(p) for p in row["log_probs"]] == row["response_lengths"]
        assert all(p <= 0 for ps in row["log_probs"] for p in ps)


def test_a_prompt_that_does_not_fit_is_named_before_anything_runs(settings: list[str]) -> None:
    with pytest.raises(DataError, match=r"row 0 has \d+ prompt tokens"):
        generation([*settings, "rollout.prompt_length=3"]).run()


def test_a_missing_prompt_column_is_named(settings: list[str]) -> None:
    with pytest.raises(DataError, match="no column 'question'"):
        generation([*settings, "data.prompt_key=question"]).run()


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("change", ["data.n_samples=2", "rollout.temperature=0.5"])
def test_a_file_of_another_job_is_not_replaced_unasked(
    settings: list[str], tmp_path: Path, kind: str, change: str
) -> None:
    settings = [*settings, f"data.output_path={tmp_path / f'k3.{kind}'}", "data.max_samples=1"]
    expected = generation(settings).run().read_bytes()
    sentence = r"k3\.\w+ already exists and is not from this job.*another data\.output_path, delete"
    with pytest.raises(GenerationError, match=sentence):
        generation([*settings, change]).run()
    assert (tmp_path / f"k3.{kind}").read_bytes() == expected
    assert not list(tmp_path.glob("*.parts"))
    generation([*settings, change, "data.overwrite=true"]).run()
    assert (tmp_path / f"k3.{kind}").read_bytes() != expected


def test_a_file_that_was_not_generated_is_not_replaced(settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "out.parquet").write_bytes(b"mine")
    with pytest.raises(GenerationError, match="not from this job"):
        generation(settings).run()
    assert (tmp_path / "out.parquet").read_bytes() == b"mine"


def test_a_finished_job_says_so_and_draws_nothing_again(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = generation([*settings, "data.max_samples=1"])
    expected = first.run().read_bytes()
    repeated = generation([*settings, "data.max_samples=1", "data.batch_size=1"])
    monkeypatch.setattr(repeated, "_generate_rows", lambda rows: pytest.fail("it draws"))
    screen.cache_clear()
    assert repeated.run().read_bytes() == expected
    screen.cache_clear()
    assert "out.parquet is already complete" in capsys.readouterr().out
    changed = expected + b" "
    first.output.write_bytes(changed)  # no longer what this job wrote
    with pytest.raises(GenerationError, match="changed since"):
        repeated.run()


def test_a_prompt_too_long_for_the_model_names_the_row_and_the_keys(
    settings: list[str], tmp_path: Path
) -> None:
    wide = [
        *settings,
        "data.prompt_format=raw",
        "data.prompt_key=text",
        "rollout.prompt_length=512",
    ]
    wide += ["rollout.response_length=100", "data.n_samples=1"]
    write_jsonl(tmp_path / "rows.jsonl", [{"text": "1" * n} for n in (3, 200, 4)])
    sentence = (
        r"rows\.jsonl, row 1 has 200 prompt tokens and may reach 300 with rollout\.response_length=100"
        r", but the model has 256 positions; set rollout\.response_length=56, or "
        r"rollout\.max_model_len=256"
    )
    with pytest.raises(GenerationError, match=sentence):
        generation(wide).run()
    assert not list(tmp_path.glob("*.parts"))
    rows = read(generation([*wide, "rollout.max_model_len=256", "rollout.ignore_eos=true"]).run())
    assert [row["response_lengths"] for row in rows] == [[100], [56], [100]]
    write_jsonl(tmp_path / "rows.jsonl", [{"text": "1" * 256}])
    with pytest.raises(GenerationError, match="row 0 has 256 prompt tokens, but the model has 256"):
        generation([*wide, "data.overwrite=true"]).run()


def test_what_an_engine_refuses_names_the_row() -> None:
    async def refuse(*_: Any) -> TokenOutput:
        raise RolloutError("request 0/0 is refused")

    draw = Sampling(max_tokens=1, temperature=1.0, seed=0)
    with pytest.raises(RolloutError, match=r"rows\.jsonl, row 0: request 0/0 is refused"):
        asyncio.run(
            respond(
                refuse,
                [[1]],
                lambda index: [draw],
                lambda index, outputs: None,
                prompt_name=lambda index: f"rows.jsonl, row {index}",
                max_in_flight=1,
            )
        )


def test_a_missing_file_names_the_key_it_came_from(settings: list[str], tmp_path: Path) -> None:
    for wrong in ("no.parquet", "no*.jsonl"):
        with pytest.raises(DataError, match=r"check data\.path$"):
            generation([*settings, f"data.path={tmp_path / wrong}"])
    (tmp_path / "rows.jsonl").write_text("{")
    with pytest.raises(DataError, match="not JSON") as caught:
        generation(settings)
    assert "on_bad_row" not in str(caught.value)  # a key that this tree does not have


@pytest.mark.parametrize("key", ["model.path", "data.path", "data.output_path"])
def test_a_key_without_a_sensible_default_must_be_given(settings: list[str], key: str) -> None:
    others = [setting for setting in settings if not setting.startswith(f"{key}=")]
    with pytest.raises(ConfigError, match=f"^{key} was not given: set it to the "):
        main_generation.main(others)


def test_an_output_of_an_unknown_kind_is_refused(settings: list[str]) -> None:
    with pytest.raises(GenerationError, match="must end in"):
        generation([*settings, "data.output_path=out.csv"])


def test_searches_between_turns_are_answered(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tokens are whole actions, so that a random model searches and answers."""
    from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
    from tests.retrieval.passages import Retriever

    words = ["<search> Italy </search>", "<answer> Rome </answer>"]
    tokenizer = character_tokenizer(words=words)
    save_pretrained(tiny_lm(len(tokenizer), hidden=32, mlp=48, seed=3), tokenizer, tmp_path / "m")
    overrides = ["rollout.response_length=400", "rollout.max_tokens_per_turn=40", "search.topk=1"]
    with Retriever(tmp_path) as retriever:
        main_generation.main(
            [*settings, f"model.path={tmp_path}/m", *overrides, "--search", retriever.url]
        )
    texts = [text for row in read(tmp_path / "out.parquet") for text in row["responses"]]
    searched = [text for text in texts if words[0] in text]
    assert searched
    passage = "on the river Tiber.</information>"
    assert all(passage in text or text.endswith(words[0]) for text in searched)
    with pytest.raises(ConfigError, match="--search needs the URL"):
        main_generation.main([*settings, "--search"])


def test_an_engine_with_weights_of_its_own_gets_the_device_for_itself(
    settings: list[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a second copy of the model on the GPU, vLLM would not have the memory that it reserves."""
    places: list[torch.device] = []
    lm = generation_module.load_causal_lm(str(model), dtype=torch.float32)

    def load(path: str, *, dtype: torch.dtype, device: torch.device) -> Any:
        places.append(device)
        return lm

    gpu = torch.device("cuda")
    monkeypatch.setattr(generation_module, "load_causal_lm", load)
    monkeypatch.setattr(generation_module, "pick_device", lambda *_: gpu)
    monkeypatch.setattr(generation_module, "build_rollout", lambda spec: spec)
    job = generation([*settings, "rollout.dtype=float32"])
    for name in ("vllm", "sglang", "native"):
        config = replace(job.config, "rollout.name", name)
        spec: Any = build_engine(config, job.tokenizer, Ranks())
        assert spec.device == gpu
    assert places == [torch.device("cpu"), torch.device("cpu"), gpu]
