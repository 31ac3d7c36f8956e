from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from hone.data.prepare import ALIASES, DATASETS, argument_parser, prepare, prepare_from_arguments
from hone.data.rows import DataError

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("HONE_SHARED_DATA", ROOT.parent / "shared" / "data"))
SCRIPTS = sorted((ROOT / "examples" / "data_preprocess").glob("*.py"))


def write(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    record = {"question": "How many?", "answer": "6*200=<<6*200=1200>>1200\n#### 1,200"}
    write(folder / "gsm8k/train.jsonl", [record, record])
    write(folder / "gsm8k/test.jsonl", [record])
    write(
        folder / "math/train.jsonl",
        [
            {"problem": "p", "solution": r"so \boxed{1} and \boxed{\frac{1}{2}}."},
            {"problem": "nothing boxed", "solution": r"so \boxed{}."},
        ],
    )
    write(
        folder / "hellaswag/train.jsonl",
        [
            {
                "activity_label": "Baking",
                "ctx_a": "A woman [header] mixes [title] flour.",
                "ctx_b": "she",
                "endings": ["eats [step] it.", "b", "c", "d"],
                "label": "2",
            }
        ],
    )
    write(
        folder / "hellaswag/test.jsonl",
        [
            {
                "activity_label": "A",
                "ctx_a": "b.",
                "ctx_b": "c",
                "endings": list("abcd"),
                "label": "",
            }
        ],
    )
    dialogue = "\n\nHuman: hi\n\nAssistant:"
    write(
        folder / "hh_rlhf/harmless_base_test.jsonl",
        [{"chosen": f"{dialogue} good{i}", "rejected": f"{dialogue} bad{i}"} for i in range(4)]
        + [{"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: d"}],
    )
    (folder / "geometry3k/images").mkdir(parents=True)
    for i in range(5):
        (folder / f"geometry3k/images/{i}.png").write_bytes(b"png")
    write(
        folder / "geometry3k/examples.jsonl",
        [
            {"id": i, "problem_text": "Find x.", "choices": ["30", "40", "60", "80"], "answer": "D"}
            for i in range(5)
        ],
    )
    return folder


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / f"{name}.parquet").to_pylist()
    return rows


def test_gsm8k_rows_have_verls_schema(source: Path, tmp_path: Path) -> None:
    report = prepare("gsm8k", source_dir=source, local_dir=tmp_path / "out")
    assert list(report.rows.values()) == [2, 1]
    row = rows_of(tmp_path / "out", "train")[1]
    assert row == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": "How many? Let's think step by step and output the final answer after"
                ' "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1200"},
        "extra_info": {
            "split": "train",
            "index": 1,
            "answer": "6*200=<<6*200=1200>>1200\n#### 1,200",
            "question": "How many?",
        },
    }


