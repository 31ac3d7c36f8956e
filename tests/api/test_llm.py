"""`hone.LLM`: every kind of prompt, sampling, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hone
from hone.config import ConfigError
from hone.trainer.job_files import GenerationError


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[hone.LLM]:
    with hone.LLM(tiny) as llm_:
        yield llm_


def test_each_prompt_has_a_response_with_text_tokens_and_log_probs(llm: hone.LLM) -> None:
    first, second = llm.generate(["ab", "cd"], max_tokens=5)
    assert (first.prompt, second.prompt) == ("ab", "cd")
    for response in (first, second):
        assert len(response.token_ids) == len(response.log_probs) <= 5
        assert response.text == llm.tokenizer.decode(response.token_ids, skip_special_tokens=True)
        assert response.finish_reason in ("stop", "length")
        assert all(log_prob <= 0 for log_prob in response.log_probs)
        assert [response.text] == [output.text for output in response.outputs]


def test_text_messages_and_token_ids_of_one_prompt_give_the_same(llm: hone.LLM) -> None:
    (text,) = llm.generate("ab", max_tokens=4)
    chat = [{"role": "user", "content": "ab"}]
    ids = text.prompt_token_ids
    for same in (chat, [chat], ids, [ids], torch.tensor(ids), torch.tensor([ids])):
        (other,) = llm.generate(same, max_tokens=4)  # type: ignore[arg-type]
        assert other.token_ids == text.token_ids
    assert llm.chat(chat, max_tokens=4)[0].token_ids == text.token_ids
    assert llm.generate("ab", prompt_format="raw")[0].prompt_token_ids == llm.tokenizer.encode("ab")


def test_samples_differ_repeat_and_follow_the_seed(llm: hone.LLM) -> None:
    def texts(**sampling: Any) -> list[str]:
        (response,) = llm.generate("ab", n=4, max_tokens=12, top_p=1.0, top_k=-1, **sampling)
        return [output.text for output in response.outputs]

    assert len(set(texts())) == 4
    assert texts() == texts()
    assert texts(seed=7) != texts()
    assert len(set(texts(temperature=0))) == 1


def test_the_seed_of_the_rollout_has_priority(tiny: Path, llm: hone.LLM) -> None:
    sampling: Any = {"max_tokens": 12, "top_p": 1.0, "top_k": -1}
    with hone.LLM(tiny, **{"rollout.seed": 7}) as seeded_llm:
        assert seeded_llm.generate("ab", **sampling) == llm.generate("ab", seed=7, **sampling)
        assert seeded_llm.generate("ab", **sampling) != llm.generate("ab", **sampling)


def test_a_stop_string_ends_a_response(llm: hone.LLM) -> None:
    (greedy,) = llm.generate("ab", temperature=0, max_tokens=8, ignore_eos=True)
    (interrupted,) = llm.generate(
        "ab", temperature=0, max_tokens=8, ignore_eos=True, stop=greedy.text[2]
    )
    assert interrupted.finish_reason == "stop"
    assert len(interrupted.token_ids) <= 3


def test_what_does_not_fit_or_exist_is_refused(llm: hone.LLM, tiny: Path) -> None:
    for max_tokens in (0, -3):
        with pytest.raises(GenerationError, match=f"max_tokens={max_tokens}; use 1 or more"):
            llm.generate("ab", max_tokens=max_tokens)
    with pytest.raises(GenerationError, match=r"70 tokens and max_tokens=1 do not fit.*64"):
        llm.generate([5] * 70)
    with pytest.raises(GenerationError, match="max_tokens=100 do not fit"):
        llm.generate("ab", max_tokens=100)
    with pytest.raises(GenerationError, match="n=0"):
        llm.generate("ab", n=0)
    with pytest.raises(ValueError, match="beam_width"):
        llm.generate("ab", beam_width=3)
    with pytest.raises(GenerationError, match="0 tokens"):
        llm.generate("", prompt_format="raw")
    with pytest.raises(GenerationError, match="not 3"):
        llm.generate([[1], 3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"top_q.*top_p"):
        hone.LLM(tiny, top_q=1)


def test_a_response_ends_where_the_models_positions_end(llm: hone.LLM) -> None:
    (response,) = llm.generate([5] * 60, ignore_eos=True)
    assert len(response.token_ids) == 4


def test_it_runs_inside_a_running_event_loop(llm: hone.LLM) -> None:
    async def cell() -> str:
        return llm.generate("ab", max_tokens=3)[0].text

    assert asyncio.run(cell()) == llm.generate("ab", max_tokens=3)[0].text


def test_a_closed_one_says_so_and_closes_again(tiny: Path) -> None:
    llm = hone.LLM(tiny)
    llm.close()
    llm.close()
    with pytest.raises(GenerationError, match="closed"):
        llm.generate("ab")


def test_arrays_in_a_list_are_prompts_and_a_list_of_numpy_integers_is_one(llm: hone.LLM) -> None:
    (text,) = llm.generate("ab", max_tokens=4)
    ids = text.prompt_token_ids
    arrays = [np.array(ids), torch.tensor(ids)]
    assert [r.token_ids for r in llm.generate(arrays[:1], max_tokens=4)] == [text.token_ids]  # type: ignore[arg-type]
    assert len(llm.generate(arrays, max_tokens=4)) == 2  # type: ignore[arg-type]
    assert llm.generate(list(np.array(ids)), max_tokens=4)[0].token_ids == text.token_ids


def test_one_message_without_its_list_is_refused(llm: hone.LLM) -> None:
    """Its keys, `role` and `content`, would be two prompts."""
    for wrong in ({"role": "user", "content": "hi"}, None, 5, b"hi"):
        with pytest.raises(GenerationError, match="lists of messages"):
            llm.chat(wrong, max_tokens=4)  # type: ignore[arg-type]
