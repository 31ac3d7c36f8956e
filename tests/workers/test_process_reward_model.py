"""The process reward model: the ends of steps, its input, its scores and their credit."""

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
from hone.config import ConfigError
from hone.config.reward import RewardModelConfig
from hone.controller.worker import free_port
from hone.data.response_steps import TokenTextSplitter
from hone.data.steps import build_step_separator
from hone.models.tiny import character_tokenizer
from hone.protocol import DataProto
from hone.protocol.rows import object_array
from hone.trainer.ppo.credit import score
from hone.verl.dialect import load_config
from hone.workers.process_reward_model import ProcessRewardModelWorker
from tests.algorithms.advantages.references import pure_reference, whiten
from tests.data.tokenizers_of_bytes import byte_level_tokenizer, piece_tokenizer
from tests.workers.ranks import prm_settings, score_rank

WORDS = ("\n\n", ".\n\n")
TEXTS = ["ab.\n\ncd\n\nef", "abc", "ab\n\n"]


def save_prm(folder: Path, words: tuple[str, ...] = WORDS, tokenizer: Any = None) -> Path:
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
def prm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_prm(tmp_path_factory.mktemp("prm"))


def make_worker(prm: Path, *overrides: str) -> ProcessRewardModelWorker:
    worker = ProcessRewardModelWorker(load_config([*prm_settings(str(prm)), *overrides]))
    worker.init_model()
    return worker


def collated(*rows: tuple[list[int], list[int], list[int]]) -> DataProto:
    """Returns a batch of (prompt, response, response mask)."""
    return collate_outputs([AgentLoopOutput(*row) for row in rows], pad_token_id=0)


def batch_of(tokenizer: Any) -> DataProto:
    rows = []
    for number, text in enumerate(TEXTS):
        ids = tokenizer.encode(text, add_special_tokens=False)
        start = tokenizer.encode("1+" * (number + 1), add_special_tokens=False)
        rows.append((start, ids, [1] * len(ids)))
    return collated(*rows)


def plain_scores(prm: Path, rows: list[list[int]]) -> list[torch.Tensor]:
    """Returns p(good) − p(bad) at every token, by transformers over one right-padded batch."""
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(prm).eval()
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask.long()).logits
    scores = torch.softmax(logits, -1) @ torch.tensor([-1.0, 1.0])
    return [score[: len(row)] for score, row in zip(scores, rows, strict=True)]


def test_tokens_that_contain_the_separator_and_the_last_token_end_a_step(prm: Path) -> None:
    worker = make_worker(prm)
    steps = worker.compute_rm_score(batch_of(worker.tokenizer)).batch["step_mask"]
    # a b .\n\n c d \n\n e f  |  a b c  |  a b \n\n
    assert steps.int().tolist() == [
        [0, 0, 1, 0, 0, 1, 0, 1],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0],
    ]


@pytest.mark.parametrize("separator", ["\n", "split text"])
def test_blank_steps_are_not_steps(prm: Path, tmp_path: Path, separator: str) -> None:
    worker = make_worker(prm if separator == "\n" else save_prm(tmp_path / "plain", words=()))
    tokenizer = worker.tokenizer
    texts = ["\n\n" * 5, "ab\n\n\n\n \n\ncd", "\n\nab\n\n"]
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    rows[2].append(tokenizer.eos_token_id)
    prompt = tokenizer.encode("1+", add_special_tokens=False)
    batch = collated(*((prompt, ids, [1] * len(ids)) for ids in rows))
    actual = worker.compute_rm_score(batch).batch
    assert actual["step_mask"].sum(1).tolist() == [0, 2, 1]
    assert actual["step_rewards"][0].tolist() == [0.0] * actual["step_rewards"].shape[1]
    # The policy that calls a tool and writes blanks after its answer has written one step.
    ids = tokenizer.encode("ab\n\ncd\n\n\n\n", add_special_tokens=False)
    is_tool = [piece in "cd" for piece in tokenizer.convert_ids_to_tokens(ids)]
    mask = [int(not is_observation) for is_observation in is_tool]
    assert worker.compute_rm_score(collated((prompt, ids, mask))).batch["step_mask"].sum() == 1


