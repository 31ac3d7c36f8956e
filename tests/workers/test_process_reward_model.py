"""The process reward model: where steps end, what it reads there, and how its scores become credit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hone.agents.collate import collate_outputs
from hone.agents.contract import AgentLoopOutput
from hone.config import ConfigError, load_config
from hone.controller.worker import free_port
from hone.data.response_steps import TokenTexts
from hone.data.steps import step_mark
from hone.models.tiny import character_tokenizer
from hone.protocol import DataProto
from hone.protocol.rows import object_array
from hone.workers.process_reward_model import ProcessRewardModelWorker
from tests.algorithms.advantages.references import pure_reference, whiten
from tests.data.tokenizers_of_bytes import byte_level_tokenizer, piece_tokenizer
from tests.workers.ranks import judge_settings, score_rank

WORDS = ("\n\n", ".\n\n")
TEXTS = ["ab.\n\ncd\n\nef", "abc", "ab\n\n"]


def save_judge(folder: Path, words: tuple[str, ...] = WORDS, tokenizer: Any = None) -> Path:
    from transformers import AutoConfig, AutoModelForTokenClassification

    tokenizer = tokenizer or character_tokenizer(words=words)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, intermediate_size=16, num_labels=2,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_judge(tmp_path_factory.mktemp("judge"))


def worker(judge: Path, *overrides: str) -> ProcessRewardModelWorker:
    made = ProcessRewardModelWorker(load_config([*judge_settings(str(judge)), *overrides]))
    made.init_model()
    return made


def collated(*rows: tuple[list[int], list[int], list[int]]) -> DataProto:
    """A batch of (prompt, response, response mask)."""
    return collate_outputs([AgentLoopOutput(*row) for row in rows], pad_token_id=0)


def batch_of(tokenizer: Any) -> DataProto:
    rows = []
    for number, text in enumerate(TEXTS):
        ids = tokenizer.encode(text, add_special_tokens=False)
        start = tokenizer.encode("1+" * (number + 1), add_special_tokens=False)
        rows.append((start, ids, [1] * len(ids)))
    return collated(*rows)


def plain_scores(judge: Path, rows: list[list[int]]) -> list[torch.Tensor]:
    """p(good) − p(bad) at every token, by transformers over one right-padded batch."""
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(judge).eval()
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask.long()).logits
    scores = torch.softmax(logits, -1) @ torch.tensor([-1.0, 1.0])
    return [score[: len(row)] for score, row in zip(scores, rows, strict=True)]


def test_merged_tokens_end_a_step_and_the_last_token_does_once(judge: Path) -> None:
    made = worker(judge)
    steps = made.compute_rm_score(batch_of(made.tokenizer)).batch["step_mask"]
    # a b .\n\n c d \n\n e f  |  a b c  |  a b \n\n
    assert steps.int().tolist() == [
        [0, 0, 1, 0, 0, 1, 0, 1],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0],
    ]


def test_packed_rows_score_as_transformers_does_on_padded_ones(judge: Path) -> None:
    """The separator stands in the place of each token that ends a step."""
    made = worker(judge, "reward_model.credit_assignment=gamma-decay")
    batch = batch_of(made.tokenizer)
    scores = made.compute_rm_score(batch).batch["process_scores"]
    texts = ["1+ab\ncd\ne\n", "1+1+ab\n", "1+1+1+ab\n"]
    rows = [made.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    expected = plain_scores(judge, rows)
    for row, (prompt, ends) in enumerate([(2, [2, 5, 7]), (4, [2]), (6, [2])]):
        for end in ends:
            assert scores[row, end].item() == pytest.approx(
                expected[row][prompt + end].item(), abs=1e-5
            )
        assert scores[row].count_nonzero() == len(ends)


@pytest.mark.parametrize("cut", ["micro_batch_size_per_gpu=1", "forward_max_token_len_per_gpu=20"])
def test_scores_do_not_depend_on_the_micro_batch(judge: Path, cut: str) -> None:
    whole, parts = worker(judge), worker(judge, f"reward_model.{cut}")
    batch = batch_of(whole.tokenizer)
    a, b = (w.compute_rm_score(batch).batch["process_scores"] for w in (whole, parts))
    assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_with_half_of_the_model_each_score_as_one(judge: Path, tmp_path: Path) -> None:
    """One of them has two rows, the other one: both take part in the same forwards."""
    import torch.multiprocessing as mp

    made = worker(judge)
    batch = batch_of(made.tokenizer)
    torch.save([batch[:2], batch[2:]], tmp_path / "batch.pt")
    mp.spawn(score_rank, (2, free_port(), str(judge), str(tmp_path)), nprocs=2)
    parts = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for name, expected in made.compute_rm_score(batch).batch.items():
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), expected)


def test_a_small_temperature_leaves_the_worst_step(judge: Path) -> None:
    raw = worker(judge, "reward_model.credit_assignment=gamma-decay")
    soft = worker(judge, "reward_model.credit_assignment=0.0001")
    batch = batch_of(raw.tokenizer)
    steps = raw.compute_rm_score(batch).batch
    lowest = steps["process_scores"][0][steps["step_mask"][0]].min()
    summed = soft.compute_rm_score(batch).batch["process_scores"][0].sum()
    assert summed == pytest.approx(lowest.item(), abs=1e-4)


def test_tool_tokens_are_read_and_end_no_step(judge: Path) -> None:
    made = worker(judge, "reward_model.credit_assignment=gamma-decay")
    ids = made.tokenizer.encode("a\n\nb\n\nc\n\n", add_special_tokens=False)
    # a and its separator are the policy's, b and its separator a tool's, c the policy's, the end a tool's.
    batch = collated((made.tokenizer.encode("1+"), ids, [1, 1, 0, 0, 1, 0]))
    found = made.compute_rm_score(batch).batch
    assert found["step_mask"].int().tolist() == [[0, 1, 0, 0, 1, 0]]
    (text,) = plain_scores(judge, [made.tokenizer.encode("1+a\nb\n\n\n")])
    assert found["process_scores"][0, 4].item() == pytest.approx(text[-1].item(), abs=1e-5)
    nothing = collated((made.tokenizer.encode("1+"), ids, [0] * 6))
    assert not made.compute_rm_score(nothing).batch["step_mask"].any()


def test_rows_are_truncated_from_the_left_and_steps_that_are_cut_away_are_no_steps(
    judge: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = worker(judge, "reward_model.credit_assignment=gamma-decay")
    batch = batch_of(whole.tokenizer)  # the first row: 2 + 8 tokens, steps end at 2, 5 and 7
    for limit, ends in ((9, [2, 5, 7]), (5, [5, 7]), (1, [7])):
        short = worker(
            judge,
            "reward_model.credit_assignment=gamma-decay",
            f"reward_model.max_length={limit}",
        )
        found = short.compute_rm_score(batch).batch
        assert found["step_mask"][0].nonzero().squeeze(1).tolist() == ends
        warning = f"max_length={limit} truncates {3 - len(ends)} steps" if limit < 9 else ""
        assert warning in caplog.text
        text = short.tokenizer.encode("1+ab\ncd\ne\n", add_special_tokens=False)[-limit:]
        (expected,) = plain_scores(judge, [text])
        assert found["process_scores"][0, 7].item() == pytest.approx(expected[-1].item(), abs=1e-5)


def test_ids_beyond_the_vocabulary_and_a_worker_of_its_own_block(judge: Path) -> None:
    """A policy with padded embeddings may write them; verl builds the worker from `config.reward_model`."""
    config = load_config(judge_settings(str(judge)))
    made = ProcessRewardModelWorker(config.reward_model)
    made.init_model()
    ids = made.tokenizer.encode("ab\n\nc", add_special_tokens=False)
    batch = collated((made.tokenizer.encode("1+"), [ids[0], 10**6, *ids[2:]], [1] * 4))
    assert made.compute_rm_score(batch).batch["step_mask"].int().tolist() == [[0, 0, 1, 1]]


def test_a_line_break_of_the_shell_is_a_line_break(judge: Path) -> None:
    made = worker(judge)
    typed = worker(
        judge, r"reward_model.split_step_char='\n\n'", r"reward_model.step_separator='\n'"
    )
    batch = batch_of(made.tokenizer)
    a, b = (w.compute_rm_score(batch).batch for w in (made, typed))
    assert torch.equal(a["step_mask"], b["step_mask"])
    assert torch.equal(a["process_scores"], b["process_scores"])


def test_models_that_are_no_judges_of_steps_are_refused(judge: Path, tmp_path: Path) -> None:
    from hone.models.tiny import save_pretrained, tiny_lm

    with pytest.raises(ConfigError, match="step_separator='ab' is 2 tokens"):
        worker(judge, "reward_model.step_separator='ab'")
    tokenizer = character_tokenizer()
    base = save_pretrained(tiny_lm(len(tokenizer), hidden=16), tokenizer, tmp_path / "base")
    with pytest.raises(ConfigError, match=r"Qwen2ForCausalLM without the head.*hone train-prm"):
        worker(base)
    # A judge of another vocabulary may have more tokens than the policy's prompt and response.
    lengths = ("data.max_prompt_length=2", "data.max_response_length=4")
    narrow = worker(judge, "reward_model.forward_max_token_len_per_gpu=8", *lengths)
    with pytest.raises(
        ConfigError, match=r"more than reward_model\.forward_max_token_len_per_gpu=8"
    ):
        narrow.compute_rm_score(batch_of(tokenizer))


def plain_odds(folder: Path, texts: list[str]) -> list[float]:
    """p(+) − p(-) after the last token of each text, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    labels = tokenizer.convert_tokens_to_ids(["+", "-"])
    odds = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False, return_tensors="pt")
        good, bad = model(ids).logits[0, -1, labels].softmax(-1).tolist()
        odds.append(good - bad)
    return odds


