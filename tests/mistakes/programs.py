"""Mistakes with the programs around training."""

from __future__ import annotations

from .cases import Mistake, jsonl, row

SFT = [
    *("sft", "model.path=model", "data.train_files=sums.jsonl", "data.train_batch_size=2"),
    *("trainer.default_local_dir=run", "trainer.device=cpu"),
]
SUMS = {"sums.jsonl": jsonl(*({"question": f"{i}+1=", "answer": str(i + 1)} for i in range(4)))}
GENERATE = ["generate", "model.path=model", "data.path=rows.jsonl", "trainer.device=cpu"]
OUT = "data.output_path=out.parquet"

MISTAKES = [
    Mistake(
        "SFT: a column of another name",
        [*SFT, "data.train_files=rows.jsonl"],
        ("row 0: column 'question' (data.prompt_key) is missing", "data_source, prompt"),
    ),
    Mistake(
        "SFT: an answer that is no text",
        SFT,
        ("row 0", "column 'answer' must be text, got int"),
        files={"sums.jsonl": jsonl({"question": "1+1=", "answer": 2})},
    ),
    Mistake(
        "SFT: rows that are too long",
        [*SFT, "data.max_length=4"],
        ("row 0", "data.max_length=4", "data.truncation=left|right"),
        files=SUMS,
    ),
    Mistake(
        "SFT: a conversation without an answer",
        SFT,
        ("row 0", "no assistant turn"),
        files={"sums.jsonl": jsonl({"messages": [{"role": "user", "content": "a"}]})},
    ),
    Mistake("SFT: no data", SFT, ("sums.jsonl does not exist", "data.train_files")),
    Mistake(
        "SFT: a model folder that is not there",
        [*SFT, "model.path=models/my/own"],
        ("model.path=models/my/own", "does not exist"),
        files=SUMS,
    ),
    Mistake(
        "SFT: a run folder that is a file",
        [*SFT, "trainer.default_local_dir=reward.py"],
        ("trainer.default_local_dir=reward.py is a file",),
        files=SUMS,
    ),
    Mistake(
        "SFT on Ray",
        [*SFT, "trainer.controller=ray"],
        ("trainer.controller=ray", "torchrun"),
        files=SUMS,
    ),
    Mistake(
        "generate: nothing given",
        ["generate"],
        ("model.path was not given", "data.path was not given", "data.output_path was not given"),
    ),
    Mistake(
        "generate: an output of another kind",
        [*GENERATE, "data.output_path=out.csv"],
        ("data.output_path=out.csv", ".parquet or .jsonl"),
    ),
    Mistake(
        "generate: an output below a file",
        [*GENERATE, "data.output_path=reward.py/out.parquet"],
        ("data.output_path=reward.py/out.parquet", "is a file"),
    ),
    Mistake(
        "generate: a column of another name",
        [*GENERATE, OUT, "data.prompt_key=question"],
        ("row 0", "no column 'question'", "data.prompt_key", "it has data_source, prompt"),
    ),
    Mistake(
        "generate: prompts that are too long",
        [*GENERATE, OUT, "rollout.prompt_length=2"],
        ("row 0", "rollout.prompt_length"),
    ),
    Mistake(
        "generate: a file that is not there",
        [*GENERATE, OUT, "data.path=no.jsonl"],
        ("no.jsonl does not exist", "data.path"),
    ),
    Mistake("eval: nothing given", ["eval"], ("data.path was not given",)),
    Mistake(
        "eval: rows without responses",
        ["eval", "data.path=rows.jsonl"],
        ("rows.jsonl", "responses", "it has"),
    ),
    Mistake(
        "eval: a benchmark without a model",
        ["eval", "--bench", "gsm8k", "--data", "."],
        ("--model is missing", "hone eval --model DIR"),
    ),
    Mistake(
        "eval: a benchmark that is not known",
        ["eval", "--model", "model", "--bench", "gsm9k", "--data", ".", "--out", "bench"],
        ("gsm9k", "gsm8k"),
    ),
    Mistake(
        "export: a folder that is no run",
        ["export", "empty", "out"],
        ("empty", "global_step"),
        arrange=lambda root: (root / "empty").mkdir(),
    ),
    Mistake(
        "export: a run that is not there",
        ["export", "run", "out"],
        ("no checkpoint folder run", "global_step_N"),
    ),
    Mistake(
        "report: a folder that is no run",
        ["report", "empty"],
        ("empty", "metrics.jsonl"),
        arrange=lambda root: (root / "empty").mkdir(),
    ),
    Mistake("report: a run that is not there", ["report", "runs/best"], ("runs/best",)),
    Mistake(
        "report: a folder to write to",
        ["report", "run", "--out", "page"],
        ("--out page is a folder", "page/report.html"),
        arrange=lambda root: (root / "page").mkdir(),
    ),
    Mistake(
        "data check: one's own data without a score function",
        ["data", "check", "rows.jsonl"],
        ("no scorer knows data_source 'my/own'", "--reward"),
        code=1,
    ),
    Mistake(
        "data check: a score function that fails on a row",
        ["data", "check", "rows.jsonl", "--reward", "reward.py"],
        ("1 rows cannot be scored (rows 8)", "reward.py:2"),
        files={
            "rows.jsonl": jsonl(*(row(i) for i in range(8)), row(8, reward_model={})),
            "reward.py": "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
            "    return float(int(ground_truth) == 1)\n",
        },
        code=1,
    ),
    Mistake(
        "data check: a limit without a tokenizer",
        ["data", "check", "rows.jsonl", "--max-prompt-length", "64"],
        ("--max-prompt-length 64 counts tokens", "--tokenizer MODEL"),
    ),
    Mistake(
        "data check: a file that is not there",
        ["data", "check", "no.parquet"],
        ("no.parquet does not exist",),
        code=1,
    ),
    Mistake(
        "data show: a row that is not there",
        ["data", "show", "rows.jsonl", "--rows", "8"],
        ("--rows 8", "rows 0 to 7"),
    ),
    Mistake(
        "data show: a file that is not there",
        ["data", "show", "no.jsonl"],
        ("no.jsonl does not exist",),
    ),
    Mistake(
        "data prepare: a set that is not known",
        ["data", "prepare", "gsm9k"],
        ("gsm9k", "gsm8k"),
    ),
    Mistake(
        "model tiny: a folder that is there",
        ["model", "tiny", "model"],
        ("model already exists and is not empty", "name a new folder"),
    ),
    Mistake(
        "model tiny: heads that do not fit",
        ["model", "tiny", "new", "--hidden", "30", "--heads", "4"],
        ("hidden", "heads"),
    ),
    Mistake("model get: a name that is not known", ["model", "get", "gpt-9", "out"], ("gpt-9",)),
    Mistake("a misspelt verb of data", ["data", "chek", "rows.jsonl"], ("chek", "check")),
    Mistake(
        "an option that is not there",
        ["report", "run", "--output", "a"],
        ("unknown argument --output", "hone report --help"),
    ),
    Mistake(
        "quickstart: a misspelt key",
        ["quickstart", "--out", "q", "trainer.totl_epochs=1"],
        ("totl_epochs", "total_epochs"),
    ),
]