def test_scores_of_packed_rows_equal_transformers_on_padded_rows(prm: Path) -> None:
    """The separator replaces each token that ends a step."""
    worker = make_worker(prm, "reward_model.credit_assignment=gamma-decay")
    batch = batch_of(worker.tokenizer)
    scores = worker.compute_rm_score(batch).batch["step_rewards"]
    texts = ["1+ab\ncd\ne\n", "1+1+ab\n", "1+1+1+ab\n"]
    rows = [worker.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    expected = plain_scores(prm, rows)
    for row, (prompt, ends) in enumerate([(2, [2, 5, 7]), (4, [2]), (6, [2])]):
        for end in ends:
            assert scores[row, end].item() == pytest.approx(
                expected[row][prompt + end].item(), abs=1e-5
            )
        assert scores[row].count_nonzero() == len(ends)


@pytest.mark.parametrize(
    "setting", ["micro_batch_size_per_gpu=1", "forward_max_token_len_per_gpu=20"]
)
def test_scores_do_not_depend_on_the_micro_batch(prm: Path, setting: str) -> None:
    whole, parts = make_worker(prm), make_worker(prm, f"reward_model.{setting}")
    batch = batch_of(whole.tokenizer)
    a, b = (w.compute_rm_score(batch).batch["step_rewards"] for w in (whole, parts))
    assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_that_shard_the_model_score_as_one(prm: Path, tmp_path: Path) -> None:
    """One rank has two rows, the other one row; both join the same forwards."""
    import torch.multiprocessing as mp

    worker = make_worker(prm)
    batch = batch_of(worker.tokenizer)
    torch.save([batch[:2], batch[2:]], tmp_path / "batch.pt")
    mp.spawn(score_rank, (2, free_port(), str(prm), str(tmp_path)), nprocs=2)
    parts = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for name, expected in worker.compute_rm_score(batch).batch.items():
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), expected)


def test_with_a_small_temperature_the_score_of_a_trajectory_is_its_worst_step(prm: Path) -> None:
    class Group:
        def call(self, method: object, data: DataProto) -> DataProto:
            return worker.compute_rm_score(data)

    def no_rule(data: DataProto) -> torch.Tensor:
        return torch.zeros(data.batch["responses"].shape)

    worker = make_worker(prm)
    config = RewardModelConfig(type="prm", credit_assignment=1e-5, modeling_reward_coef=0.5)
    for trajectory_rows in ([None, None, None], [None, 1, None]):
        batch = batch_of(worker.tokenizer)
        batch.non_tensor_batch["trajectory_row"] = object_array(trajectory_rows)
        scored = score(batch, no_rule, Group(), config).batch  # type: ignore[arg-type]
        steps = worker.compute_rm_score(batch).batch
        worst = steps["step_rewards"].masked_fill(~steps["step_mask"].bool(), 1).amin(1).tolist()
        scores = scored["token_level_scores"].sum(1).tolist()
        if trajectory_rows[1] is not None:  # rows 0 and 1 are one trajectory
            worst[:2], scores[:2] = [min(worst[:2])], [sum(scores[:2])]
        assert scores == pytest.approx([0.5 * reward for reward in worst], abs=1e-4)
        assert torch.equal(scored["reward/process"], scored["token_level_scores"])


def test_tool_tokens_are_context_and_end_no_step(prm: Path) -> None:
    worker = make_worker(prm, "reward_model.credit_assignment=gamma-decay")
    ids = worker.tokenizer.encode("a\n\nb\n\nc\n\n", add_special_tokens=False)
    # a and its separator are the policy's, b and its separator a tool's, c the policy's, the end a tool's.
    batch = collated((worker.tokenizer.encode("1+"), ids, [1, 1, 0, 0, 1, 0]))
    actual = worker.compute_rm_score(batch).batch
    assert actual["step_mask"].int().tolist() == [[0, 1, 0, 0, 1, 0]]
    (text,) = plain_scores(prm, [worker.tokenizer.encode("1+a\nb\n\n\n")])
    assert actual["step_rewards"][0, 4].item() == pytest.approx(text[-1].item(), abs=1e-5)
    without_policy_tokens = collated((worker.tokenizer.encode("1+"), ids, [0] * 6))
    assert not worker.compute_rm_score(without_policy_tokens).batch["step_mask"].any()