def test_gsm8k_variants_carry_what_their_loops_read(source: Path, tmp_path: Path) -> None:
    def first(name: str) -> dict[str, Any]:
        prepare(name, source_dir=source, local_dir=tmp_path / name)
        return rows_of(tmp_path / name, "train")[0]

    tool = first("gsm8k_multiturn_w_tool")
    assert [message["role"] for message in tool["prompt"]] == ["system", "user"]
    assert tool["prompt"][1]["content"].endswith("the final answer after `####`.")
    assert tool["extra_info"]["need_tools_kwargs"] is True
    assert tool["extra_info"]["tools_kwargs"] == {
        "calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1200"}}
    }
    assert set(tool["extra_info"]["interaction_kwargs"]) == {"query", "ground_truth"}
    assert first("gsm8k_tool_agent_loop")["agent_name"] == "tool_agent"
    interaction = first("gsm8k_multiturn_w_interaction")["extra_info"]["interaction_kwargs"]
    assert (interaction["name"], interaction["ground_truth"]) == ("gsm8k", "1200")
    messages = first("gsm8k_multiturn_sft")["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]


def test_math_takes_the_last_box_skips_empty_ones_and_writes_examples(
    source: Path, tmp_path: Path
) -> None:
    prepare("math", source_dir=source, local_dir=tmp_path)
    (row,) = rows_of(tmp_path, "train")
    assert row["data_source"] == "DigitalLearningGmbH/MATH-lighteval"
    assert row["reward_model"]["ground_truth"] == r"\frac{1}{2}"
    suffix = r" Let's think step by step and output the final answer within \boxed{}."
    assert row["prompt"][0]["content"] == "p" + suffix
    assert row["extra_info"] == {"split": "train", "index": 0}
    assert json.loads((tmp_path / "train_example.json").read_text()) == row


def test_hellaswag_cleans_brackets_and_leaves_unknown_labels_empty(
    source: Path, tmp_path: Path
) -> None:
    prepare("hellaswag", source_dir=source, local_dir=tmp_path)
    (row,) = rows_of(tmp_path, "train")
    assert row["prompt"][0]["content"] == "Baking: A woman mixes. flour. She"
    assert row["reward_model"] == {
        "style": "model",
        "eval": "multiple_choice",
        "ground_truth": 2,
        "choices": ["eats it.", "b", "c", "d"],
    }
    assert rows_of(tmp_path, "test")[0]["reward_model"]["ground_truth"] is None


def test_hh_rlhf_gives_three_subsets_and_drops_pairs_with_different_prompts(
    source: Path, tmp_path: Path
) -> None:
    report = prepare("full_hh_rlhf", source_dir=source, local_dir=tmp_path)
    row_counts = {str(Path(name).relative_to(tmp_path)): n for name, n in report.rows.items()}
    assert row_counts == {
        "sft/train.parquet": 8,
        "rm/train.parquet": 3,
        "rm/test.parquet": 1,
        "rl/train.parquet": 4,
    }
    row = rows_of(tmp_path, "rl/train")[0]
    assert row["data_source"] == "Dahoas/full-hh-rlhf"
    assert row["reward_model"] == {"style": "model", "ground_truth": " good0"}
    assert set(rows_of(tmp_path, "rm/test")[0]) == {"prompt", "chosen", "rejected"}
    rl_report = prepare("full_hh_rlhf", source_dir=source, local_dir=tmp_path / "x", subsets="rl")
    assert len(rl_report.rows) == 1
    with pytest.raises(DataError, match="sft, rm, rl"):
        prepare("full_hh_rlhf", source_dir=source, local_dir=tmp_path, subsets="dpo")


def test_geo3k_keeps_the_image_and_names_the_chosen_option(source: Path, tmp_path: Path) -> None:
    prepare("geo3k", source_dir=source, local_dir=tmp_path)
    train, test = rows_of(tmp_path, "train"), rows_of(tmp_path, "test")
    assert (len(train), len(test)) == (4, 1)
    assert train[0]["images"] == [{"bytes": b"png", "path": "0.png"}]
    assert train[0]["reward_model"]["ground_truth"] == "80"
    assert train[0]["prompt"][0]["content"].startswith("<image>Find x.")
    prepare("geo3k_multiturn_w_tool", source_dir=source, local_dir=tmp_path / "tool")
    row = rows_of(tmp_path / "tool", "train")[0]
    assert row["extra_info"]["tools_kwargs"]["calc_geo3k_reward"]["create_kwargs"] == {
        "ground_truth": "80"
    }


def test_generated_sets_need_no_source_and_take_their_options(tmp_path: Path) -> None:
    options = ["--local_dir", str(tmp_path), "--train_size", "20", "--test_size", "5"]
    report = prepare_from_arguments("countdown", [*options, "--max_target", "50"])
    assert list(report.rows.values()) == [20, 5]
    assert max(row["target"] for row in rows_of(tmp_path, "train")) <= 50
    assert "20 rows" in str(report)
    for name in ("multiply", "arithmetic"):
        folder = ["--local_dir", str(tmp_path / name)]
        assert list(prepare_from_arguments(name, [*folder, *options[2:]]).rows.values()) == [20, 5]


def test_verls_flag_names_are_accepted() -> None:
    parsed = argument_parser("gsm8k").parse_args(
        ["--local_save_dir", "out", "--local_dataset_path", "in"]
    )
    assert (parsed.local_dir, parsed.source_dir) == ("out", "in")


def test_mistakes_are_explained(source: Path, tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("gsm8", {}, "Did you mean 'gsm8k'"),
        ("gsm8k", {"source_dir": tmp_path / "no"}, "does not exist"),
        ("gsm8k", {"source_dir": source, "hub": True}, "not both"),
        ("gsm8k", {"source_dir": source, "template": "x"}, "has no option template"),
        ("multiply", {"source_dir": source}, "is generated"),
        ("multiply", {"train_size": -5}, "--train_size -5 must be 1 or more"),
        ("countdown", {"test_size": 0}, "--test_size 0 must be 1 or more"),
    ]
    for name, options, message in cases:
        with pytest.raises(DataError, match=message):
            prepare(name, local_dir=tmp_path, **options)


def test_without_the_datasets_package_the_hub_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install datasets.*--source_dir"):
        prepare("gsm8k", local_dir=tmp_path)


def test_every_script_names_a_known_data_set_and_shadows_no_module() -> None:
    assert len(SCRIPTS) >= 22
    for path in SCRIPTS:
        assert ALIASES.get(path.stem, path.stem) in DATASETS
        assert f'script("{path.stem}")' in path.read_text()
        assert path.stem not in sys.stdlib_module_names, "it would shadow a module of Python"


def test_every_dataset_has_a_builder_with_its_arguments() -> None:
    for name in [*DATASETS, *ALIASES]:
        assert "--local_dir" in argument_parser(name).format_help()


def test_a_script_runs_or_ends_with_one_error_line(source: Path, tmp_path: Path) -> None:
    script = ROOT / "examples/data_preprocess/gsm8k.py"
    command = [sys.executable, str(script), "--local_dir", str(tmp_path / "out"), "--source_dir"]
    process = subprocess.run([*command, str(source)], capture_output=True, text=True, check=True)
    assert "2 rows" in process.stdout
    failed_process = subprocess.run(
        [*command, str(tmp_path / "no")], capture_output=True, text=True
    )
    assert failed_process.returncode == 1
    assert failed_process.stderr.startswith("error: source folder")
    assert "Traceback" not in failed_process.stderr


EXPECTED = {
    "gsm8k": [7473, 1319],
    "gsm8k_tool_agent_loop": [7473, 1319],
    "math": [7498, 5000],
    "countdown": [10235, 1024],
    "geo3k": [8, 2],
    "nq": [10036, 3610],
    "bamboogle": [125],
    "search_qa": [3518, 502],
    "math500": [500],
    "asdiv": [2215],
    "mbpp": [374, 90, 500],
    "leetcode": [1890, 228],
}


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real data sets are not at hand")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if sum(rows) > 2500 else [])
        for name, rows in EXPECTED.items()
    ],
)
def test_real_data_give_the_known_numbers_of_rows(name: str, tmp_path: Path) -> None:
    report = prepare(name, source_dir=SHARED, local_dir=tmp_path)
    assert list(report.rows.values()) == EXPECTED[name]


def test_all_sets_at_hand_are_prepared_checked_and_the_others_named(
    source: Path, tmp_path: Path
) -> None:
    script = ROOT / "examples/prepare_all_data.py"
    code = (
        "import runpy, sys; from hone.data.prepare import DATASETS;"
        " [DATASETS.pop(n) for n in [*DATASETS] if n not in ('gsm8k', 'hellaswag', 'mbpp')];"
        " sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    arguments = [str(script), "--local_dir", str(tmp_path / "out"), "--source_dir", str(source)]
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT
    )
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert lines[0].startswith("| gsm8k | train: 2 | warning: 1 rows repeat")
    assert "| gsm8k | test: 1 | 0 errors, 0 warnings |" in lines
    assert "| mbpp | no files there | |" in lines
    assert (tmp_path / "out/gsm8k/test.parquet").is_file()