@pytest.mark.parametrize("separator", ["ки", "ки\n"])
def test_a_causal_model_scores_a_step_by_the_logits_of_two_tokens_at_its_tag(
    tmp_path: Path, separator: str
) -> None:
    from hone.data.steps import Solution
    from hone.models.tiny import save_pretrained, tiny_lm
    from hone.trainer.prm_evaluation import StepScorer

    tokenizer = character_tokenizer(words=("\n\n", ".\n\n", "ки"))
    lm = tiny_lm(len(tokenizer), hidden=16)
    torch.nn.init.normal_(lm.get_output_embeddings().weight)
    folder = save_pretrained(lm, tokenizer, tmp_path / "causal")
    tag = f"reward_model.step_separator={separator!r}"
    made = worker(folder, tag, "reward_model.step_labels=['+','-']", SUMS)
    found = made.compute_rm_score(batch_of(made.tokenizer)).batch["process_scores"]
    after = separator.removeprefix("ки")
    dot = "." * (separator != "ки")  # in place of a token, or after the step's text
    starts = [f"1+ab{dot}ки", f"1+ab{dot}ки{after}cdки", "1+1+1+abки"]
    for place, expected in zip(((0, 2), (0, 5), (2, 2)), plain_odds(folder, starts), strict=True):
        assert found[place].item() == pytest.approx(expected, abs=1e-5)
    words = [f"model.path={folder}", "data.prompt_format=raw", "data.step_labels=['+','-']"]
    words += [f"data.step_separator={separator!r}", "trainer.device=cpu"]
    scorer = StepScorer(load_config(words, config_name="prm_trainer"))
    (chances,) = scorer.score([Solution("1+", ["ab", "cd"], [None, None])])
    expected_odds = plain_odds(folder, ["1+abки", f"1+abки{after}cdки"])
    assert (2 * chances - 1).tolist() == pytest.approx(expected_odds, abs=1e-5)