def test_rows_are_truncated_from_the_left_and_truncated_steps_are_dropped(
    prm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make_worker(prm, "reward_model.credit_assignment=gamma-decay")
    batch = batch_of(whole.tokenizer)  # the first row: 2 + 8 tokens, steps end at 2, 5 and 7
    for limit, ends in ((9, [2, 5, 7]), (5, [5, 7]), (1, [7])):
        short = make_worker(
            prm,
            "reward_model.credit_assignment=gamma-decay",
            f"reward_model.max_length={limit}",
        )
        actual = short.compute_rm_score(batch).batch
        assert actual["step_mask"][0].nonzero().squeeze(1).tolist() == ends
        warning = f"max_length={limit} truncates {3 - len(ends)} steps" if limit < 9 else ""
        assert warning in caplog.text
        text = short.tokenizer.encode("1+ab\ncd\ne\n", add_special_tokens=False)[-limit:]
        (expected,) = plain_scores(prm, [text])
        assert actual["step_rewards"][0, 7].item() == pytest.approx(expected[-1].item(), abs=1e-5)


def test_ids_outside_the_vocabulary_are_accepted(prm: Path) -> None:
    """A policy with padded embeddings may sample them. verl builds the worker from `config.reward_model`."""
    config = load_config(prm_settings(str(prm)))
    worker = ProcessRewardModelWorker(config.reward_model)
    worker.init_model()
    ids = worker.tokenizer.encode("ab\n\nc", add_special_tokens=False)
    batch = collated((worker.tokenizer.encode("1+"), [ids[0], 10**6, *ids[2:]], [1] * 4))
    assert worker.compute_rm_score(batch).batch["step_mask"].int().tolist() == [[0, 0, 1, 1]]


def test_an_escaped_line_break_is_a_line_break(prm: Path) -> None:
    worker = make_worker(prm)
    typed = make_worker(
        prm, r"reward_model.split_step_char='\n\n'", r"reward_model.step_separator='\n'"
    )
    batch = batch_of(worker.tokenizer)
    a, b = (w.compute_rm_score(batch).batch for w in (worker, typed))
    assert torch.equal(a["step_mask"], b["step_mask"])
    assert torch.equal(a["step_rewards"], b["step_rewards"])


def test_models_without_a_step_head_are_refused(prm: Path, tmp_path: Path) -> None:
    from hone.models.tiny import save_pretrained, tiny_lm

    with pytest.raises(ConfigError, match="step_separator='ab' has 2 tokens"):
        make_worker(prm, "reward_model.step_separator='ab'")
    tokenizer = character_tokenizer()
    base = save_pretrained(tiny_lm(len(tokenizer), hidden=16), tokenizer, tmp_path / "base")
    with pytest.raises(ConfigError, match=r"Qwen2ForCausalLM without the head.*hone train-prm"):
        make_worker(base)
    # With another vocabulary, a row may have more tokens than the policy's prompt and response.
    lengths = ("data.max_prompt_length=2", "data.max_response_length=4")
    narrow = make_worker(prm, "reward_model.forward_max_token_len_per_gpu=8", *lengths)
    with pytest.raises(
        ConfigError, match=r"more than reward_model\.forward_max_token_len_per_gpu=8"
    ):
        narrow.compute_rm_score(batch_of(tokenizer))


def plain_odds(folder: Path, texts: list[str]) -> list[float]:
    """Returns p(+) − p(-) after the last token of each text, by transformers."""
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
def test_a_causal_model_scores_a_step_by_the_logits_of_two_tokens(
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
    worker = make_worker(folder, tag, "reward_model.step_labels=['+','-']", SUMS)
    actual = worker.compute_rm_score(batch_of(worker.tokenizer)).batch["step_rewards"]
    after = separator.removeprefix("ки")
    dot = "." * (separator != "ки")  # in place of a token, or after the step's text
    starts = [f"1+ab{dot}ки", f"1+ab{dot}ки{after}cdки", "1+1+1+abки"]
    for place, expected in zip(((0, 2), (0, 5), (2, 2)), plain_odds(folder, starts), strict=True):
        assert actual[place].item() == pytest.approx(expected, abs=1e-5)
    words = [f"model.path={folder}", "data.prompt_format=raw", "data.step_labels=['+','-']"]
    words += [f"data.step_separator={separator!r}", "trainer.device=cpu"]
    scorer = StepScorer(load_config(words, config_name="prm_trainer"))
    (chances,) = scorer.score([Solution("1+", ["ab", "cd"], [None, None])])
    expected_odds = plain_odds(folder, ["1+abки", f"1+abки{after}cdки"])
    assert (2 * chances - 1).tolist() == pytest.approx(expected_odds, abs=1e-5)


def test_label_tokens_are_refused_for_a_classifier_and_must_be_two_single_tokens(prm: Path) -> None:
    with pytest.raises(ConfigError, match="is for causal models"):
        make_worker(prm, "reward_model.step_labels=['+','-']")
    for labels, reason in ((("+", "ab"), "has 2 tokens"), (("+", "+"), "two different tokens")):
        with pytest.raises(ConfigError, match=reason):
            build_step_separator(character_tokenizer(), "a", labels)


def save_policy_tokenizer(folder: Path, tokenizer: Any) -> str:
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return f"reward_model.model.input_tokenizer={folder}"


SUMS = "reward_model.credit_assignment=gamma-decay"
PROMPT = [{"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize("make", [byte_level_tokenizer, piece_tokenizer])
def test_with_another_vocabulary_steps_are_split_by_characters(
    prm: Path, tmp_path: Path, make: Callable[[], Any]
) -> None:
    """The prompt has the reward model's template; each step is encoded separately."""
    policy = make()
    worker = make_worker(prm, save_policy_tokenizer(tmp_path / "policy", policy), SUMS)
    texts = ["so a.\n\nx é 😀\n\nend", "\n\na\n\n\n\nb", "abc </s>"]  # with blank steps
    rows = [policy.encode(text, add_special_tokens=False) for text in texts]
    rows[0].append(policy.eos_token_id)
    batch = collated(*((policy.encode("q?"), ids, [1] * len(ids)) for ids in rows))
    batch.non_tensor_batch["raw_prompt"] = object_array([PROMPT] * 3)
    actual = worker.compute_rm_score(batch).batch
    prompt = worker.tokenizer.apply_chat_template(
        PROMPT, add_generation_prompt=True, tokenize=False
    )
    inputs = [
        [*"so a.", "\n", *"x é 😀", "\n", *"end", "\n"],
        ["a", "\n", "b", "\n"],
        # "</s>" is a special token of the reward model, which a policy must not be able to write.
        [*("abc </s>" if make is byte_level_tokenizer else "abc"), "\n"],
    ]
    vocabulary, unknown = worker.tokenizer.get_vocab(), worker.tokenizer.unk_token_id
    ids = [[vocabulary.get(c, unknown) for c in [*prompt, *row]] for row in inputs]
    expected = plain_scores(prm, ids)
    for row, tokens in enumerate(inputs):
        positions = [i for i, token in enumerate(tokens) if token == "\n"]
        columns = actual["step_mask"][row].nonzero().squeeze(1)
        pieces = TokenTextSplitter(policy)(rows[row])
        if row < 2:
            ends = [sum(map(len, pieces[: column + 1])) for column in columns.tolist()]
            assert ends == ([7, 14, 17] if row == 0 else [5, 8])
        scores = actual["step_rewards"][row][columns]
        assert torch.allclose(
            scores, expected[row][len(prompt) + torch.tensor(positions)], atol=1e-5
        )


def test_with_a_superset_of_the_policys_vocabulary_ids_are_read(prm: Path, tmp_path: Path) -> None:
    smaller = save_policy_tokenizer(tmp_path / "policy", character_tokenizer(words=WORDS))
    tokenizer = character_tokenizer(words=WORDS)
    tokenizer.add_tokens(["<step>"])
    save_prm(tmp_path / "larger", tokenizer=tokenizer)
    worker = make_worker(tmp_path / "larger", smaller, "reward_model.step_separator=<step>")
    steps = worker.compute_rm_score(batch_of(tokenizer)).batch[
        "step_mask"
    ]  # no raw_prompt is needed
    assert steps.sum(1).tolist() == [3, 1, 1]


def test_without_a_separator_token_steps_are_split_by_characters(tmp_path: Path) -> None:
    """Otherwise a whole response would be one step."""
    plain = save_prm(tmp_path / "plain", words=())
    worker = make_worker(plain)
    ids = worker.tokenizer.encode("a\n\nb", add_special_tokens=False)
    batch = collated((worker.tokenizer.encode("1+"), ids, [1] * 4))
    actual = worker.compute_rm_score(batch).batch
    assert actual["step_mask"].int().tolist() == [[0, 0, 1, 1]]


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
def test_advantages_of_a_run_equal_the_papers_formula(prm: Path, tmp_path: Path, name: str) -> None:
    """Recomputes them from the rollout file; half of the rows have no ground truth."""
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
        f"reward_model.model.path={prm}",
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
    mask, actual = np.zeros((len(file), width), dtype=bool), np.zeros((len(file), width))
    for number, line in enumerate(file):
        ids = line["response_ids"]
        length = len(ids)
        rule, process = np.array(line["reward/rule"]), np.array(line["reward/process"])
        mask[number, :length] = True
        columns["steps"][number, :length] = [i in separators for i in ids[:-1]] + [True]
        columns["process"][number, :length] = process
        columns["scores"][number, :length] = line["token_level_scores"]
        columns["rewards"][number, :length] = line["token_level_rewards"]
        actual[number, :length] = line["advantages"]
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
    np.testing.assert_allclose(actual, whiten(dense, mask), atol=2e-4)
    assert np.abs(columns["rewards"] - columns["scores"]).max() > 0  # the KL of the second step
    if "both" in name:
        assert step["reward/rows_without_answer"] == 6
        answered = [line["acc"] for line in file if line["acc"] is not None]
        assert step["accuracy"] == pytest.approx(np.mean(answered))
        assert len(answered) == 6