def test_a_classifier_has_no_tokens_as_labels_and_two_labels_are_two_tokens(judge: Path) -> None:
    with pytest.raises(ConfigError, match="is for causal models"):
        worker(judge, "reward_model.step_labels=['+','-']")
    for labels, reason in ((("+", "ab"), "is 2 tokens"), (("+", "+"), "two of them")):
        with pytest.raises(ConfigError, match=reason):
            step_mark(character_tokenizer(), "a", labels)


def save_policy_tokenizer(folder: Path, tokenizer: Any) -> str:
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return f"reward_model.model.input_tokenizer={folder}"


SUMS = "reward_model.credit_assignment=gamma-decay"
PROMPT = [{"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize("make", [byte_level_tokenizer, piece_tokenizer])
def test_another_vocabulary_is_read_by_its_characters(
    judge: Path, tmp_path: Path, make: Callable[[], Any]
) -> None:
    """The prompt in the reward model's template, each step encoded alone, scored at its separator."""
    policy = make()
    made = worker(judge, save_policy_tokenizer(tmp_path / "policy", policy), SUMS)
    texts = ["so a.\n\nx é 😀\n\nend", "\n\na\n\n\n\nb", "abc </s>"]
    rows = [policy.encode(text, add_special_tokens=False) for text in texts]
    rows[0].append(policy.eos_token_id)
    batch = collated(*((policy.encode("q?"), ids, [1] * len(ids)) for ids in rows))
    batch.non_tensor_batch["raw_prompt"] = object_array([PROMPT] * 3)
    found = made.compute_rm_score(batch).batch
    prompt = made.tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, tokenize=False)
    read = [
        [*"so a.", "\n", *"x é 😀", "\n", *"end", "\n"],
        ["\n", "a", "\n", "\n", "b", "\n"],
        # The same letters are a special token of the judge, which a policy must not be able to write.
        [*("abc </s>" if make is byte_level_tokenizer else "abc"), "\n"],
    ]
    vocabulary, unknown = made.tokenizer.get_vocab(), made.tokenizer.unk_token_id
    ids = [[vocabulary.get(c, unknown) for c in [*prompt, *row]] for row in read]
    expected = plain_scores(judge, ids)
    for row, tokens in enumerate(read):
        places = [i for i, token in enumerate(tokens) if token == "\n"]
        columns = found["step_mask"][row].nonzero().squeeze(1)
        pieces = TokenTexts(policy)(rows[row])
        if row < 2:
            ends = [sum(map(len, pieces[: column + 1])) for column in columns.tolist()]
            assert ends == ([7, 14, 17] if row == 0 else [2, 5, 7, 8])
        scores = found["process_scores"][row][columns]
        assert torch.allclose(scores, expected[row][len(prompt) + torch.tensor(places)], atol=1e-5)


def test_a_vocabulary_that_adds_tokens_to_the_policys_reads_its_ids(
    judge: Path, tmp_path: Path
) -> None:
    smaller = save_policy_tokenizer(tmp_path / "policy", character_tokenizer(words=WORDS))
    tokenizer = character_tokenizer(words=WORDS)
    tokenizer.add_tokens(["<step>"])
    save_judge(tmp_path / "larger", tokenizer=tokenizer)
    made = worker(tmp_path / "larger", smaller, "reward_model.step_separator=<step>")
    steps = made.compute_rm_score(batch_of(tokenizer)).batch["step_mask"]  # no raw_prompt is needed
    assert steps.sum(1).tolist() == [3, 1, 1]


def test_a_vocabulary_without_a_separator_token_is_read_by_its_characters(tmp_path: Path) -> None:
    """Else a whole response would be one step."""
    plain = save_judge(tmp_path / "plain", words=())
    made = worker(plain)
    ids = made.tokenizer.encode("a\n\nb", add_special_tokens=False)
    batch = collated((made.tokenizer.encode("1+"), ids, [1] * 4))
    found = made.compute_rm_score(batch).batch
    assert found["step_mask"].int().tolist() == [[0, 0, 1, 1]]


GRADE = """
def grade(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(set(solution_str)) > int(ground_truth))
"""
RUNS = {
    "the steps alone": ["reward_manager=blank", "credit_assignment=0.1"],
    "both, the strict minimum": ["reward_manager=naive", "credit_assignment=strict min-form"],
    "both, sums and a baseline per step": ["reward_manager=naive", "credit_assignment=gamma-decay"],
}


@pytest.mark.parametrize("name", RUNS)
def test_advantages_of_a_run_are_those_of_the_paper(judge: Path, tmp_path: Path, name: str) -> None:
    """From the tokens and the parts of the reward in the rollout file; half of the rows have no answer."""
    import pyarrow.parquet as pq

    from hone.models.tiny import save_pretrained, tiny_lm
    from hone.tracking import read_metrics
    from hone.trainer.main_ppo import run

    tokenizer = character_tokenizer(words=WORDS)
    lm = tiny_lm(len(tokenizer), hidden=16, layers=1, heads=2, kv_heads=1, mlp=32)
    save_pretrained(lm, tokenizer, tmp_path / "m")
    (tmp_path / "grade.py").write_text(GRADE)
    truths = ["6", "null", "7", None]
    rows = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": f"{number}*7?"}],
            "reward_model": {"style": "rule", "ground_truth": truth},
        }
        for number, truth in enumerate(truths)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    baseline = "step" if "baseline" in name else "return"
    settings = [
        "algorithm.adv_estimator=rloo",
        "algorithm.adv_norm=true",
        f"algorithm.process_baseline={baseline}",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_penalty=low_var_kl",
        "algorithm.kl_ctrl.kl_coef=0.1",
        f"data.train_files={tmp_path}/rows.jsonl",
        "data.val_files=[]",
        "data.train_batch_size=4",
        "data.max_prompt_length=32",
        "data.max_response_length=12",
        f"actor_rollout_ref.model.path={tmp_path}/m",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "reward_model.enable=true",
        "reward_model.type=prm",
        f"reward_model.model.path={judge}",
        "reward_model.verifiable_reward_coef=2.0",
        "reward_model.modeling_reward_coef=0.5",
        f"+reward_model.scores.letters={tmp_path}/grade.py:grade",
        *(f"reward_model.{setting}" for setting in RUNS[name]),
        "trainer.total_training_steps=2",
        "trainer.save_freq=0",
        "trainer.logger=[jsonl]",
        "trainer.device=cpu",
        f"trainer.default_local_dir={tmp_path}/run",
        f"trainer.rollout_data_dir={tmp_path}/run/rollouts",
    ]
    run(load_config(settings))
    *_, step = read_metrics(tmp_path / "run")
    assert step["num_of_steps/min"] >= 1
    assert step["actor/grad_norm"] > 0
    file = pq.read_table(tmp_path / "run" / "rollouts" / "step_2.parquet").to_pylist()
    separators = [tokenizer.convert_tokens_to_ids(word) for word in WORDS]
    width = 12
    columns = {n: np.zeros((len(file), width)) for n in ("rewards", "scores", "process", "steps")}
    mask, found = np.zeros((len(file), width), dtype=bool), np.zeros((len(file), width))
    for number, line in enumerate(file):
        ids = line["response_ids"]
        length = len(ids)
        rule, process = np.array(line["reward/rule"]), np.array(line["reward/process"])
        mask[number, :length] = True
        columns["steps"][number, :length] = [i in separators for i in ids[:-1]] + [True]
        columns["process"][number, :length] = process
        columns["scores"][number, :length] = line["token_level_scores"]
        columns["rewards"][number, :length] = line["token_level_rewards"]
        found[number, :length] = line["advantages"]
        assert line["token_level_scores"] == pytest.approx((2 * rule + process).tolist(), abs=1e-6)
        unanswered = line.get("reward_failure") == "no_ground_truth"
        if "both" in name:
            truth = truths[int(line["prompt_text"].split("*")[0][-1])]
            assert unanswered == (truth in (None, "null"))
        assert not rule.any() if unanswered or "alone" in name else rule.sum() in (0.0, 1.0)
    uid = [line["uid"] for line in file]
    credit = RUNS[name][1].partition("=")[2]
    advantages, _ = pure_reference(
        *columns.values(), mask, uid, list(range(len(file))), credit, baseline
    )
    dense = np.zeros(mask.shape)
    for place, value in advantages.items():
        dense[place] = value
    np.testing.assert_allclose(found, whiten(dense, mask), atol=2e-4)
    assert np.abs(columns["rewards"] - columns["scores"]).max() > 0  # the KL of the second step
    if "both" in name:
        assert step["reward/rows_without_answer"] == 6
        answered = [line["acc"] for line in file if line["acc"] is not None]
        assert step["accuracy"] == pytest.approx(np.mean(answered))
        assert len(answered) == 6
